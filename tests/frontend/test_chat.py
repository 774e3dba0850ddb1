"""Text as it comes, and a conversation that goes on whatever becomes of its answers."""

import contextlib
import io
import shutil
import signal
import sys
from itertools import pairwise

import pytest
import torch
from conftest import eager, greedy
from hypothesis import example, given
from hypothesis import strategies as st

from minicb import Engine, SamplingParams
from minicb.frontend.chat import chat, print_stream, stream

PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0),
    max_tokens=st.integers(1, 12),
    stop=st.none() | st.just(["e", "\ufffd"]),
    logit_bias=st.none() | st.dictionaries(st.integers(97, 122), st.just(30.0), min_size=1, max_size=4),
) | st.builds(SamplingParams, seed=st.integers(0, 99), max_tokens=st.integers(1, 12))


@pytest.fixture(scope="module")
def engine(byte_model) -> Engine:
    return eager(byte_model, num_blocks=65, max_num_seqs=2)


@pytest.fixture(autouse=True)
def nothing_stays_behind(request):
    """Whatever a test does, the engine has nothing to do after it and all its blocks."""
    yield
    if "engine" in request.fixturenames:
        check_empty(request.getfixturevalue("engine"))


def check_empty(engine: Engine) -> None:
    assert not engine.has_unfinished_requests()
    engine.scheduler.check_invariants()
    assert engine.scheduler.pool.num_free == engine.runner.num_blocks - 1


def alone(engine: Engine, prompt, params: SamplingParams):
    request = engine.make_request(prompt, params)
    engine.submit(request)
    while engine.has_unfinished_requests():
        engine.step()
    return engine.output(request)


@given(prompt=st.sampled_from(["a", "hi there", [1, 2, 3]]), params=PARAMS)
def test_a_streamed_text_only_grows_and_ends_as_what_the_prompt_gets_alone(engine, prompt, params):
    outputs = list(stream(engine, engine.make_request(prompt, params)))
    for before, after in pairwise(outputs):
        assert not before.finished
        for a, b in zip(before.outputs, after.outputs, strict=True):
            assert b.text.startswith(a.text)
            assert b.token_ids[: len(a.token_ids)] == a.token_ids
    assert outputs[-1].finished
    assert outputs[-1].outputs == alone(engine, prompt, params).outputs
    assert len(outputs) >= max(len(sample.token_ids) for sample in outputs[-1].outputs)  # as each token comes


@given(params=PARAMS, num_seen=st.integers(0, 6))
def test_a_stream_that_is_left_early_ends_its_request(engine, params, num_seen):
    """The engine is as usable as before."""
    expected = alone(engine, "hello", params)
    outputs = stream(engine, engine.make_request("hello", params))
    for _ in zip(range(num_seen), outputs, strict=False):
        pass
    assert engine.has_unfinished_requests() <= (num_seen > 0)
    outputs.close()
    check_empty(engine)
    assert alone(engine, "hello", params).outputs == expected.outputs


@given(params=PARAMS)
def test_pieces_that_are_printed_join_to_the_text(engine, params):
    """Each goes out at once."""
    out, flushed = io.StringIO(), []
    out.flush = lambda: flushed.append(out.getvalue())
    with contextlib.redirect_stdout(out):
        output = print_stream(engine, engine.make_request("hello", params))
    assert out.getvalue() == output.outputs[0].text + "\n"
    assert output.finished
    texts = [o.outputs[0].text for o in stream(engine, engine.make_request("hello", params))]
    assert flushed == [*texts, texts[-1] + "\n"]


# ---------------------------------------------------------------------- conversations


class Talk:
    """A conversation: what was asked for, what was printed of each answer, and what each prompt was."""

    def __init__(self, engine: Engine, questions: list[str], params: SamplingParams | None = None, **kwargs):
        self.engine, self.questions = engine, iter(questions)
        self.out, self.err = io.StringIO(), io.StringIO()
        self.printed: list[str] = []  # before each question but the first, and before the end
        self.requests = []
        submit, self.place = engine.submit, 0

        def submit_and_note(request):
            self.requests.append(request)
            return submit(request)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "submit", submit_and_note)
            with contextlib.redirect_stdout(self.out), contextlib.redirect_stderr(self.err):
                chat(engine, params or greedy(6, ignore_eos=True), read=self.read, **kwargs)
        self.prompts = [engine.tokenizer.decode(r.token_ids[: r.num_prompt_tokens]) for r in self.requests]
        self.errors = self.err.getvalue().splitlines()

    def read(self, prompt: str) -> str:
        assert prompt
        assert not self.engine.has_unfinished_requests()
        text = self.out.getvalue()
        if self.requests:
            self.printed.append(text[self.place :])
        self.place = len(text)
        question = next(self.questions, None)
        if question is None:
            raise EOFError
        return question


@given(
    st.lists(st.sampled_from(["hi", "é", " ", "", "how?"]), max_size=4), st.sampled_from([None, "", "be brief"]), PARAMS
)
def test_each_turn_sends_the_whole_conversation(engine, questions, system, params):
    """The template is applied to all of it once: one BOS, and every answer as it was printed. Blank lines are none.

    What was said before is not computed again.
    """
    talk = Talk(engine, questions, params, system=system, quiet=True)
    said = f"<system>{system}" if system else ""
    asked = [question for question in questions if question.strip()]
    assert len(talk.prompts) == len(asked)
    for question, prompt, request in zip(asked, talk.prompts, talk.requests, strict=True):
        said += f"<user>{question}<assistant>"
        assert prompt == "<s>" + said
        said += engine.output(request).outputs[0].text
        assert request.params == params
    assert talk.out.getvalue() == "".join(engine.output(r).outputs[0].text + "\n" for r in talk.requests)
    assert all(request.num_cached_tokens > 0 for request in talk.requests[1:])
    assert not talk.errors


def test_the_prefix_cache_has_all_that_was_said_before(engine):
    """But for the end of the last answer, which isn't a whole block. Letters, because a text of them is spelled by
    the tokens that were sampled."""
    letters = SamplingParams(seed=1, max_tokens=30, logit_bias={token: 100.0 for token in range(64, 90)})
    talk = Talk(engine, ["unheard of", "and now", "well"], letters)
    for before, after in pairwise(talk.requests):
        known = before.num_tokens - 1  # the last token was never put in
        assert after.num_cached_tokens == known // 4 * 4
    for request, figures in zip(talk.requests, talk.errors, strict=True):
        cached, prompt = request.num_cached_tokens, request.num_prompt_tokens
        assert figures.startswith("[30 tokens, ")
        assert f"{cached} of {prompt} tokens of the conversation came from the prefix cache" in figures


class CtrlC:
    """Raises KeyboardInterrupt in the n-th forward pass of the engine, before or after it is done."""

    def __init__(self, engine: Engine, place: int, after: bool):
        self.execute, self.count = engine.runner.execute, place
        self.after = after

    def __call__(self, plan):
        self.count -= 1
        if self.count == 0 and not self.after:
            raise KeyboardInterrupt
        result = self.execute(plan)
        if self.count == 0:
            raise KeyboardInterrupt
        return result


@given(place=st.integers(1, 9), after=st.booleans(), quiet=st.booleans())
@example(place=1, after=False, quiet=False)  # before there is anything
def test_ctrl_c_ends_an_answer_and_what_was_printed_is_kept(engine, place, after, quiet):
    """The conversation goes on with it."""
    whole = Talk(engine, ["hello", "more"]).prompts[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "execute", CtrlC(engine, place, after))
        talk = Talk(engine, ["hello", "more", "end"], quiet=quiet)
    first, second = talk.printed[:2]
    interrupted = first if place <= 6 else second
    assert interrupted.endswith(" …\n") == (place <= 6 or interrupted == second)
    kept = [text.removesuffix("\n").removesuffix(" …") for text in (first, second)]
    assert talk.prompts[1] == f"<s><user>hello<assistant>{kept[0]}<user>more<assistant>"
    assert talk.prompts[2] == f"{talk.prompts[1]}{kept[1]}<user>end<assistant>"
    assert (talk.prompts[1] == whole) == (place > 6)
    assert len(engine.output(talk.requests[2]).outputs[0].token_ids) == 6
    check_empty(engine)


def test_ctrl_c_while_a_request_is_submitted_leaves_nothing_in_the_engine(engine, monkeypatch):
    """It is delivered when the stream knows that the engine has the request."""
    submit = engine.submit

    def submit_and_interrupt(request):
        submit(request)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine, "submit", submit_and_interrupt)
    monkeypatch.setattr(engine, "step", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(stream(engine, engine.make_request("hello", greedy(4))))
    finally:
        signal.signal(signal.SIGINT, before)
    check_empty(engine)


def test_a_question_that_is_too_long_is_told_and_forgotten(byte_model):
    """What was said before it can be gone on with."""
    engine = eager(byte_model, max_model_len=60)
    talk = Talk(engine, ["hi", "long" * 20, "go on"], quiet=True)
    answer = engine.output(talk.requests[0]).outputs[0].text
    assert talk.prompts == ["<s><user>hi<assistant>", f"<s><user>hi<assistant>{answer}<user>go on<assistant>"]
    [error] = talk.errors
    assert error.startswith("minicb: ")
    assert "60" in error

    assert "/reset" in error


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_conversation_that_has_filled_the_context_begins_anew(byte_model, system):
    """Before that every question is refused. What the system message says holds on."""
    engine = eager(byte_model, max_model_len=60)
    talk = Talk(engine, ["hi" * 8, "too long" * 2, "short", "/reset", "again", " /reset "], system=system, quiet=True)
    before = f"<s><system>{system}<user>" if system else "<s><user>"
    assert talk.prompts == [f"{before}{'hi' * 8}<assistant>", f"{before}again<assistant>"]
    assert len(talk.errors) == 2
    assert all("/reset" in error for error in talk.errors)


def test_a_system_message_that_the_template_refuses_ends_it_before_the_first_question(byte_model):
    engine = eager(byte_model)
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    engine.tokenizer.chat_template += no_system
    with pytest.raises(ValueError, match="no system role"):
        Talk(engine, ["never read"], system="be brief")
    assert len(Talk(engine, ["hi"]).prompts) == 1


def test_an_answer_that_breaks_off_for_an_error_is_told(byte_model):
    """The conversation goes on."""
    engine = eager(byte_model)
    weight = engine.runner.model.embed_tokens.weight
    with torch.no_grad():
        engine.runner.model.embed_tokens.weight = torch.nn.Parameter(weight.clone())
        poisoned = engine.tokenizer("!")["input_ids"][0]
        engine.runner.model.embed_tokens.weight[poisoned] = torch.nan
    talk = Talk(engine, ["hi", "no!"], greedy(4, logit_bias={poisoned: -100.0}), quiet=True)
    [error] = talk.errors
    assert error.startswith("minicb: ")
    assert "finite" in error
    assert len(talk.prompts) == 2


def test_a_model_without_a_template_or_a_tokenizer_says_so(byte_model, tiny, tmp_path):
    """Nothing is computed."""
    folder = shutil.copytree(byte_model, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    for model in (folder, tiny):
        engine = eager(model)
        out, err = io.StringIO(), io.StringIO()
        questions = iter(["hi"])

        def read(prompt):
            if (question := next(questions, None)) is None:  # noqa: B023
                raise EOFError
            return question

        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                chat(engine, greedy(4), read=read)
            except ValueError as error:
                print(f"minicb: {error}", file=sys.stderr)
        assert err.getvalue() == "minicb: chat needs a tokenizer with a chat template, and this model has none\n"
        assert out.getvalue() == ""
        assert engine.metrics.num_cached_tokens == 0


def test_the_end_of_the_input_ends_it_without_a_word(engine):
    talk = Talk(engine, [])
    assert (talk.out.getvalue(), talk.errors, talk.prompts) == ("", [], [])


@pytest.mark.parametrize("quiet", [True, False])
def test_figures_are_told_unless_it_is_to_be_quiet(engine, quiet):
    talk = Talk(engine, ["a", "b"], quiet=quiet)
    assert len(talk.errors) == (0 if quiet else 2)


def test_a_stream_ends_when_its_request_is_aborted_in_between(engine):
    """Others may go on."""
    engine.add_request("hello", SamplingParams(max_tokens=20, ignore_eos=True), "other")
    outputs = []
    for output in stream(engine, engine.make_request("hi", SamplingParams(max_tokens=20, ignore_eos=True))):
        outputs.append(output)
        if len(outputs) == 2:
            engine.abort_request(output.request_id)
    assert len(outputs) == 2
    assert engine.abort_request("other").finished


def test_a_stream_that_is_refused_leaves_the_request_with_its_id_alone(engine):
    other = engine.add_request("hello", SamplingParams(max_tokens=3, ignore_eos=True), "same")
    with pytest.raises(ValueError, match="same"):
        next(stream(engine, engine.make_request("hi", SamplingParams(), "same")))
    assert engine.abort_request(other).finished


def test_a_stream_that_is_left_aborts_all_samples(engine):
    """Also when the first of them has ended."""
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
    for output in stream(engine, engine.make_request("hi", params)):
        if output.outputs[0].finish_reason is None and len(output.outputs[0].token_ids) == 2:
            engine.abort_request(output.request_id, 0)
        elif output.outputs[1].token_ids:
            break
    assert not engine.has_unfinished_requests()
