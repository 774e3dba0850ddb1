"""What all tests share: Hypothesis profiles, tiny random models, and the judges."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from minicb import Engine, SamplingParams
from minicb.plan import Event
from minicb.scheduler import Scheduler
from minicb.swap import HostCache

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("default", max_examples=30, **COMMON)
settings.register_profile("thorough", max_examples=300, **COMMON)
# HYPOTHESIS_PROFILE=thorough runs ten times the examples.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

torch.set_num_threads(1)  # the models are too small for two, which only spin where something else runs

CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
# 4 query and 2 KV heads; an initializer_range at which greedy outputs vary from token to token.
TINY = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_model("llama", hidden_size=96, …) -> folder of a tiny random float32 checkpoint without tokenizer.

    Equal arguments give the same folder, so don't change what lies in it: copy it.
    """
    made: dict[str, Path] = {}

    def make(family: str = "llama", seed: int = 0, **overrides) -> Path:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in made:
            config = CONFIGS[family](**(TINY | overrides))
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
            with torch.no_grad():  # biases and norms start as constants, which would hide mistakes
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny(make_model: MakeModel) -> Path:
    """The tiny rig: Llama, 2 layers, hidden 64, 4 query and 2 KV heads, vocabulary 32, no EOS."""
    return make_model("llama")


@pytest.fixture(scope="session")
def byte_model(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a byte-level tokenizer: 256 bytes, BOS 256 and EOS 257, and a chat template."""
    folder = tmp_path_factory.mktemp("bytes")
    shutil.copytree(make_model("llama", vocab_size=258), folder, dirs_exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def compiled_engine(tiny: Path) -> Iterator[Engine]:
    """One compiled engine for all tests that need one, because compiling takes seconds.

    float32, 39 blocks of 4 tokens, 8 requests, 24 tokens a step. Leave it empty.
    """
    yield Engine(tiny, device="cpu", block_size=4, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=24)


class LateHostCache(HostCache):
    """Copies as late as a busy bus may: when something waits for them.

    A real copy is done at any time between being queued and being waited for. HostCache's on a CPU are done at once,
    these at the end. Code that is right with both is right with any.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _copy(self, destination, source):
        self.queued.append((destination, source))

    def _wait_for_copies(self):
        for destination, source in self.queued:
            destination.copy_(source)
        self.queued.clear()


def transformers_greedy(folder: Path, prompt: list[int], max_tokens: int, dtype=torch.float32) -> list[int]:
    """Greedy tokens of transformers, which computes all tokens anew for each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(max_tokens):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def take_events(scheduler: Scheduler) -> list[Event]:
    """What happened since the last call."""
    events, scheduler.events = scheduler.events, []
    return events


def check_invariants(engine: Engine) -> None:
    engine.scheduler.check_invariants()


def run_to_end(engine: Engine, max_steps: int = 10_000) -> dict[str, object]:
    """Step until nothing is left, checking all invariants; the last output of each request."""
    last = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return last
        for output in engine.step():
            last[output.request_id] = output
        check_invariants(engine)
    raise AssertionError(f"not finished after {max_steps} steps")


def eager(folder: Path, **kwargs) -> Engine:
    """An engine that compiles nothing, in float64, where ties don't happen."""
    defaults = {"device": "cpu", "dtype": "float64", "enforce_eager": True, "block_size": 4, "num_blocks": 40}
    return Engine(folder, **(defaults | kwargs))


def greedy(max_tokens: int = 8, **kwargs) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **kwargs)
