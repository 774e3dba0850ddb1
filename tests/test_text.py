"""Streamed text only grows, and ends as the text of all tokens, in any pieces. Stop strings."""

import itertools
import json
import shutil
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from conftest import check_invariants, eager, greedy, run_to_end
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_engine import MODES, Forced
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minicb import Engine, SamplingParams
from minicb.request import Logprob, Request, ScoredToken
from minicb.text import HELD, REPLACEMENT, StreamedText, decode, name_tokens

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁Hello", "▁a", "a", "b", "ab", "aba", "é", "日", "."]
CORPUS = [
    "Hello, naïve cafe\u0301 of 日本語 日本の 👩‍🚀👩‍🚀 😀😀🇩🇪",
    "  two spaces\n\nand a baab aba ababa 日本語 😀👩‍🚀 of",
] * 20


def letter(byte: int) -> str:
    """How a byte-level vocabulary spells a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))


END_AND_BEGINNING = letter(0xA9) + letter(0xC3)


def finish(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """With special tokens, one of them added later, as by chat models, and with added words."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(["<tool>", "日本人", " aba", AddedToken("<|end|>", special=True)])
    return fast


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Mistral: words with ▁ for a space, and single bytes for the rest."""
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *WORDS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return finish(tokenizer)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """As in GPT-2, Llama 3, Qwen and SmolLM: every byte is a letter. One token ends an é and begins the next."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "</s>", *alphabet, END_AND_BEGINNING]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return finish(tokenizer)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Of the same kind, with tokens that span several characters, or the end of one and the beginning of the next."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=6,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finish(tokenizer)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Words with ▁ for a space. The decoder drops the first token's space. Text without a word is left out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return finish(tokenizer)


def word_piece_tokenizer() -> PreTrainedTokenizerFast:
    """As in BERT: a space before each token that doesn't begin with ##."""
    pieces = ["<s>", "</s>", "[UNK]", *"ab.é日", *("##" + letter for letter in "ab日"), "hello", "##llo"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    return finish(tokenizer)


TOKENIZERS = {
    "byte fallback": byte_fallback_tokenizer(),
    "byte level": byte_level_tokenizer(),
    "trained": trained_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "word piece": word_piece_tokenizer(),
}
EVERY_TOKENIZER = pytest.mark.parametrize("name", TOKENIZERS)


SINGLE = {
    name: tokenizer.convert_tokens_to_ids(BYTES if name == "byte fallback" else [letter(byte) for byte in range(256)])
    for name, tokenizer in TOKENIZERS.items()
}


def spell(name: str, text: str | bytes) -> list[int]:
    """Token ids, one for each byte (where there are such tokens)."""
    if name in ("metaspace", "word piece"):
        return TOKENIZERS[name].encode(text if isinstance(text, str) else text.decode(errors="ignore"))
    return [SINGLE[name][byte] for byte in (text.encode() if isinstance(text, str) else text)]


def words(*pieces: str) -> list[int]:
    return TOKENIZERS["byte fallback"].convert_tokens_to_ids(list(pieces))


def is_byte(tokenizer, token_id: int) -> bool:
    return tokenizer.convert_ids_to_tokens(token_id) in BYTES


def is_invisible(tokenizer, token_id: int) -> bool:
    """A special token, or an id that the tokenizer doesn't know."""
    return tokenizer.convert_ids_to_tokens(token_id) in (None, "<s>", "</s>", "<|end|>")


INVISIBLE = {
    name: [i for i in range(len(tokenizer) + 3) if is_invisible(tokenizer, i)] for name, tokenizer in TOKENIZERS.items()
}


def false_runs(tokenizer, token_ids: list[int], skip: bool = True) -> Iterator[list[int]]:
    """Runs of single bytes that are no text."""
    visible = [i for i in token_ids if decode(tokenizer, [i, i], skip)]
    runs = [list(run) for byte, run in groupby(visible, lambda i: is_byte(tokenizer, i)) if byte]
    return (run for run in runs if REPLACEMENT in decode(tokenizer, run))


def has_long_false_run(tokenizer, token_ids: list[int], skip: bool = True) -> bool:
    """Is there a run of more than HELD single bytes that are no text? Its beginning has been shown as text. This is
    the only exception to the promises tested here."""
    return any(len(run) > HELD for run in false_runs(tokenizer, token_ids, skip))


TEXT = st.text(alphabet="ab ab\n.é日本😀👩‍🚀🇩🇪\u0301\ufffd", min_size=1, max_size=10)


@st.composite
def some_tokens(draw, name: str, max_pieces: int = 6) -> list[int]:
    """Any tokens at all, text as the tokenizer spells it and in single bytes, cut off somewhere, random bytes, and
    runs of the same token, special ones and ids beyond the vocabulary included."""
    tokenizer = TOKENIZERS[name]
    any_token = st.integers(0, len(tokenizer) + 2)  # three more than it knows
    invisible = st.sampled_from(INVISIBLE[name])
    piece = (
        st.lists(any_token, min_size=1, max_size=6)
        | TEXT.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
        | st.builds(lambda text, end: spell(name, text)[:end], TEXT, st.integers(1, 24))
        | st.binary(min_size=1, max_size=5).map(lambda data: spell(name, data))
        | st.builds(lambda token, count: [token] * count, invisible | any_token, st.integers(1, HELD + 8))
    )
    if name == "byte fallback":
        piece |= st.lists(st.integers(2, 1 + len(WORDS)), min_size=1, max_size=6)
    return list(itertools.chain(*draw(st.lists(piece, min_size=1, max_size=max_pieces)))) or [0]


class Growing:
    """A StreamedText and the list of its tokens, after others that are the prompt's."""

    def __init__(self, tokenizer, stop: tuple[str, ...] = (), prompt: tuple[int, ...] = (), skip: bool = True):
        self.token_ids = list(prompt)
        self.text = StreamedText(tokenizer, self.token_ids, len(prompt), stop, skip)

    def shown_after(self, *token_ids: int) -> str:
        self.token_ids += token_ids
        return self.text.shown()


def stream(tokenizer, token_ids: list[int], every: int = 1, skip: bool = True) -> list[str]:
    growing = Growing(tokenizer, skip=skip)
    texts = [growing.shown_after(*token_ids[begin : begin + every]) for begin in range(0, len(token_ids), every)]
    return [*texts, growing.text.whole()]


# ---------------------------------------------------------------------------- what is shown


@EVERY_TOKENIZER
@given(data=st.data(), every=st.integers(2, 7), skip=st.booleans())
@settings(max_examples=2 * settings.default.max_examples)
def test_it_only_grows_and_ends_as_the_whole(name, data, every, skip):
    """The number of calls and the prompt don't matter. Text that can't change any more is shown."""
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(some_tokens(name))
    assume(not has_long_false_run(tokenizer, token_ids, skip))
    check_stream(tokenizer, token_ids, every, skip)


def check_stream(tokenizer, token_ids: list[int], every: int, skip: bool = True) -> None:
    """skip: leave out special tokens."""
    texts, whole = stream(tokenizer, token_ids, skip=skip), decode(tokenizer, token_ids, skip)
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == whole
    assert stream(tokenizer, token_ids, every, skip) == [*texts[every - 1 : -1 : every], *texts[-2:]][
        : -(-len(token_ids) // every)
    ] + [whole]
    late = Growing(tokenizer, prompt=(3, 200, 4), skip=skip)
    late.token_ids += token_ids
    assert late.text.whole() == late.text.whole() == whole, "not asked before the end"
    assert late.text.shown() == texts[-2]
    growing = Growing(tokenizer, skip=skip)
    for count, (last, shown) in enumerate(zip(token_ids, texts, strict=False), start=1):
        so_far = decode(tokenizer, token_ids[:count], skip)
        assert growing.shown_after(last) == shown, "asking for the whole text changes nothing"
        if not has_long_false_run(tokenizer, token_ids[:count], skip):
            assert growing.text.whole() == so_far
        is_seen = decode(tokenizer, [last, last], skip)
        if is_seen and not (is_byte(tokenizer, last) or so_far.endswith(REPLACEMENT)):
            assert shown == so_far, "held back without need"


@pytest.mark.parametrize(
    "token_ids",
    [
        words("▁a", *["</s>"] * (HELD + 1), "▁Hello", "▁a"),  # those before a word say whether it is the first
        [*words("▁a"), *[9999] * (HELD + 1), *words("▁Hello")],
        words(*["<0x61>"] * 8, "▁", *["<0x61>"] * 7, "<0xFF>"),  # two runs, as a space lies between
        words("<0xFF>", *["▁", "<0x61>"] * HELD, "b"),
        words(*["<0x61>"] * 8, *["</s>"] * 8, "<0xFF>"),  # one run of 9 bytes
        words("<0xE6>", *["</s>"] * 24, "<0x97>", "<0xA5>", *["<0x61>"] * 8, "a"),
        words("a", "<s>", "<0xF0>"),  # inside of a run of bytes that are no character
        words("▁", "▁", "▁Hello", "▁", "▁", "<0x0A>", "▁", "日本人", "▁", " aba", "<tool>"),
    ],
    ids=str,
)
def test_what_is_not_to_be_seen_changes_nothing(token_ids):
    """Special tokens, unknown ids and ▁, which is a space: more than HELD of them are not a run of bytes."""
    check_stream(TOKENIZERS["byte fallback"], token_ids, every=3)


@pytest.mark.parametrize("name", ["byte fallback", "byte level", "trained"])
@given(text=TEXT.filter(lambda text: REPLACEMENT not in text), between=st.sampled_from([None, 0, 1, 10**6]))
def test_characters_are_never_shown_in_pieces(name, text, between):
    """Emoji, joined sequences, combining characters and CJK, one byte a token, also with an invisible token after
    each. No more than a run of bytes is held back, nor for long."""
    tokenizer = TOKENIZERS[name]
    token_ids = [i for token in spell(name, text) for i in (token, *([] if between is None else [between]))]
    texts = stream(tokenizer, token_ids)
    assert not any(REPLACEMENT in piece for piece in texts)
    assert texts[-1] == (text.removeprefix(" ") if name == "byte fallback" else text)
    long = spell(name, text * HELD)
    for count, shown in enumerate(stream(tokenizer, long)[:-1], start=1):
        held = HELD + 3 if name == "byte fallback" else 4
        assert len(shown) >= len(decode(tokenizer, long[: max(0, count - held)]).rstrip(REPLACEMENT))


def test_characters_are_shown_although_no_token_ever_ends_with_one():
    """Each ends one and begins the next. Still at most HELD tokens are held back."""
    tokenizer = TOKENIZERS["byte level"]
    token_ids = [*spell("byte level", b"\xc3"), *tokenizer.convert_tokens_to_ids([END_AND_BEGINNING]) * 4 * HELD]
    texts = stream(tokenizer, token_ids)
    assert texts[-1] == "é" * 4 * HELD + REPLACEMENT
    assert all(len(shown) >= count - HELD for count, shown in enumerate(texts[:-1]))
    check_stops(tokenizer, token_ids, ("é" * 3 * HELD,), looks=range(99))


@pytest.mark.parametrize("name", ["byte level", "trained"])
@pytest.mark.parametrize("count", range(HELD - 4, HELD + 5))
def test_a_character_is_whole_however_many_bytes_that_are_none_come_before(name, count):
    """Also where its own first bytes are among HELD tokens, which have to be shown."""
    check_stream(TOKENIZERS[name], spell(name, b"\xff" * count + "😀日".encode()), every=2)


def test_words_come_as_they_are_known():
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = words("▁Hello", "▁a", "▁a", ".")
    assert stream(tokenizer, token_ids)[:-1] == ["Hello", "Hello a", "Hello a a", "Hello a a."]


@pytest.mark.parametrize("length", [HELD - 1, HELD, 3 * HELD])
def test_of_a_long_run_of_bytes_that_proves_to_be_no_text_what_was_shown_stays(length):
    """The exception: shown text stays. Up to HELD bytes are not shown yet. Text after the run is not affected."""
    tokenizer = TOKENIZERS["byte fallback"]
    run = words("▁Hello", *["<0x61>"] * length, "<0xFF>", "▁a", "b")
    texts = stream(tokenizer, run)
    assert all(after.startswith(before) for before, after in pairwise(texts))
    late = Growing(tokenizer)
    late.token_ids += run
    assert late.text.whole() == texts[-1], "also if not asked before"
    if length < HELD:
        assert texts[-1] == decode(tokenizer, run) == "Hello" + REPLACEMENT * (length + 1) + " ab"
    else:
        assert texts[length] == "Hello" + "a" * (length - length % HELD)
        assert texts[-1] == "Hello" + "a" * length + REPLACEMENT + " ab"
    *_, shown, _, _, whole = stream(tokenizer, [*spell("byte fallback", "日" * HELD), *words("<0xFF>", "b")])
    assert shown == "日" * len(shown) != ""
    assert whole == shown + REPLACEMENT * (3 * (HELD - len(shown)) + 1) + "b", "one for each byte that was not shown"


# ---------------------------------------------------------------------------- names of tokens


def named(tokenizer, token_ids: list[int], others=(), every: int = 1, skip: bool = True) -> list[dict[int, Logprob]]:
    """The entries of these tokens, each with the same others, named after every so many tokens."""
    request = Request("0", [3, 200, 4], SamplingParams(logprobs=0, skip_special_tokens=skip))
    for count, token_id in enumerate(token_ids, start=1):
        request.append(ScoredToken(token_id, {i: Logprob(-1.0, 1) for i in (token_id, *others)}))
        if count % every == 0:
            name_tokens(tokenizer, request)
    name_tokens(tokenizer, request)
    return request.logprobs


def names(tokenizer, token_ids: list[int], skip: bool = True) -> list[str]:
    entries = named(tokenizer, token_ids, skip=skip)
    return [entry[i].decoded_token or "" for i, entry in zip(token_ids, entries, strict=True)]


@EVERY_TOKENIZER
@given(data=st.data(), every=st.integers(1, 7), skip=st.booleans())
@settings(max_examples=2 * settings.default.max_examples)
def test_a_token_s_text_is_what_it_adds_to_the_text_before_it(name, data, every, skip):
    """Together they are the output's text, except for pieces of a character at its end. It doesn't matter when they
    are asked for. The text of an alternative is what it had added. Special tokens have a name, which is no text."""
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(some_tokens(name))
    others = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), unique=True, max_size=3))
    entries, text = named(tokenizer, token_ids, others, every, skip), ""
    assert entries == named(tokenizer, token_ids, others, 1, skip)
    whole, has_false_run = decode(tokenizer, token_ids, skip), any(false_runs(tokenizer, token_ids, skip))
    for count, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True), start=1):
        for other, logprob in entry.items():
            instead = named(tokenizer, [*token_ids[: count - 1], other], skip=skip)[-1][other]
            assert logprob == instead
            assert logprob.is_text == bool(decode(tokenizer, [other, other], skip))
            if not logprob.is_text:
                assert logprob.decoded_token == decode(tokenizer, [other], False)
        text += entry[token_id].decoded_token if entry[token_id].is_text else ""
        so_far = decode(tokenizer, token_ids[:count], skip)
        if not has_false_run:  # its bytes may have been named before they proved to be no text
            assert whole.startswith(text)
            assert so_far == text or so_far.endswith(REPLACEMENT)
    assert has_false_run or set(whole.removeprefix(text)) <= {REPLACEMENT}


@pytest.mark.parametrize("name", ["byte fallback", "byte level", "trained"])
@given(text=TEXT.filter(lambda text: REPLACEMENT not in text))
def test_the_last_piece_of_a_character_has_its_text_and_the_others_none(name, text):
    expected = [part for letter in text for part in [*[""] * (len(letter.encode()) - 1), letter]]
    if name == "byte fallback" and text.startswith(" "):
        expected[0] = ""  # its decoder drops it
    assert names(TOKENIZERS[name], spell(name, text)) == expected


@pytest.mark.parametrize(
    ("name", "pieces", "expected"),
    [
        ("byte fallback", ["▁a", "▁a", "</s>", "▁a", "<0x0A>", "▁"], ["a", " a", "</s>", " a", "\n", " "]),
        ("byte fallback", ["▁a", *["</s>"] * 40, "▁a", "<tool>"], ["a", *["</s>"] * 40, " a", "<tool>"]),
        ("byte fallback", ["<0x61>", "<0xFF>", "b"], ["a", "", REPLACEMENT + "b"]),  # "a" has been named before
        ("word piece", ["hello", "##b", ".", "hello"], ["hello", "b", " .", " hello"]),
        ("byte level", [letter(255)] * (HELD + 1) + ["a"], [*[""] * HELD, REPLACEMENT * HELD, REPLACEMENT + "a"]),
        ("byte level", [*[letter(255)] * HELD, "</s>", "a"], [*[""] * HELD, "</s>", REPLACEMENT * HELD + "a"]),
        ("byte level", [letter(0xC3), END_AND_BEGINNING, END_AND_BEGINNING, letter(0xA9)], ["", "é", "é", "é"]),
    ],
    ids=str,
)
def test_names_by_hand(name, pieces, expected):
    assert names(TOKENIZERS[name], TOKENIZERS[name].convert_tokens_to_ids(pieces)) == expected


# ---------------------------------------------------------------------------- work


class Counting:
    """A tokenizer that counts the tokens it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0

    def decode(self, token_ids, **kwargs):
        self.count += len(token_ids)
        return self.tokenizer.decode(token_ids, **kwargs)

    def convert_ids_to_tokens(self, token_id):
        self.count += 1
        return self.tokenizer.convert_ids_to_tokens(token_id)


WORK = 12 * HELD  # tokens decoded for each that comes


def work(name: str, token_ids: list[int], stop: tuple[str, ...], looks: bool) -> int:
    """Number of tokens decoded for these. looks: ask for the text after each token, not only at the end."""
    counting = Counting(TOKENIZERS[name])
    growing = Growing(counting, stop)
    for token_id in token_ids:
        growing.token_ids.append(token_id)
        if stop:
            growing.text.find_stop(may_stop=False)
        if looks:
            growing.text.shown()
    growing.text.whole()
    return counting.count


@EVERY_TOKENIZER
@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"\xc3", END_AND_BEGINNING),
        ("", "ab 日 😀"),
        ("", b"\xff"),
        ("", b"\xe6"),
        (b"\xff", "a"),
        ("", "日本"),
        ("", "a"),
        (b"\xe6", "</s>"),
        ("", "</s>"),
        (b"\xf0\x9f", 10**6),
        ("", " "),
    ],
    ids=repr,
)
@pytest.mark.parametrize("stop", [(), ("ab", "\n", "日" * 3)], ids=["", "stop"])
def test_work_for_a_token_is_constant(name, begin, again, stop):
    """Whatever comes, for however long: text, bytes that are none, special tokens, pieces of a character."""
    if again in ("</s>", END_AND_BEGINNING):
        tokens = [TOKENIZERS[name].convert_tokens_to_ids(again) or 0]  # most tokenizers lack the latter
    else:
        tokens = [again] if isinstance(again, int) else spell(name, again)
    many = [*spell(name, begin), *(tokens * 600)[:600]]
    for looks in (False, True):
        assert work(name, many, stop, looks) <= WORK * len(many)


@EVERY_TOKENIZER
@given(data=st.data(), stop=st.sampled_from([(), ("ab", "aab\n")]), looks=st.booleans())
def test_work_for_a_token_is_constant_whatever_comes_again_and_again(name, data, stop, looks):
    begin, again = data.draw(some_tokens(name, 1)), data.draw(some_tokens(name, 3))
    many = [*begin, *(again * 400)[:400]]
    assert work(name, many, stop, looks) <= WORK * len(many)


@EVERY_TOKENIZER
@given(data=st.data(), others=st.sampled_from([0, 30]))
def test_work_for_a_name_is_constant_whatever_comes_again_and_again(name, data, others):
    counting = Counting(TOKENIZERS[name])
    begin, again = data.draw(some_tokens(name, 1)), data.draw(some_tokens(name, 3))
    many = [*begin, *(again * 100)[:100]]
    named(counting, many, range(others))
    assert counting.count <= ((HELD + 4) * (others + 1) + 3 * HELD) * len(many)


# ---------------------------------------------------------------------------- stop strings


def definition(tokenizer, token_ids: list[int], stops: tuple[str, ...], min_tokens: int = 0):
    """The number of tokens when a stop string is found, the string and the text before it; None if none is found.

    Pieces of a character at the end are nothing yet.
    """
    before = ""
    for count in range(1, len(token_ids) + 1):
        text = decode(tokenizer, token_ids[:count]).rstrip(REPLACEMENT)
        for end in range(len(before) + 1, len(text) + 1) if count > min_tokens else ():
            for stop in stops:
                if text.endswith(stop, 0, end):
                    return count, stop, text[: end - len(stop)]
        before = text
    return None


def longest_beginning(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of the text with which a stop string begins, but doesn't end."""
    lengths = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(lengths, default=0)


@st.composite
def some_stops(draw, text: str) -> tuple[str, ...]:
    """Parts of the text, parts with a wrong last character, prefixes of each other, and any strings."""
    text = text or "ab"
    begins, lengths = st.integers(0, len(text) - 1), st.integers(1, 5)
    part = st.builds(lambda begin, length: text[begin : begin + length], begins, lengths)
    stop = part | part | st.builds(lambda a, b: a + b, part, st.sampled_from("ab\n日 ")) | TEXT
    stops = draw(st.lists(stop, min_size=1, max_size=3))
    if draw(st.booleans()):
        stops.insert(draw(st.integers(0, len(stops))), stops[0][: draw(lengths)])
    return tuple(stops)


FEW = {
    name: [i for i in range(len(tokenizer)) if set(tokenizer.decode([i])) <= set("ab\n")]
    for name, tokenizer in TOKENIZERS.items()
}
FEW["byte fallback"] += words("</s>")


def few_tokens(name: str) -> st.SearchStrategy[list[int]]:
    """Of few characters, so that stop strings overlap, in the text and each other."""
    pieces = spell(name, "日😀")
    one = st.sampled_from([[i] for i in [*FEW[name], pieces[0]]])
    return st.lists(one | st.just(pieces), min_size=1, max_size=24).map(lambda drawn: [*itertools.chain(*drawn)])


@EVERY_TOKENIZER
@given(data=st.data(), min_tokens=st.sampled_from([0, 0, 0, 1, 3, 9]))
@settings(max_examples=4 * settings.default.max_examples)
def test_the_stop_string_that_is_complete_first_is_found_at_once_and_never_shown(name, data, min_tokens):
    """By a slow definition: at the token that completes it, not before min_tokens, and again if asked again. Only
    the longest end of the text that may become a stop string is held back."""
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(few_tokens(name) | some_tokens(name, 4))
    assume(not has_long_false_run(tokenizer, token_ids))
    stops = data.draw(some_stops(decode(tokenizer, token_ids)))
    looks = data.draw(st.sets(st.integers(0, len(token_ids))))
    asked_twice = data.draw(st.sets(st.integers(0, len(token_ids))))
    check_stops(tokenizer, token_ids, stops, min_tokens, looks, asked_twice)


def check_stops(tokenizer, token_ids, stops, min_tokens=0, looks=(), asked_twice=()) -> None:
    growing, plain = Growing(tokenizer, stops, prompt=(5, 200)), Growing(tokenizer)
    found, shown = None, []
    for count, token_id in enumerate(token_ids, start=1):
        growing.token_ids.append(token_id)
        settled = plain.shown_after(token_id)
        stop = growing.text.find_stop(count > min_tokens)
        if count in asked_twice:
            assert growing.text.find_stop(count > min_tokens) == stop
        if stop is not None:
            found = count, stop, growing.text.before_stop
            break
        if count in looks:
            shown.append(growing.text.shown())
            assert shown[-1] == settled[: len(settled) - longest_beginning(settled, stops)]
    if REPLACEMENT not in "".join(stops):  # or it depends on when a piece of a character is taken for no text
        assert found == definition(tokenizer, token_ids, stops, min_tokens)
    end = found[2] if found else growing.text.whole()
    assert all(after.startswith(before) for before, after in pairwise([*shown, end]))
    if found:
        assert (end + found[1]) in decode(tokenizer, token_ids[: found[0]])
    else:
        assert end == decode(tokenizer, token_ids)


@pytest.mark.parametrize(
    ("token_ids", "stops", "expected"),
    [
        (words("a", "<0x0A>", "b"), ("\n",), (2, "\n", "a")),  # a byte that may yet prove to be none
        (words("<0xFF>", *["▁", "<0x61>"] * HELD, "<0x62>"), ("ab",), (34, "ab", REPLACEMENT + " a" * 15 + " ")),
        (words("<0xE6>", *["</s>"] * 24, "<0x97>", "<0xA5>", "a"), ("日",), (27, "日", "")),
        (words("aba", "aba"), ("ba", "a", "ab"), (1, "a", "")),
        (words("b", "aba", "aba"), ("aab", "ba", "a"), (2, "ba", "")),  # and "a" at the same place
        (words("b", "aba", "aba"), ("aab", "a", "ba"), (2, "a", "b")),
        (words("▁Hello", "▁a", "aba"), ("o aa", "a a"), (3, "o aa", "Hell")),
        (words("<0x61>", "<0x62>", "<0xFF>", "ab"), ("bb", "ab"), (2, "ab", "")),
    ],
    ids=str,
)
def test_stop_strings_that_are_found(token_ids, stops, expected):
    tokenizer = TOKENIZERS["byte fallback"]
    assert definition(tokenizer, token_ids, stops) == expected
    check_stops(tokenizer, token_ids, stops, looks=range(99))


def test_the_letters_of_a_stop_string_are_held_back_until_it_is_none():
    growing = Growing(TOKENIZERS["byte level"], ("abcd", "bcx"))
    assert [growing.shown_after(*spell("byte level", letter)) for letter in "abcab"] == ["", "", "", "abc", "abc"]
    assert growing.shown_after(*spell("byte level", "X")) == "abcabX"
    assert growing.shown_after(*spell("byte level", " bc")) == "abcabX "
    assert growing.text.whole() == "abcabX bc"


# ---------------------------------------------------------------------------- through the engine


@pytest.fixture(scope="module")
def letters(byte_model, tmp_path_factory) -> Path:
    """The model of bytes, with a token that spells "DEF"."""
    folder = tmp_path_factory.mktemp("letters")
    shutil.copytree(byte_model, folder, dirs_exist_ok=True)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["DEF"] = vocabulary.pop(letter(0x7F))
    file.write_text(json.dumps(tokenizer))
    return folder


def ids_of(engine: Engine, *pieces: str) -> list[int]:
    return engine.tokenizer.convert_tokens_to_ids([*pieces])


def scripted(engine: Engine, token_ids: list[int], logprobs: bool = False) -> Engine:
    """These tokens replace the model's."""
    execute = engine.runner.execute

    def run(plan):
        execute(plan)
        tokens = [token_ids[chunk.request.num_output_tokens] for chunk in plan.chunks if chunk.needs_sampling]
        return [ScoredToken(token, {token: Logprob(-1.0, 1)}) for token in tokens] if logprobs else tokens

    engine.runner.execute = run
    return engine


def complete(engine: Engine, **params) -> tuple[str, int, str, object]:
    """Text, number of tokens, finish_reason and stop_reason."""
    engine.add_request([1, 2, 3], greedy(**params))
    [output] = run_to_end(engine).values()
    completion = output.outputs[0]
    return completion.text, len(completion.token_ids), completion.finish_reason, completion.stop_reason


def test_a_stop_string_may_end_inside_of_a_token(letters):
    """The text is cut before it, and all tokens are kept."""
    engine = eager(letters)
    [token] = ids_of(engine, "DEF")
    force = {"logit_bias": {token: 100}, "max_tokens": 5}
    assert complete(engine, **force, stop="DE") == ("", 1, "stop", "DE")
    assert complete(engine, **force, stop=["x", "FD"]) == ("DE", 2, "stop", "FD")
    assert complete(engine, **force, stop="DE", min_tokens=2) == ("DEFDEF", 3, "stop", "DE")
    assert complete(engine, **force, stop="DED") == ("DEF" * 5, 5, "length", None)


def test_what_ends_a_request_first(letters):
    """EOS and stop tokens come before strings that the same token completes, and strings before the length."""
    engine = eager(letters)
    tokens = ids_of(engine, "a", "b", "DEF", "c", "</s>")
    scripted(engine, tokens)
    [token] = ids_of(engine, "DEF")
    assert complete(engine, stop="bD") == ("a", 3, "stop", "bD")
    assert complete(engine, stop="bD", stop_token_ids=[token]) == ("ab", 3, "stop", token)
    assert complete(engine, stop="bD", max_tokens=3) == ("a", 3, "stop", "bD")
    assert complete(engine, stop="bDx", max_tokens=3) == ("abDEF", 3, "length", None)
    assert complete(engine, stop="Fcd", max_tokens=4) == ("abDEFc", 4, "length", None), "what was held back is released"
    assert complete(engine, stop="Fcd") == ("abDEFc", 5, "stop", None)
    assert complete(engine, stop=["b", "Fc"], min_tokens=2) == ("abDE", 4, "stop", "Fc")


SHOWN, INCLUDED = {"skip_special_tokens": False}, {"include_stop_str_in_output": True}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, ("abDEFc", 5, "stop", None)),
        (SHOWN, ("abDEFc", 5, "stop", None)),
        (INCLUDED, ("abDEFc", 5, "stop", None)),
        (SHOWN | INCLUDED, ("abDEFc</s>", 5, "stop", None)),
        (SHOWN | {"ignore_eos": True}, ("abDEFc</s>d", 6, "length", None)),
        ({"ignore_eos": True}, ("abDEFcd", 6, "length", None)),
        ({"stop": "bD"}, ("a", 3, "stop", "bD")),
        ({"stop": "bD", **INCLUDED}, ("abD", 3, "stop", "bD")),
        ({"stop": "c</s", "ignore_eos": True, **SHOWN}, ("abDEF", 5, "stop", "c</s")),
        ({"stop": "cd", "ignore_eos": True, **SHOWN}, ("abDEFc</s>d", 6, "length", None)),
        ({"stop_token_ids": ["c"]}, ("abDEF", 4, "stop", "c")),
        ({"stop_token_ids": ["c"], **INCLUDED}, ("abDEFc", 4, "stop", "c")),
        ({"stop_token_ids": ["a", "c"], "min_tokens": 1}, ("abDEF", 4, "stop", "c")),
        ({"stop_token_ids": ["</s>"], "ignore_eos": True}, ("abDEFc", 5, "stop", "</s>")),
        ({"stop_token_ids": ["</s>"], "ignore_eos": True, **SHOWN}, ("abDEFc", 5, "stop", "</s>")),
        ({"eos": ["c"]}, ("abDEF", 4, "stop", None)),  # which is not special
        ({"eos": ["c"], **INCLUDED}, ("abDEFc", 4, "stop", None)),
        ({"eos": ["c"], "ignore_eos": True}, ("abDEFcd", 6, "length", None)),
        ({"eos": ["c"], "stop": "Fc"}, ("abDEF", 4, "stop", None)),
    ],
    ids=str,
)
def test_what_ends_a_request_is_no_text_unless_it_is_asked_for(letters, params, expected):
    """What is shown before only grows. The texts of the tokens are the text, if no string ends it."""
    engine = eager(letters)
    tokens = ids_of(engine, "a", "b", "DEF", "c", "</s>", "d")
    scripted(engine, tokens, logprobs=True)
    params = dict(params)
    if "eos" in params:
        engine.eos_token_ids = frozenset(ids_of(engine, *params.pop("eos")))
    if "stop_token_ids" in params:
        params["stop_token_ids"] = ids_of(engine, *params["stop_token_ids"])
    engine.add_request([1, 2, 3], greedy(6, logprobs=0, **params))
    completions = []
    while engine.has_unfinished_requests():
        completions += [output.outputs[0] for output in engine.step()]
    last, reason = completions[-1], expected[3]
    reason = ids_of(engine, reason)[0] if reason in ("c", "</s>") else reason
    assert (last.text, len(last.token_ids), last.finish_reason, last.stop_reason) == (*expected[:3], reason)
    assert all(after.text.startswith(before.text) for before, after in pairwise(completions))
    entries = [entry[i] for i, entry in zip(last.token_ids, last.logprobs, strict=True)]
    text = "".join(entry.decoded_token for entry in entries if entry.is_text)
    assert text == last.text or isinstance(reason, str)
    assert [entry.decoded_token for entry in entries] == ["a", "b", "DEF", "c", "</s>", "d"][: len(entries)]


def test_what_was_held_back_is_released_by_an_abort(letters):
    engine = eager(letters)
    scripted(engine, ids_of(engine, *"xabcabcd"))
    engine.add_request([1, 2, 3], greedy(8, stop="abcd"), request_id="a")
    texts = [engine.step()[0].outputs[0].text for _ in range(6)]
    assert texts == ["x", "x", "x", "x", "xabc", "xabc"]
    completion = engine.abort_request("a").outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("xabcab", "abort", None)


# What the model may say: letters, a line break, all pieces of one character and all but the last of another.
ALPHABET = ["a", "b", "DEF", "Ċ", *(letter(byte) for byte in "é".encode()), letter(0xF0), letter(0x9F)]
PROMPTS = [[*range(length)] for length in (3, 9, 16)]


@pytest.fixture(scope="module")
def said(letters) -> list[list[int]]:
    """What the model generates for each prompt without stop strings."""
    engine = eager(letters)
    bias = dict.fromkeys(ids_of(engine, *ALPHABET), 100)
    params = greedy(24, logit_bias=bias, presence_penalty=1, frequency_penalty=0.7)
    ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
    outputs = run_to_end(engine)
    return [outputs[rid].outputs[0].token_ids for rid in ids]


@given(
    data=st.data(),
    preempt_at=st.lists(st.integers(0, 30), max_size=4, unique=True),
    mode=st.sampled_from(MODES),
    budget=st.sampled_from([48, 7]),
    num_blocks=st.sampled_from([40, 12]),
)
@settings(max_examples=2 * settings.default.max_examples)
def test_stop_strings_are_found_whatever_happens(letters, said, data, preempt_at, mode, budget, num_blocks):
    """In a batch, with prompts in chunks, and preempted: each request ends where the definition says, and never
    showed a part of the stop string."""
    engine = eager(
        letters, num_blocks=num_blocks, num_cpu_blocks=100, max_num_batched_tokens=budget, preemption_mode=mode
    )
    Forced(engine, preempt_at)
    bias = dict.fromkeys(ids_of(engine, *ALPHABET), 100)
    expected, shown, requests = {}, {}, {}
    for index, (prompt, token_ids) in enumerate(zip(PROMPTS, said, strict=True)):
        stops = data.draw(some_stops(decode(engine.tokenizer, token_ids)))
        min_tokens = data.draw(st.sampled_from([0, 0, 5]))
        params = greedy(
            24, logit_bias=bias, presence_penalty=1, frequency_penalty=0.7, stop=stops, min_tokens=min_tokens
        )
        rid = engine.add_request(prompt, params, request_id=str(index))
        found = definition(engine.tokenizer, token_ids, stops, min_tokens)
        count, stop, text = found or (24, None, decode(engine.tokenizer, token_ids))
        expected[rid] = (text, token_ids[:count], "stop" if found else "length", stop)
        shown[rid], requests[rid] = [""], engine.scheduler.requests[rid]
    for _ in range(300):
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            shown[output.request_id].append(output.outputs[0].text)
        check_invariants(engine)
    for rid, request in requests.items():
        completion = engine.output(request).outputs[0]
        assert (completion.text, completion.token_ids, completion.finish_reason, completion.stop_reason) == expected[
            rid
        ]
        assert all(after.startswith(before) for before, after in pairwise([*shown[rid], completion.text]))


def test_stop_strings_need_a_tokenizer(tiny):
    """The error comes before anything runs. Stop tokens need none."""
    engine = eager(tiny)
    with pytest.raises(ValueError, match="stop has strings, but the model has no tokenizer"):
        engine.add_request([1], greedy(stop="a"))
    assert not engine.has_unfinished_requests()
    for nothing in (None, [], ()):
        engine.add_request([1], greedy(1, stop=nothing))
    assert [output.outputs[0].text for output in run_to_end(engine).values()] == [""] * 3
