"""The engine: requests in, outputs out, one step at a time."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minicb.attention import gather_attention, paged_attention
from minicb.blocks import BlockPool
from minicb.checks import check_choice, check_int, check_real, show
from minicb.core import EngineCore
from minicb.device import choose_device, read_dtype
from minicb.loader import find_folder, load_model, read_config
from minicb.memory import PREEMPTION_MODES, Memory
from minicb.metrics import Metrics
from minicb.policies import POLICIES, Policy
from minicb.request import CompletionOutput, Request, RequestOutput, RequestState, SamplingParams
from minicb.runner import ModelRunner
from minicb.scheduler import Scheduler
from minicb.text import encode, load_tokenizer, output_text, read_eos

logger = logging.getLogger("minicb")

Prompt = str | Sequence[int]


class Engine:
    """Serves one model. `add_request` at any time, `step` as long as there is something to do.

    model: folder or Hugging Face id (config.json, *.safetensors, tokenizer).
    tokenizer: folder or id of the tokenizer, where it isn't the model's. A model without one takes
        prompts of token ids only, and its outputs have no text.
    dtype: "auto" (the checkpoint's), "float32", "float16", "bfloat16"; "float64" with enforce_eager.
    device: "cuda", "cpu" or a torch.device; None takes CUDA where there is one.
    seed: of the requests that name none, and of dummy weights.
    load_format: "auto", or "dummy" for random weights from config.json alone.
    max_model_len: prompt and output together, in tokens; None takes the model's.
    max_num_seqs: requests that run at a time. max_num_batched_tokens: tokens of one step.
    block_size: tokens of a KV cache block; None takes 128 on CUDA and 32 on a CPU.
    num_blocks: size of the pool, the reserved block 0 included; None sizes it from free memory on
        CUDA, and takes up to 1 GiB on a CPU.
    gpu_memory_utilization: the part of a GPU's memory that weights, KV cache and the work of a step
        may take together with what others use of it, in (0, 1].
    swap_space: at most so many GiB of host memory (pinned on CUDA) for the KV of preempted requests, and
        no more than max_num_seqs requests can fill. num_cpu_blocks: the same in blocks, none of them
        reserved; it overrides swap_space.
    preemption_mode: what becomes of a request's KV when its blocks are needed for others: "swap" copies
        it to host memory, or drops it where there is no room; "recompute" drops it and prefills again (and
        takes no host memory); "auto" does what takes less time by the speeds measured at the start.
    enable_prefix_caching: a request reuses the full blocks of its beginning that another has computed,
        from that one's first token on.
    scheduling_policy: who goes next and who is preempted: "fcfs", "sjf", "priority", "fair" or "adaptive", or
        a Policy with arguments of its own; policies.py says what each promises.
    batching: "continuous", or "static": the next batch starts when the last has ended.
    long_prefill_token_threshold: a request with more tokens to prefill gets at most so many in a step while others
        want tokens; 0: no request is long. max_long_partial_prefills: so many long prefills at a time; shorter
        requests pass those that wait for it.
    clock: gives the time in seconds, of which all metrics and events are made.
    enforce_eager: compile nothing: starts at once, runs in any dtype, slow. Attention is then the
        obvious `gather_attention` instead of `paged_attention`.

    ValueError names an argument that is out of range.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        seed: int = 0,
        load_format: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int | None = None,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 4.0,
        num_cpu_blocks: int | None = None,
        preemption_mode: str = "auto",
        scheduling_policy: str | Policy = "fcfs",
        batching: str = "continuous",
        long_prefill_token_threshold: int = 0,
        max_long_partial_prefills: int = 1,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not isinstance(scheduling_policy, Policy):
            check_choice("scheduling_policy", scheduling_policy, POLICIES)
            scheduling_policy = POLICIES[scheduling_policy]()
        check_choice("batching", batching, ("continuous", "static"))
        check_choice("load_format", load_format, ("auto", "dummy"))
        check_choice("preemption_mode", preemption_mode, PREEMPTION_MODES)
        check_choice("enable_prefix_caching", enable_prefix_caching, (True, False))
        check_choice("enforce_eager", enforce_eager, (True, False))
        seed = check_int("seed", seed, minimum=0, below=2**63)
        max_num_seqs = check_int("max_num_seqs", max_num_seqs, minimum=1)
        max_num_batched_tokens = check_int("max_num_batched_tokens", max_num_batched_tokens, minimum=1)
        long_prefill_token_threshold = check_int(
            "long_prefill_token_threshold", long_prefill_token_threshold, minimum=0
        )
        max_long_partial_prefills = check_int("max_long_partial_prefills", max_long_partial_prefills, minimum=1)
        if block_size is not None:
            block_size = check_int("block_size", block_size, minimum=1, below=2**31)
        if num_blocks is not None:
            num_blocks = check_int("num_blocks", num_blocks, minimum=2, below=2**31)
        gpu_memory_utilization = check_real(
            "gpu_memory_utilization", gpu_memory_utilization, lambda value: 0 < value <= 1, "in (0, 1]"
        )
        swap_space = check_real("swap_space", swap_space, lambda value: 0 <= value < 2**31, "in [0, 2**31), in GiB")
        if num_cpu_blocks is not None:
            num_cpu_blocks = check_int("num_cpu_blocks", num_cpu_blocks, minimum=0, below=2**31)
        if preemption_mode == "recompute":
            num_cpu_blocks = 0
        chosen = choose_device(device)
        folder = find_folder(model)
        config, hf = read_config(folder)
        if max_model_len is None:
            max_model_len = config.max_model_len
        max_model_len = check_int("max_model_len", max_model_len, minimum=2)
        if max_model_len > config.max_model_len:
            raise ValueError(f"max_model_len is {max_model_len}, but the model's config allows {config.max_model_len}")
        torch_dtype = read_dtype(dtype, hf.dtype)
        if torch_dtype is torch.float64 and not enforce_eager:
            raise ValueError("dtype float64 needs enforce_eager=True: FlexAttention's kernels have no float64")

        if not logger.hasHandlers():  # the application has no logging: say what takes so long
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(logging.INFO)
        self.vocab_size = config.vocab_size
        self.tokenizer = load_tokenizer(folder if tokenizer is None else find_folder(tokenizer))
        if tokenizer is not None and self.tokenizer is None:
            raise ValueError(f"tokenizer {str(tokenizer)!r} has no tokenizer files")
        self.eos_token_ids = read_eos(folder, hf, self.tokenizer, config.vocab_size)
        self.runner = ModelRunner(
            load_model(
                folder,
                config,
                hf,
                attention=gather_attention if enforce_eager else paged_attention,
                dtype=torch_dtype,
                device=chosen,
                load_format=load_format,
                seed=seed,
            ),
            device=chosen,
            dtype=torch_dtype,
            block_size=block_size or (128 if chosen.type == "cuda" else 32),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space=swap_space,
            num_cpu_blocks=num_cpu_blocks,
            enforce_eager=enforce_eager,
        )
        self.core = EngineCore(
            self.make_scheduler(
                scheduling_policy,
                batching=batching,
                preemption_mode=preemption_mode,
                enable_prefix_caching=enable_prefix_caching,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                long_prefill_token_threshold=long_prefill_token_threshold,
                max_long_partial_prefills=max_long_partial_prefills,
            ),
            self.runner,
            clock,
        )
        self.metrics = Metrics(keep=10_000)
        self.core.observers.append(self.metrics)
        self._seeds = random.Random(seed)
        self._num_added = 0

    def make_scheduler(
        self,
        policy: Policy,
        *,
        num_blocks: int | None = None,
        preemption_mode: str = "auto",
        enable_prefix_caching: bool = True,
        **limits: Any,
    ) -> Scheduler:
        """A scheduler for this engine's runner, with an empty pool of all its blocks, or of num_blocks of them.

        limits: the other arguments of `Scheduler`.
        """
        runner = self.runner
        memory = Memory(
            BlockPool(num_blocks or runner.num_blocks, runner.block_size, enable_prefix_caching),
            BlockPool(runner.num_cpu_blocks + 1, runner.block_size),
            preemption_mode,
            runner.costs,
        )
        return Scheduler(memory, policy, **limits)

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "default",
        expected_output_len: int | None = None,
    ) -> Request:
        """Check a prompt and what goes with it, without submitting it. ValueError names what is wrong."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, not {show(request_id)}")
        if not isinstance(prompt, (str, list, tuple, range)):
            raise ValueError(f"prompt must be text or a list of token ids, not {show(prompt)}")
        text = prompt if isinstance(prompt, str) else None
        token_ids = encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        token_ids = [check_int("prompt token id", i, minimum=0, below=self.vocab_size) for i in token_ids]
        for token_id in params.stop_token_ids or ():
            check_int("stop_token_ids", token_id, minimum=0, below=self.vocab_size)
        priority = check_int("priority", priority, minimum=-(2**63), below=2**63)
        if not isinstance(client, str):
            raise ValueError(f"client must be a string, not {show(client)}")
        if expected_output_len is not None:
            expected_output_len = check_int("expected_output_len", expected_output_len, minimum=1, below=2**63)
        request = Request(
            request_id or "",
            token_ids,
            params,
            prompt=text,
            eos_token_ids=self.eos_token_ids,
            seed=self._seeds.getrandbits(63),
            priority=priority,
            client=client,
            expected_output_len=expected_output_len,
        )
        if params.min_tokens and len(request.eos_token_ids | request.stop_token_ids) >= self.vocab_size:
            raise ValueError(f"min_tokens is {params.min_tokens}, but stop_token_ids leaves no token to sample")
        self.scheduler.check(request)
        return request

    def submit(self, request: Request) -> str:
        """Accept a request that make_request made; returns its id."""
        while not request.request_id:
            candidate, self._num_added = str(self._num_added), self._num_added + 1
            if candidate not in self.scheduler.requests:
                request.request_id = candidate
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
        """Submit a prompt, text or token ids; returns the request's id, made up if none is given.

        priority: lower is served first, by the policy "priority". client: for whom it is; the policy "fair" shares
        among clients. expected_output_len: the caller's guess, in tokens, by which "sjf" orders.
        ValueError: the prompt is empty, has an id outside the vocabulary, or is longer than the model
        or the whole KV cache can hold; the id is that of a request that has not ended.
        """
        return self.submit(
            self.make_request(prompt, sampling_params, request_id, priority, client, expected_output_len)
        )

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request that got a token or ended in it.

        If it is interrupted (Ctrl-C, an error on the device), no token is lost: the next step does
        what this one should have done, and also returns what had ended before the interruption.
        """
        self.core.advance()
        outputs = [self.output(request) for request in dict.fromkeys(self.core.moved)]
        self.core.collect()
        return outputs

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request, whatever it is doing, and return what it had so far.

        None, and no effect, if the id is unknown or the request has ended. No step reports it.
        """
        request = self.core.abort(request_id)
        return None if request is None else self.output(request)

    def output(self, request: Request) -> RequestOutput:
        """What the caller sees of a request now."""
        finished = request.state is RequestState.FINISHED
        completion = CompletionOutput(
            index=0,
            text=output_text(self.tokenizer, request),
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            outputs=[completion],
            finished=finished,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
        )

    def abort_all(self) -> None:
        """End every request; whatever had gone wrong, the engine is as new."""
        self.core.abort_all()
