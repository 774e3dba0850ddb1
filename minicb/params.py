"""Sampling parameters: how a caller wants tokens to be chosen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

from minicb.checks import check, check_int, check_real, show

MAX_SAMPLES = 16384  # of a request, as in vLLM


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names, ranges and meaning follow vLLM.

    n: number of samples of the prompt. Sample i has the seed `seed` + i. Must be 1 if temperature is 0.
    temperature: divides the logits; 0 takes the most likely token (greedy).
    top_p: keep the most likely tokens whose probabilities add up to it, in (0, 1].
    top_k: keep the k most likely tokens. 0, -1, and the vocabulary's size or more keep all.
    min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
    seed: makes the request reproducible beside any others; None draws one from the engine's generator.
    max_tokens: most output tokens; None runs to the end of the model.
    min_tokens: before this many output tokens, EOS and stop_token_ids are not sampled and stop is not looked for.
    stop: strings that end the request. The text is cut before the string that is complete first.
    stop_token_ids: end the request as EOS does. The token stays in token_ids, but is not in the text.
    include_stop_str_in_output: the stop string, stop token or EOS that ends the request is in the text.
    skip_special_tokens: leave special tokens out of the text.
    ignore_eos: treat EOS as any other token. stop and stop_token_ids still count.
    logprobs: report this many of the most likely tokens for each output token, beside the sampled one; -1 reports
        all. Log probabilities are of the model's raw logits, before any other parameter, as by default in vLLM.
    presence_penalty: subtracted from the logit of each token of the output so far, in [-2, 2], as in OpenAI's API.
    frequency_penalty: subtracted from the same logits for each time that the token is in the output, in [-2, 2].
    repetition_penalty: divides the positive logits and multiplies the others of all tokens of prompt and output
        so far (CTRL, 2019); above 0, 1 does nothing.
    logit_bias: token id -> number that is added to its logit.
    allowed_token_ids: the only tokens that may be sampled; None allows all.
    They apply in this order: logit_bias, repetition, frequency and presence penalty, allowed_token_ids, the ban of
    min_tokens, temperature, min_p, top_k, top_p.

    ValueError names a field that is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_real("temperature", self.temperature, lambda value: 0 <= value < math.inf, "a finite number >= 0")
        check_real("top_p", self.top_p, lambda value: 0 < value <= 1, "in (0, 1]")
        check_real("min_p", self.min_p, lambda value: 0 <= value <= 1, "in [0, 1]")
        for name in ("presence_penalty", "frequency_penalty"):
            check_real(name, getattr(self, name), lambda value: -2 <= value <= 2, "in [-2, 2]")
        check_real("repetition_penalty", self.repetition_penalty, lambda v: 0 < v < math.inf, "a finite number > 0")
        self._set_int("top_k", minimum=-1)
        self._set_int("min_tokens", minimum=0)
        self._set_int("n", minimum=1, below=MAX_SAMPLES + 1)
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 where temperature is 0, as all samples would be the same, not {self.n}")
        if self.logprobs is not None:
            self._set_int("logprobs", minimum=-1)
        if self.seed is not None:
            self._set_int("seed", minimum=-(2**63), below=2**63)
        if self.max_tokens is not None:
            self._set_int("max_tokens", minimum=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check((value := getattr(self, name)) is True or value is False, name, "True or False", value)
        for name in ("stop_token_ids", "allowed_token_ids"):
            if not isinstance(value := getattr(self, name), (list, tuple, set, frozenset, NoneType)):
                raise ValueError(f"{name} must be a list of token ids or None, not {show(value)}")
            for token_id in value or ():
                check_int(name, token_id, minimum=0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must have at least 1 token id")
        if not isinstance(self.stop, (str, list, tuple, NoneType)):
            raise ValueError(f"stop must be a string, a list of strings or None, not {show(self.stop)}")
        for string in self.stop_strings:
            check(string and isinstance(string, str), "stop", "made of strings with at least 1 character", string)
        if not isinstance(self.logit_bias, (Mapping, NoneType)):
            raise ValueError(f"logit_bias must be a dict of token ids to numbers or None, not {show(self.logit_bias)}")
        for token_id, bias in (self.logit_bias or {}).items():
            check_int("logit_bias: token id", token_id, minimum=0)
            check_real(f"logit_bias of token {token_id}", bias, math.isfinite, "a finite number")

    @property
    def stop_strings(self) -> Sequence[str]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    def _set_int(self, name: str, minimum: int, below: int | None = None) -> None:
        object.__setattr__(self, name, check_int(name, getattr(self, name), minimum, below))


@dataclass(frozen=True, kw_only=True)
class SchedulingParams:
    """What the scheduling policies know about a request.

    priority: lower is served first, under the policy "priority".
    client: for whom it is; the policy "fair" shares among clients.
    expected_output_len: the caller's guess in tokens, by which "sjf" orders; None leaves the guess to the policy.

    A value out of range is a ValueError that names the field.
    """

    priority: int = 0
    client: str = "default"
    expected_output_len: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority", check_int("priority", self.priority, minimum=-(2**63), below=2**63))
        check(isinstance(self.client, str), "client", "a string", self.client)
        if self.expected_output_len is not None:
            expected = check_int("expected_output_len", self.expected_output_len, minimum=1, below=2**63)
            object.__setattr__(self, "expected_output_len", expected)
