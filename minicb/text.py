"""Text and tokens: the tokenizer of a model, and the text of a request while it runs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minicb.checks import show
from minicb.request import Request, RequestState

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece-style vocabularies spell a single byte


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer, None if it has none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(folder)


def read_eos(folder: Path, hf: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> frozenset[int]:
    """Every id that any of the three sources names, as an int or a list: chat models often end their
    turns with another token than their pre-training documents."""
    generation = folder / "generation_config.json"
    sources: list[Any] = [hf.eos_token_id]
    if generation.exists():
        sources.append(json.loads(generation.read_text()).get("eos_token_id"))
    if tokenizer is not None:
        sources.append(tokenizer.eos_token_id)
    ids = [i for source in sources for i in (source if isinstance(source, list) else [source])]
    return frozenset(i for i in ids if type(i) is int and 0 <= i < vocab_size)


def encode(tokenizer: PreTrainedTokenizerBase | None, text: str) -> list[int]:
    """Token ids of a prompt. ValueError if there is no tokenizer, or the text is none."""
    if tokenizer is None:
        raise ValueError("prompt is text, but the model has no tokenizer: give token ids, or name a tokenizer")
    try:
        return list(tokenizer(text)["input_ids"])
    except TypeError as error:  # a lone surrogate
        raise ValueError(f"prompt {show(text)} is not valid Unicode text") from error


def output_text(tokenizer: PreTrainedTokenizerBase | None, request: Request) -> str:
    """Text of a request's output so far."""
    if tokenizer is None:
        return ""
    finished = request.state is RequestState.FINISHED
    streamed = request.streamed_text
    if streamed is None:
        if finished:  # nobody has looked at it before
            return decode(tokenizer, request.output_token_ids)
        streamed = request.streamed_text = StreamedText()
    write = streamed.finish if finished else streamed.extend
    return str(write(tokenizer, request.output_token_ids))


class StreamedText:
    """Text so far, extended token by token in constant time: it only ever grows, and ends as the text of all tokens.

    A token's text depends on its neighbours (a leading space, a character in pieces), so a token is
    decoded together with the ones before it, from the last place but one where the text was known
    to be whole. What may still change is held back: the pieces of a character, and a run of single
    bytes, which becomes either characters or, if it turns out to be none, replacement characters.
    """

    def __init__(self) -> None:
        self.text = ""
        self._context = 0  # decode from this token on …
        self._known = 0  # … and what comes after this one is new

    def extend(self, tokenizer: Any, token_ids: Sequence[int]) -> str:
        """token_ids: all output tokens so far. Returns the text so far."""
        if len(token_ids) == self._known or self._may_go_on(tokenizer, token_ids[-1]):
            return self.text
        text = decode(tokenizer, token_ids[self._context :])
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            text = self.text + text[len(self._known_text(tokenizer, token_ids)) :]
            self.text, self._context, self._known = text, self._known, len(token_ids)  # all or nothing (Ctrl-C)
        return self.text

    def _may_go_on(self, tokenizer: Any, token_id: int) -> bool:
        """A byte, or nothing visible: a special token between two bytes doesn't end their run."""
        if BYTE_TOKEN.fullmatch(tokenizer.convert_ids_to_tokens(token_id) or ""):
            return True
        return not decode(tokenizer, [token_id])

    def finish(self, tokenizer: Any, token_ids: Sequence[int]) -> str:
        """The whole text, with whatever was held back."""
        whole = decode(tokenizer, token_ids)
        if not whole.startswith(self.text):  # a tokenizer that looks further back than we do
            text = decode(tokenizer, token_ids[self._context :])
            whole = self.text + text[len(self._known_text(tokenizer, token_ids)) :]
        self.text, self._known = whole, len(token_ids)
        return whole

    def _known_text(self, tokenizer: Any, token_ids: Sequence[int]) -> str:
        return decode(tokenizer, token_ids[self._context : self._known])


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of the tokens, special tokens left out."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
