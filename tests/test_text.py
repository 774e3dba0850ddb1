"""Streamed text: it only grows, and it ends as the text of all tokens, whatever pieces it comes in."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minicb.text import StreamedText, decode

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁Hello", "▁a", "a", "é", "日", "."]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As of Llama 2 and Mistral: words with ▁ for a space, and single bytes for what has no word."""
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *WORDS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """As of GPT-2, Llama 3, Qwen and SmolLM: every byte is a letter."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TOKENIZERS = {"byte fallback": byte_fallback_tokenizer(), "byte level": byte_level_tokenizer()}


def stream(tokenizer, token_ids: list[int], every: int = 1) -> list[str]:
    so_far: list[int] = []
    text, texts = StreamedText(tokenizer, so_far), []
    for begin in range(0, len(token_ids), every):
        so_far += token_ids[begin : begin + every]
        texts.append(text.shown())
    return [*texts[:-1], text.whole()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(token_ids=st.lists(st.integers(0, 257), min_size=1, max_size=40), every=st.integers(1, 5))
@example(token_ids=[9, 1, 9 + 0xF0], every=1)  # a special token inside of a run of bytes that are no character
def test_it_only_grows_and_ends_as_the_whole(name, token_ids, every):
    """Any tokens at all, random bytes and special tokens included, looked at after every one or every few."""
    tokenizer = TOKENIZERS[name]
    texts = stream(tokenizer, token_ids, every)
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert texts[-1] == decode(tokenizer, token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet="aé.日😀👩‍🚀 ", min_size=1, max_size=12))
def test_characters_are_never_shown_in_pieces(name, text):
    """Emoji, joined sequences and CJK, one byte a token."""
    tokenizer = TOKENIZERS[name]
    if name == "byte level":
        spell = dict(zip(sorted(range(256), key=letter), range(2, 258), strict=True))
    else:
        spell = {byte: 2 + len(WORDS) + byte for byte in range(256)}
    texts = stream(tokenizer, [spell[byte] for byte in text.encode()])
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in texts)
    assert texts[-1].strip() == text.strip()


def letter(byte: int) -> str:
    """How a byte-level vocabulary spells a byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def test_words_come_as_they_are_known():
    tokenizer = TOKENIZERS["byte fallback"]
    hello, a, dot = (2 + WORDS.index(word) for word in ("▁Hello", "▁a", "."))
    assert stream(tokenizer, [hello, a, a, dot]) == ["Hello", "Hello a", "Hello a a", "Hello a a."]
