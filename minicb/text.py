"""The text of a request while it runs, extended token by token in constant time."""

import re
from collections.abc import Sequence
from typing import Any

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")  # how sentencepiece-style vocabularies spell a single byte


class StreamedText:
    """Text so far: it only ever grows, and ends as the text of all tokens.

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
            self.text += text[len(self._known_text(tokenizer, token_ids)) :]
            self._context, self._known = self._known, len(token_ids)
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
