"""The engine: requests in, outputs out, one step at a time."""

import itertools
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from minicb.args import EngineArgs
from minicb.attention import gather_attention, paged_attention
from minicb.blocks import BlockPool
from minicb.checks import check, check_int
from minicb.core import EngineCore
from minicb.device import choose_block_size, choose_device, read_dtype
from minicb.interrupts import hold_ctrl_c
from minicb.loader import find_folder, load_model, read_config
from minicb.memory import Memory
from minicb.observe.metrics import Metrics
from minicb.outputs import CompletionOutput, LazyOutput, RequestOutput
from minicb.params import SamplingParams, SchedulingParams
from minicb.request import Request
from minicb.runner import ModelRunner
from minicb.scheduler import Scheduler
from minicb.text import load_tokenizer, output_text, read_eos, read_prompt, text_of

logger = logging.getLogger("minicb")

Prompt = str | Sequence[int] | Mapping[str, Any]  # see `read_prompt`


class Engine:
    """Online inference with one model. Requests come and go at any time between two steps.

    model: folder or Hugging Face id (config.json, *.safetensors, tokenizer).
    engine_args: the fields of `EngineArgs` in args.py, with the same defaults. ValueError names one out of range.
    """

    def __init__(self, model: str | Path, **engine_args: Any):
        self.args = args = EngineArgs(**engine_args)
        device, folder = choose_device(args.device), find_folder(model)
        config, hf = read_config(folder)
        self.max_model_len = args.max_model_len or config.max_model_len
        if self.max_model_len > config.max_model_len:
            raise ValueError(f"max_model_len is {args.max_model_len}, the model's config allows {config.max_model_len}")
        dtype = read_dtype(args.dtype, hf.dtype)
        if dtype is torch.float64 and not args.enforce_eager:
            raise ValueError("dtype float64 needs enforce_eager=True: FlexAttention's kernels have no float64")
        if not logger.hasHandlers():  # the application has no logging: show what takes so long
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(logging.INFO)
        self.vocab_size = config.vocab_size
        self.tokenizer = load_tokenizer(folder if args.tokenizer is None else find_folder(args.tokenizer))
        if args.tokenizer is not None and self.tokenizer is None:
            raise ValueError(f"tokenizer {str(args.tokenizer)!r} has no tokenizer files")
        self.eos_token_ids = read_eos(folder, hf, self.tokenizer, self.vocab_size)
        self.runner = ModelRunner(
            load_model(
                folder,
                config,
                hf,
                attention=gather_attention if args.enforce_eager else paged_attention,
                dtype=dtype,
                device=device,
                load_format=args.load_format,
                seed=args.seed,
            ),
            device=device,
            dtype=dtype,
            block_size=choose_block_size(args.block_size, device, args.enforce_eager),
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_blocks=args.num_blocks,
            gpu_memory_utilization=args.gpu_memory_utilization,
            swap_space=args.swap_space,
            num_cpu_blocks=args.num_cpu_blocks,
            enforce_eager=args.enforce_eager,
        )
        self.metrics = Metrics(keep=10_000)
        self.core = EngineCore(self.make_scheduler(), self.runner, args.clock, [self.metrics])
        self._seeds, self._numbers = random.Random(args.seed), itertools.count()

    def make_scheduler(self, num_blocks: int | None = None, **changes: Any) -> Scheduler:
        """A new scheduler for this engine's runner, with an empty pool.

        num_blocks: size of the pool; None takes all blocks of the runner.
        changes: arguments of `Engine` for the scheduler, where they differ from this engine's.
        ValueError names a size that is larger than the runner's.
        """
        args, runner = replace(self.args, **changes), self.runner
        num_blocks = check_int("num_blocks", num_blocks or runner.num_blocks, minimum=2, below=runner.num_blocks + 1)
        sizes = {}
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            most = getattr(self.args, name) or self.max_model_len
            sizes[name] = check_int(name, getattr(args, name) or most, minimum=1, below=most + 1)
        pool = BlockPool(num_blocks, runner.block_size, args.enable_prefix_caching)
        host_pool = BlockPool(runner.num_cpu_blocks + 1, runner.block_size)
        memory = Memory(pool, host_pool, args.preemption_mode, runner.costs)
        return Scheduler(memory, args.make_policy(), batching=args.batching, **sizes)

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        scheduling: SchedulingParams | None = None,
    ) -> Request:
        """Check a prompt and its parameters without submitting it. ValueError names the field that is wrong.

        Returns the request of the first sample. Its `samples` has the requests of all samples.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        check(request_id is None or isinstance(request_id, str), "request_id", "a string", request_id)
        text, token_ids = read_prompt(self.tokenizer, prompt, self.vocab_size)
        name, eos, samples = request_id or "", self.eos_token_ids, list[Request]()
        for index in range(params.n):
            seed = self._seeds.getrandbits(63)
            sample = Request(
                name, token_ids, params, scheduling, prompt=text, eos_token_ids=eos, seed=seed, index=index
            )
            if sample.stop_strings:  # `Request.ending` searches the text for them
                text_of(self.tokenizer, sample)
            sample.samples = samples
            samples.append(sample)
        self._check(samples[0])
        return samples[0]

    def _check(self, request: Request) -> None:
        """Raise ValueError unless the model, its tokenizer and the KV cache can serve the request."""
        params = request.params
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(params, name) or ():
                check_int(name, token_id, minimum=0, below=self.vocab_size)
        if request.stop_strings and self.tokenizer is None:
            raise ValueError("stop has strings, but the model has no tokenizer: give stop_token_ids, or a tokenizer")
        banned = request.eos_token_ids | request.stop_token_ids if params.min_tokens else frozenset()
        if banned.issuperset(params.allowed_token_ids or range(self.vocab_size)):
            raise ValueError(f"min_tokens is {params.min_tokens}, but stop_token_ids leaves no token to sample")
        self.scheduler.check(request)

    def submit(self, request: Request) -> str:
        """Accept a request that make_request made, with all samples of its prompt. Returns its id."""
        given = request.request_id
        for name in [given] if given else map(str, self._numbers):
            for sample in request.samples:
                sample.request_id = f"{name}/{sample.index}" if sample.index else name
            if given or not any(self.core.is_used(sample.request_id) for sample in request.samples):
                break
        self.core.add(request)
        return request.request_id

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "default",
        expected_output_len: int | None = None,
    ) -> str:
        """Submit a prompt, text or token ids. Returns the request's id, a new one if none is given.

        priority, client, expected_output_len: see SchedulingParams.
        Sample i > 0 of the prompt (SamplingParams.n) has the id "request_id/i" in metrics and traces.
        ValueError: the prompt is empty, has an id outside the vocabulary, or is longer than the model or the whole
        KV cache can hold; or a request with the same id has not ended.
        """
        scheduling = SchedulingParams(priority=priority, client=client, expected_output_len=expected_output_len)
        return self.submit(self.make_request(prompt, sampling_params, request_id, scheduling))

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request that got a token or ended in it.

        If the step fails or Ctrl-C interrupts it, no token is lost. The next step does the same work, and returns
        what this one would have returned.
        """
        self.core.advance()
        with hold_ctrl_c():  # a text must not be left half-settled
            firsts = dict.fromkeys(request.samples[0] for request in self.core.progressed)
            outputs = [self.output(first) for first in firsts]
        self.core.progressed = []  # only now: after Ctrl-C the next step returns them
        return outputs

    def output(self, request: Request) -> RequestOutput:
        """What the caller sees of a request now, with all samples of its prompt."""
        first = request.samples[0]
        outputs: list[CompletionOutput] = [
            LazyOutput(sample, output_text(self.tokenizer, sample)) for sample in request.samples
        ]
        cached = first.num_cached_tokens if first.has_started else 0
        return RequestOutput(
            first.request_id, first.prompt, first.prompt_token_ids, outputs, first.all_ended, cached, first.metrics
        )

    def abort_request(self, request_id: str, index: int | None = None) -> RequestOutput | None:
        """End a request in any state, or only its sample `index`. Returns the output so far.

        None, and no effect, if the id is unknown or the request has ended. No step reports the end.
        """
        request = self.core.abort(request_id, index)
        return None if request is None else self.output(request)

    def abort_all(self) -> None:
        """End every request."""
        self.core.abort_all()
