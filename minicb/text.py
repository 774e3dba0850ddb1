"""Text and tokens: the tokenizer of a model, and the text of a request while it runs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from minicb.checks import show
from minicb.request import Logprob, Request, RequestState

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HELD = 16  # at most so many tokens (and the pieces of a character) are held back because their text may change
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


def encode_chat(tokenizer: Any, messages: Any) -> list[int]:
    """Token ids of a conversation, [{"role": "user", "content": "…"}, …], up to where the answer begins.

    The tokenizer's chat template writes them, BOS included where the model wants one, so none is added.
    ValueError if there is no template, or the messages don't fit it.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("chat needs a tokenizer with a chat template, and this model has none")
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a list with at least 1 message, not {show(messages)}")
    if isinstance(messages[0], (list, tuple)):  # which the tokenizer would take for several conversations
        raise ValueError(f"messages must be made of dicts, not {show(messages[0])}")
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # templates are programs: they fail in their own ways
        raise ValueError(f"messages don't fit the chat template: {error}") from error


def text_of(tokenizer: Any, request: Request) -> "StreamedText":
    """The text of a request's output, made at first use."""
    if request.text is None:
        request.text = StreamedText(tokenizer, request.token_ids, request.num_prompt_tokens, request.stop_strings)
    return request.text


def output_text(tokenizer: PreTrainedTokenizerBase | None, request: Request) -> str:
    """Text of a request's output so far."""
    if tokenizer is None:
        return ""
    text = text_of(tokenizer, request)
    if request.state is not RequestState.FINISHED:
        return text.shown()
    ended_by_string = request.finish_reason == "stop" and isinstance(request.stop_reason, str)
    return text.before_stop if ended_by_string else text.whole()


def name_tokens(tokenizer: PreTrainedTokenizerBase | None, logprobs: Sequence[dict[int, Logprob]]) -> None:
    """Fill in decoded_token, each token's text by itself, in those entries at the end that don't have it yet."""
    if tokenizer is None:
        return
    known = len(logprobs)
    while known and next(reversed(logprobs[known - 1].values())).decoded_token is None:  # each is filled in to its end
        known -= 1
    for entry in logprobs[known:]:
        for token_id, logprob in entry.items():
            logprob.decoded_token = str(tokenizer.decode([token_id]))


class StreamedText:
    """The text of a growing list of tokens, in constant time for each: what is shown only ever grows, and ends as the
    tokenizer's text of all tokens.

    A token's text depends on its neighbours: "▁a" is "a" at the beginning and " a" behind another. So tokens are decoded
    together with some before them (those from _context to _known), whose text is then cut off. What may still change is
    held back: the pieces of a character, and a run of single bytes, which becomes either characters or, if one of
    them is out of place, all replacement characters.
    (tokenizers' DecodeStream shows the characters of a run at once, and fails when the run turns out to be none.) But no
    more than HELD tokens are held back: of a longer run the characters shown so far stay. (One that is no text by then
    comes when it ends.)

    token_ids: the caller's list, which may grow. start: where the output begins in it. stop: strings to look for.
    """

    def __init__(self, tokenizer: Any, token_ids: Sequence[int], start: int = 0, stop: Sequence[str] = ()):
        self._tokenizer, self._token_ids, self._stop = tokenizer, token_ids, stop
        self._settled = ""  # text that won't change, of the tokens before _known
        self._start = self._seen = start  # tokens before _seen have been looked at
        self._visible: list[int] = []  # those of them that have a text: what is left out ends no run, and is no context
        self._num_visible = 0
        self._context = self._known = 0  # of them: decode from _context on; what comes after _known is new
        self._pending = 0  # characters of the text before _known that aren't settled: 1 if it ends in a piece of one
        self._searched = 0  # characters of the text that are known not to complete a stop string
        self.before_stop = ""  # the text, once it has been found to contain one

    def shown(self) -> str:
        """Text so far, less what may still change or be the beginning of a stop string."""
        self._settle_all()
        text = self._settled
        return text[: len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)]

    def whole(self) -> str:
        """Text of all tokens, as if none followed."""
        if not self._settled:  # mostly because nobody has looked at it before: then there is a quicker way
            text = decode(self._tokenizer, self._token_ids[self._start :])
            if REPLACEMENT not in text:
                return text
        self._settle_all()
        return self._settled + self._new(self._num_visible)

    def find_stop(self, may_stop: bool) -> str | None:
        """The stop string that is complete first, if one is now, and ends in what is new since the last call (which
        had one token less). may_stop=False: none counts, not even later, if it is complete by now."""
        self._settle_all()
        text = self._settled
        if 0 < self._num_visible - self._known < HELD + 4:  # a run that is longer is no text
            # The pieces of a character are nothing yet, but a run of bytes (in Llama 2, a line break is one) is text.
            text += self._new(self._num_visible).rstrip(REPLACEMENT)
        if may_stop:
            found = []
            for place, stop in enumerate(self._stop):
                begin = text.find(stop, max(0, self._searched - len(stop) + 1))
                if begin >= 0:
                    found.append((begin + len(stop), place, begin))
            if found:
                _, place, begin = min(found)
                self.before_stop = text[:begin]
                return self._stop[place]
        self._searched = len(text)
        return None

    def _settle_all(self) -> None:
        """One by one, so that it doesn't matter how often somebody looks."""
        while self._seen < len(self._token_ids):
            token_id = self._token_ids[self._seen]
            if decode(self._tokenizer, [token_id, token_id]):  # twice, as a space at the beginning may be left out
                self._visible[self._num_visible :] = [token_id]  # not appended: if this breaks off, it is done again
                self._settle(self._num_visible + 1)
                self._num_visible, self._seen = self._num_visible + 1, self._seen + 1
            else:
                self._seen += 1

    def _settle(self, end: int) -> None:
        """Of the tokens before `end`, as far as their text can't change any more."""
        num_held = end - self._known
        is_byte = BYTE_TOKEN.fullmatch(self._tokenizer.convert_ids_to_tokens(self._visible[end - 1]) or "")
        # When a run gets long, there are 4 tokens in which its last character may be complete; a run that is no text by
        # then won't become any.
        if is_byte and not HELD <= num_held < HELD + 4:
            return
        text, context, pending = self._new(end), self._known, 0
        if is_byte and REPLACEMENT in text:
            return
        if text.endswith(REPLACEMENT):
            if num_held < HELD:
                return
            # The last may be the first bytes of a character, of 4 at most. What lies further back stays what it is.
            text, context, pending = text[:-1], end - 4, 1
        if end > self._known:  # or it is being done again, after Ctrl-C
            settled = self._settled + text  # all or nothing
            self._settled, self._context, self._known, self._pending = settled, context, end, pending

    def _new(self, end: int) -> str:
        """What the tokens before `end` add to the settled text."""
        if end == self._known and not self._pending:
            return ""
        before, text = self._decode(self._context, self._known), self._decode(self._context, end)
        before = before[: len(before) - self._pending]
        return text[len(before) :] if text.startswith(before) else self._decode(self._known, end)

    def _decode(self, begin: int, end: int) -> str:
        return decode(self._tokenizer, self._visible[begin:end])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is a beginning of the string, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop[length - 1] == text[-1] and text.endswith(stop[:length]):
            return length
    return 0


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of the tokens, special tokens left out."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))
