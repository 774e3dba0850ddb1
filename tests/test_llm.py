"""LLM: order of outputs, one call after another, chat, text, and what an interruption leaves behind."""

import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import TEMPLATE, greedy

from minicb import LLM, SamplingParams
from minicb.policies import SJF


@pytest.fixture
def llm(byte_model) -> LLM:
    return LLM(byte_model, device="cpu", enforce_eager=True, num_blocks=64, block_size=4, max_num_seqs=3)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    """Short ones finish first, in slots for three; a parameter set for each prompt."""
    lengths = [9, 1, 5, 2, 7]
    prompts = ["a", "bb", [1, 2, 3], "dd", "e"]
    outputs = llm.generate(prompts, [greedy(n, ignore_eos=True) for n in lengths], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == ["a", "bb", None, "dd", "e"]
    assert [output.prompt_token_ids for output in outputs][2] == [1, 2, 3]
    assert all(output.finished for output in outputs)


def test_the_forms_of_prompts(llm):
    """A text, token ids, a dict, several of them in any container; equal prompts give equal tokens."""
    ids = llm.get_tokenizer()("hello")["input_ids"]
    arrays = [np.array(ids), np.array([ids], dtype=np.uint8), torch.tensor(ids), torch.tensor([ids]), iter(ids)]
    dicts = [{"prompt": "hello"}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}]
    pairs = [["hello", ids], (prompt for prompt in ("hello", {"prompt_token_ids": ids, "prompt": "hello"}))]
    forms = ["hello", ["hello"], ids, [ids], *arrays, *dicts, dicts[:1], *pairs]
    results = [llm.generate(form, greedy(5), use_tqdm=False) for form in forms]
    assert [len(result) for result in results] == [1] * (len(forms) - 2) + [2, 2]
    assert all(output.prompt in ("hello", None) and output.prompt_token_ids == ids for [output, *_] in results)
    assert len({tuple(output.outputs[0].token_ids) for result in results for output in result}) == 1
    assert llm.generate([], greedy(5), use_tqdm=False) == []


def test_three_calls_are_three_clean_runs(llm):
    runs = [llm.generate(["x", "yy"], greedy(4), use_tqdm=False) for _ in range(3)]
    assert [[o.outputs[0].token_ids for o in run] for run in runs] == [[o.outputs[0].token_ids for o in runs[0]]] * 3
    assert llm.engine.scheduler.pool.num_free == 63


def test_nothing_runs_if_one_prompt_is_wrong(llm):
    with pytest.raises(ValueError, match=r"prompts\[1\]: prompt token id must be an integer.*not 999"):
        llm.generate(["fine", [999]], use_tqdm=False)
    with pytest.raises(ValueError, match="3 entries for 2 prompts"):
        llm.generate(["a", "b"], [greedy()] * 3)
    assert not llm.engine.has_unfinished_requests()


def test_a_forgotten_prefix_is_not_found(llm):
    num_cached = []
    for forget in (False, False, True):
        if forget:
            llm.reset_prefix_cache()
        num_cached.append(llm.generate("a long prompt", greedy(2), use_tqdm=False)[0].num_cached_tokens)
        llm.engine.scheduler.check_invariants()
    assert num_cached[0] == num_cached[2] == 0 < num_cached[1]


def test_an_interruption_leaves_the_engine_clean(llm):
    execute = llm.engine.runner.execute
    steps = []

    def interrupted(plan):
        steps.append(plan)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return execute(plan)

    llm.engine.runner.execute = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 5, greedy(9), use_tqdm=False)
    llm.engine.scheduler.check_invariants()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.scheduler.pool.num_free == 63
    assert len(llm.generate(["a"] * 5, greedy(9), use_tqdm=False)) == 5


@pytest.mark.parametrize(
    "prompts",
    [None, 5, {"a", "b"}, b"abc", [b"abc"], [[1, "2"]], [None], "\ud800", {}, {"prompt": None}, {"prompt": [1]},
     {"prompt": "a", "multi_modal_data": 1}, [{"prompt_token_ids": "a"}], np.array([0.5]), torch.tensor(1)],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt_is_refused(llm, prompts):
    """Bytes are not token ids, and a set has no order."""
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize("params", [5, {"max_tokens": 3}, ["a"], [None, None]])
def test_what_is_no_sampling_params_is_refused(llm, params):
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["a"], params, use_tqdm=False)


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user"}, ["hi"], [5], [{"content": "no role"}, 5]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(ValueError, match="messages"):
        llm.chat(messages, use_tqdm=False)


def test_requests_of_the_engine_are_not_swallowed(llm):
    """generate would step them to their ends and drop their outputs."""
    llm.engine.add_request("mine")
    with pytest.raises(RuntimeError, match="unfinished requests"):
        llm.generate("yours")


def test_chat_applies_the_template_once(llm):
    """The template begins with BOS, so the tokenizer must not add another."""
    [output] = llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=False)
    bos = llm.engine.tokenizer.bos_token_id
    assert output.prompt_token_ids[0] == bos
    assert output.prompt_token_ids.count(bos) == 1
    assert llm.engine.tokenizer.decode(output.prompt_token_ids) == "<s><user>hi<assistant>"
    assert len(llm.chat([[{"role": "user", "content": c}] for c in "abc"], greedy(1), use_tqdm=False)) == 3
    options = {"chat_template": "{{ tools[0].a }}{{ b }}{{ messages[-1].content }}{{ add_generation_prompt }}"}
    options |= {"tools": [{"a": "x"}], "chat_template_kwargs": {"b": "y"}, "add_generation_prompt": False}
    [output] = llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=False, priority=1, **options)
    assert llm.engine.tokenizer.decode(output.prompt_token_ids) == "xyhiFalse"
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for output in llm.chat([begun, begun], greedy(2), use_tqdm=False, **options):
        assert llm.engine.tokenizer.decode(output.prompt_token_ids) == "<s><user>hi<assistant>It "
    with pytest.raises(ValueError, match=r"^conversation 1: messages\[0\]\.content must be text"):
        llm.chat([begun, [{"role": "user", "content": 5}]])
    llm.engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="at least 1 message"):
        LLM.chat(llm_with_template(llm), [])


def llm_with_template(llm: LLM) -> LLM:
    llm.engine.tokenizer.chat_template = TEMPLATE
    return llm


def test_text_so_far_grows_into_the_text(llm):
    """Pieces of characters are held back, so each text begins with the one before, and ends as the whole."""
    engine = llm.engine
    letters = {index: letter for letter, index in engine.tokenizer.get_vocab().items()}
    wanted = [index for byte in "naïve 😀 日本".encode() for index in [byte_token(letters, byte)]]
    engine.add_request("x", SamplingParams(temperature=0, max_tokens=len(wanted), ignore_eos=True), request_id="text")
    script = iter(wanted)
    execute = engine.runner.execute
    engine.runner.execute = lambda plan: [next(script) for _ in execute(plan)]
    texts = []
    while engine.has_unfinished_requests():
        texts += [output.outputs[0].text for output in engine.step()]
    assert texts[-1] == "naïve 😀 日本"
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


def byte_token(letters: dict[int, str], byte: int) -> int:
    """The token of a byte: byte-level vocabularies spell bytes as printable letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter = chr(byte) if byte in printable else chr(256 + others.index(byte))
    return next(index for index, spelled in letters.items() if spelled == letter)


def test_text_of_a_new_request_is_its_own(llm):
    """An id that comes again brings no text along, however its last owner was stepped."""
    engine = llm.engine
    engine.add_request("a", greedy(6, ignore_eos=True), request_id="r")
    engine.step()
    while engine.has_unfinished_requests():
        engine.core.step()
    engine.add_request("other", greedy(3, ignore_eos=True), request_id="r")
    texts = [output.outputs[0] for _ in range(3) for output in engine.step()]
    assert texts[-1].text == engine.tokenizer.decode(texts[-1].token_ids, skip_special_tokens=True)
    assert texts[-1].text.startswith(texts[0].text)


def test_the_progress_bar_tells_the_rate(llm, capsys):
    llm.generate(["a", "b"], greedy(3))
    assert "tok/s" in capsys.readouterr().err


# ------------------------------------------------------------------ what goes with each prompt


def in_order_of_their_ends(llm: LLM, prompts: list[str], **for_each) -> str:
    """The prompts, letters, in the order in which they ended."""
    num_before = len(llm.engine.metrics.finished)
    outputs = llm.generate(prompts, greedy(3, ignore_eos=True), use_tqdm=False, **for_each)
    assert [output.prompt for output in outputs] == prompts, "whatever the policy does"
    letters = {output.request_id: output.prompt for output in outputs}
    return "".join(letters[record.request_id] for record in list(llm.engine.metrics.finished)[num_before:])


def one_by_one(byte_model, **engine_args) -> LLM:
    return LLM(byte_model, device="cpu", enforce_eager=True, num_blocks=64, max_num_seqs=1, **engine_args)


def test_priorities(byte_model):
    llm = one_by_one(byte_model, scheduling_policy="priority")
    assert in_order_of_their_ends(llm, list("abcd"), priority=[2, 1, -3, 1]) == "cbda"
    assert in_order_of_their_ends(llm, list("abcd"), priority=(0, 0, 0, -1)) == "dabc"
    assert in_order_of_their_ends(llm, list("abcd"), priority=7) == "abcd"
    assert in_order_of_their_ends(llm, list("abcd")) == "abcd"


def test_clients(byte_model):
    llm = one_by_one(byte_model, scheduling_policy="fair")
    assert in_order_of_their_ends(llm, list("abcd"), client=["x", "x", "x", "y"]) == "adbc"
    counts = llm.engine.metrics.by_client
    assert {client: counts[client].num_completed for client in counts} == {"x": 3, "y": 1}
    assert (counts["x"].num_output_tokens, counts["y"].num_output_tokens) == (9, 3)
    llm.generate(["e", "f"], greedy(2, ignore_eos=True), use_tqdm=False, client="xy")
    assert llm.engine.metrics.counts("xy").num_output_tokens == 4, "a string is one client for all"
    llm.generate("g", greedy(1), use_tqdm=False)
    assert llm.engine.metrics.clients() == ["default", "x", "xy", "y"]


def test_expected_lengths(byte_model):
    """They are guesses: what is generated doesn't change."""
    llm = one_by_one(byte_model, scheduling_policy=SJF(ageing=1e-6))
    assert in_order_of_their_ends(llm, list("abc"), expected_output_len=[3, 2, 1]) == "cba"
    assert in_order_of_their_ends(llm, list("abc"), expected_output_len=[3, None, 1]) == "cab"
    assert in_order_of_their_ends(llm, list("abc"), expected_output_len=2) == "abc"
    assert in_order_of_their_ends(llm, list("abc"), expected_output_len=None) == "abc"


@pytest.mark.parametrize(
    ("for_each", "message"),
    [
        ({"priority": [1]}, r"^priority has 1 entries for 2 prompts"),
        ({"priority": []}, r"^priority has 0 entries for 2 prompts"),
        ({"client": ["a", "b", "c"]}, r"^client has 3 entries for 2 prompts"),
        ({"expected_output_len": [1, 2, 3]}, r"^expected_output_len has 3 entries for 2 prompts"),
        ({"priority": [0, "high"]}, r"^prompts\[1\]: priority must be an integer.*not 'high'"),
        ({"priority": 0.5}, r"^prompts\[0\]: priority must be an integer.*not 0.5"),
        ({"priority": [0, 2**63]}, r"^prompts\[1\]: priority must be an integer"),
        ({"priority": None}, r"^prompts\[0\]: priority must be an integer"),
        ({"client": ["a", 3]}, r"^prompts\[1\]: client must be a string, not 3"),
        ({"client": None}, r"^prompts\[0\]: client must be a string, not None"),
        ({"expected_output_len": [1, 0]}, r"^prompts\[1\]: expected_output_len must be an integer >= 1"),
        ({"expected_output_len": "3"}, r"^prompts\[0\]: expected_output_len must be an integer >= 1"),
    ],
)
def test_what_goes_with_a_prompt_is_checked_before_any_runs(llm, for_each, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], greedy(2), use_tqdm=False, **for_each)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.metrics.num_started == 0


def test_chat_takes_the_same(byte_model):
    llm = one_by_one(byte_model, scheduling_policy="priority")
    conversations = [[{"role": "user", "content": letter}] for letter in "ab"]
    outputs = llm.chat(conversations, greedy(2), use_tqdm=False, priority=[1, 0], client=["x", "y"])
    assert [output.metrics.client for output in outputs] == ["x", "y"]
    assert [record.client for record in llm.engine.metrics.finished] == ["y", "x"]
    with pytest.raises(ValueError, match="priority has 3 entries for 2 prompts"):
        llm.chat(conversations, use_tqdm=False, priority=[1, 2, 3])
    with pytest.raises(TypeError, match="urgency"):
        llm.chat(conversations, use_tqdm=False, urgency=1)


def test_times_of_a_request_by_a_clock_of_ones_own(byte_model):
    """Each look at it takes a second: one when a request comes, and one before and after each step."""
    llm = one_by_one(byte_model, clock=itertools.count(100).__next__)
    first, second = llm.generate(["a", "b"], greedy(3, ignore_eos=True), use_tqdm=False)
    times = first.metrics
    assert (times.arrival_time, times.first_scheduled_time, times.finished_time) == (100, 102, 107)
    assert list(times.token_times) == [103, 105, 107]
    assert (times.ttft, times.tpot, times.itl, times.e2el, times.queue_time) == (3, 2, [2, 2], 7, 2)
    times = second.metrics
    assert (times.arrival_time, times.first_scheduled_time, times.finished_time) == (101, 108, 113)
    assert (times.ttft, times.tpot, times.e2el, times.queue_time) == (8, 2, 12, 7)
    assert llm.engine.metrics.latencies()["ttft"]["mean"] == 5.5


def test_times_are_in_order(llm):
    for output in llm.generate(list("abcdefgh"), greedy(5), use_tqdm=False):
        times = output.metrics
        assert times.request_id == output.request_id
        moments = [times.arrival_time, times.first_scheduled_time, *times.token_times, times.finished_time]
        assert moments == sorted(moments)
        assert len(times.token_times) == len(output.outputs[0].token_ids)
        assert 0 <= times.queue_time < times.ttft <= times.e2el
        assert times.finish_reason == output.outputs[0].finish_reason
