"""Text and tokens: the tokenizer of a model, and the text of a request while it runs."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minicb.checks import check_int, show
from minicb.request import Request, RequestState

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HELD = 16  # most tokens that are held back because their text may change, beside the pieces of a character
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # a single byte in sentencepiece-style vocabularies


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, None if it has none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def read_eos(folder: Path, hf: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> frozenset[int]:
    """All EOS ids of the three sources; each may name one or a list. Chat models often end their turns
    with another token than their pre-training documents."""
    generation = folder / "generation_config.json"
    sources: list[Any] = [hf.eos_token_id]
    if generation.exists():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    ids = [i for source in sources for i in (source if isinstance(source, list) else [source])]
    return frozenset(i for i in ids if type(i) is int and 0 <= i < vocab_size)


def read_prompt(
    tokenizer: PreTrainedTokenizerBase | None, prompt: Any, vocab_size: int
) -> tuple[str | None, list[int]]:
    """The text of a prompt, None if it has none, and its token ids.

    prompt: text, or token ids in a list, an array, a tensor or an iterator; or, as in vLLM, a dict with the text as
        "prompt", the token ids as "prompt_token_ids", or both.
    """
    given = (
        prompt if isinstance(prompt, Mapping) else {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    )
    if not given or given.keys() - {"prompt", "prompt_token_ids"}:
        raise ValueError(
            f'a prompt that is a dict must have "prompt" or "prompt_token_ids", and no more, not {show(prompt)}'
        )
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if not isinstance(text, (str, NoneType)):
        raise ValueError(f"prompt must be text, not {show(text)}")
    if token_ids is None and text is not None:
        token_ids = encode(tokenizer, text)
    token_ids = read_list("prompt", token_ids)
    return text, [check_int("prompt token id", i, minimum=0, below=vocab_size) for i in token_ids]


def read_list(name: str, values: Any) -> list[Any]:
    """A list from a sequence, an iterator, an array or a tensor. ValueError for anything else, text included."""
    if hasattr(values, "tolist"):  # NumPy, torch
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, Iterator)):
        raise ValueError(f"{name} must be text or token ids, not {show(values)}")
    return list(values)


def encode(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    """Token ids of a prompt. ValueError if there is no tokenizer, or the text is not valid Unicode."""
    if tokenizer is None:
        raise ValueError("prompt is text, but the model has no tokenizer: give token ids, or name a tokenizer")
    try:
        return list(tokenizer(text)["input_ids"])
    except TypeError as error:  # a lone surrogate
        raise ValueError(f"prompt {show(text)} is not valid Unicode text") from error


def text_of(tokenizer: Any, request: Request) -> "StreamedText":
    """The text of a request's output, made at first use."""
    if request.text is None:
        skip = request.params.skip_special_tokens
        request.text = StreamedText(tokenizer, request.token_ids, request.num_prompt_tokens, request.stop_strings, skip)
    return request.text


def output_text(tokenizer: PreTrainedTokenizerBase | None, request: Request) -> str:
    """Text of a request's output so far. Its new log probabilities get the texts of their tokens."""
    if tokenizer is None:
        return ""
    name_tokens(tokenizer, request)
    text = text_of(tokenizer, request)
    if request.state is not RequestState.FINISHED:
        return text.shown()
    stop, include = request.stop_reason, request.params.include_stop_str_in_output
    if request.finish_reason == "stop" and isinstance(stop, str):
        return text.before_stop + stop * include
    is_cut = request.finish_reason == "stop" and not include
    if is_cut and request.logprobs:
        request.logprobs[-1][request.token_ids[-1]].is_text = False
    return text.whole(num_cut=int(is_cut))


def name_tokens(tokenizer: Any, request: Request) -> None:
    """Fill in decoded_token in the new entries: what the token adds to the text of the tokens before.

    A token is decoded behind the last few, and their text is cut off. Only the last piece of a character adds text.
    After HELD tokens without a character, bytes that are none are text too. A special token that is left out of the
    text has its name. (A run of single bytes may prove to be no text when its first characters are named already.)
    """
    skip, (num_known, context, num_named) = request.params.skip_special_tokens, request.named
    for entry in request.logprobs[num_known:]:
        for token, logprob in entry.items():
            text = decode(tokenizer, [*context, token], skip)
            text = text.rstrip(REPLACEMENT) if len(context) < HELD else text.removesuffix(REPLACEMENT)
            logprob.decoded_token = text[num_named:]
            if (len(context) == HELD or not logprob.decoded_token) and not decode(tokenizer, [token, token], skip):
                logprob.decoded_token, logprob.is_text = decode(tokenizer, [token], False), False
        token, sampled = next(iter(entry.items()))
        if sampled.is_text:
            num_named += len(sampled.decoded_token or "")
            context, num_named = _next_context(tokenizer, [*context, token], num_named, skip)
    request.named = len(request.logprobs), context, num_named


def _next_context(tokenizer: Any, context: list[int], num_named: int, skip: bool) -> tuple[list[int], int]:
    """The end of the context that the next tokens need, and how many of its characters have been named."""
    text = decode(tokenizer, context, skip)
    for size in (1, 2, 3, 4, HELD):  # a character has at most 4 pieces
        end = decode(tokenizer, context[-size:], skip)
        if not (REPLACEMENT in end or text.endswith(REPLACEMENT)):
            break
    return context[-size:], num_named + len(end) - len(text)


class StreamedText:
    """The text of a growing list of tokens, in constant time for each. Shown text only grows, and it ends as the
    tokenizer's text of all tokens.

    A token's text depends on its neighbours: "▁a" is "a" at the beginning and " a" behind another token. So new
    tokens are decoded together with settled ones, and the text of those is cut off. Text that may still change is
    held back: the pieces of a character, and a run of single bytes. A run becomes characters, or, if one of its
    bytes is out of place, one replacement character for each byte. (tokenizers' DecodeStream shows the characters
    of a run at once, and fails when a later byte is out of place.) At most HELD tokens are held back: a longer run
    keeps the characters that were shown.

    tokens: the caller's list, which may grow. start: index of the first output token. stop: stop strings.
    skip: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, tokens: list[int], start: int = 0, stop: Sequence[str] = (), skip: bool = True):
        self._decode = partial(decode, tokenizer, skip=skip)
        self._tokenizer, self._token_ids, self._stop = tokenizer, tokens, stop
        self._start = self._num_seen = start  # tokens before _num_seen have been looked at
        self._visible: list[int] = []  # the seen tokens that have a text; the others end no run, and are no context
        self._settled = ""  # text of the first _num_settled visible tokens, which won't change any more
        self._num_settled = 0
        self._piece = ""  # REPLACEMENT if their text ends in a piece of a character, which _settled leaves out
        self._context = 0  # new tokens are decoded together with the visible ones from here on
        self._searched = 0  # characters of the text that complete no stop string
        self.before_stop = ""  # the text before a stop string, once one is found

    def shown(self) -> str:
        """Text so far, without what may still change or be the beginning of a stop string."""
        self._settle_all()
        text = self._settled
        return text[: len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)]

    def whole(self, num_cut: int = 0) -> str:
        """Text of all tokens but the last num_cut, as if none followed."""
        end = len(self._token_ids) - num_cut
        if not self._settled:  # the usual case: nobody has asked before, and decoding at once is faster
            text = self._decode(self._token_ids[self._start : end])
            if REPLACEMENT not in text:
                return text
        self._settle_all(end)
        return self._settled + self._new_text()

    def find_stop(self, may_stop: bool) -> str | None:
        """The stop string that is complete first. To be called after each token.

        It counts if it ends in text that is new since the last call. may_stop=False: a string that is complete by now
        counts neither now nor later.
        """
        self._settle_all()
        text = self._settled
        if 0 < len(self._visible) - self._num_settled < HELD + 4:  # a longer run is no text
            # A piece of a character is not text yet. A run of bytes is: in Llama 2, a line break is one.
            text += self._new_text().rstrip(REPLACEMENT)
        if may_stop:
            places = [(text.find(stop, max(0, self._searched - len(stop) + 1)), stop) for stop in self._stop]
            if found := [(begin, stop) for begin, stop in places if begin >= 0]:
                begin, stop = min(found, key=lambda place: place[0] + len(place[1]))
                self.before_stop = text[:begin]
                return stop
        self._searched = len(text)
        return None

    def _settle_all(self, end: int | None = None) -> None:
        """Take in new tokens one by one, so that the result doesn't depend on the number of calls."""
        while self._num_seen < (len(self._token_ids) if end is None else end):
            token_id = self._token_ids[self._num_seen]
            self._num_seen += 1
            if self._decode([token_id, token_id]):  # twice, because a decoder may drop the first space
                self._visible.append(token_id)
                self._settle()

    def _settle(self) -> None:
        """Settle the text of the visible tokens, unless it may still change."""
        num_held = len(self._visible) - self._num_settled
        is_byte = BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(self._visible[-1]) or "")
        # In a run of HELD bytes the last character is complete within 4 more, or the run is no text.
        if is_byte and not HELD <= num_held < HELD + 4:
            return
        text, context, piece = self._new_text(), self._num_settled, ""
        if (is_byte and REPLACEMENT in text) or (num_held < HELD and text.endswith(REPLACEMENT)):
            return
        if text.endswith(REPLACEMENT):
            # The last tokens may be the first bytes of a character, of 4 at most. Earlier text won't change.
            text, context, piece = text[:-1], len(self._visible) - 4, REPLACEMENT
        self._settled += text
        self._num_settled, self._context, self._piece = len(self._visible), context, piece

    def _new_text(self) -> str:
        """The text that the visible tokens add to the settled text."""
        if len(self._visible) == self._num_settled and not self._piece:
            return ""
        before = self._decode(self._visible[self._context : self._num_settled]).removesuffix(self._piece)
        text = self._decode(self._visible[self._context :])
        return text[len(before) :] if text.startswith(before) else self._decode(self._visible[self._num_settled :])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop string begins, but doesn't end."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if stop[n - 1] == text[-1] and text.endswith(stop[:n])), 0)


def decode(tokenizer: Any, token_ids: Sequence[int], skip: bool = True) -> str:
    """Text of the tokens. skip: without special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip))
