"""LLM: order of outputs, one call after another, chat, text, and what an interruption leaves behind."""

from itertools import pairwise

import pytest
from conftest import TEMPLATE, greedy

from minicb import LLM, SamplingParams


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
    """A text, token ids, lists of either; equal prompts give equal tokens."""
    ids = llm.engine.tokenizer("hello")["input_ids"]
    forms = ["hello", ["hello"], ids, [ids], ["hello", ids]]
    results = [llm.generate(form, greedy(5), use_tqdm=False) for form in forms]
    assert [len(result) for result in results] == [1, 1, 1, 1, 2]
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
    "prompts", [None, 5, {"prompt": "a"}, {"a", "b"}, b"abc", [b"abc"], [{"prompt": "a"}], [[1, "2"]], [None], "\ud800"]
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    """Bytes are not token ids, a dictionary's keys are not prompts."""
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
