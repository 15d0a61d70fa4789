"""The text of one output as its tokens arrive: whole characters, and no part of a stop string.

Knows token ids and a function that decodes them. Knows nothing of tokenizers, or of when tokens are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
"""The character that decoders write for bytes that are not, or not yet, a character."""

_MAX_INCOMPLETE = 3
"""Most replacement characters that later bytes can turn into one character (UTF-8: 4 bytes)."""

_WINDOW_TOKENS = 12
"""Length at which a detokenizer's window is shortened..."""

_KEPT_TOKENS = 6
"""...to this one: enough bytes (one or more per token) to hold any incomplete character."""

_MAX_WINDOW_TOKENS = 256
"""Length at which a window is shortened even if its text changes."""


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The result of one `TextStream.push`."""

    new_text: str
    """Text released by it; may be empty."""
    stop: str | None
    """The stop string that ended the output, if one did."""
    num_tokens_used: int
    """The number of pushed tokens that were read: all, or those up to the one that completed the stop string."""


class TextStream:
    """The text of one output while its tokens arrive.

    The text that it releases is final: whole characters, nothing beyond a stop string, and no text that may
    turn out to be the beginning of one. Without a stop string the pieces add up to
    `Tokenizer.decode` of all tokens. (One exception: decoders with byte fallback read a run of byte
    tokens that turns invalid as invalid from its start; characters released before that stand. So does
    a U+FFFD too many, if the text itself has one in the middle of such a run.)
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], *, include_stop: bool, min_tokens: int
    ) -> None:
        """Made by `Tokenizer.stream`."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # ends with the longest possible beginning of a stop string
        self._pieces: list[str] = []
        self._stop: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        """All text released so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> StreamStep:
        """Reads tokens, up to the one that completes a stop string; after that it reads no more."""
        assert not self._finished, "push() after finish()"
        released: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self._stop is not None:
                break
            num_used += 1
            self._num_tokens += 1
            piece = self._detokenizer.push(int(token_id))
            if piece and self._num_tokens > self._min_tokens:
                piece = self._release(piece)
            released.append(piece)
        return StreamStep(self._append("".join(released)), self._stop, num_used)

    def finish(self) -> str:
        """Ends the output: returns the text held back until now, incomplete characters as U+FFFD."""
        if self._finished:
            return ""
        self._finished = True
        if self._stop is not None:
            return ""
        piece = self._detokenizer.flush()
        if self._num_tokens > self._min_tokens:
            piece = self._release(piece)  # U+FFFD may be part of a stop string
        return self._append(piece + self._held)

    def _append(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _release(self, piece: str) -> str:
        """The part of the held text + `piece` that may be shown; sets `_stop`, and keeps the rest in `_held`.

        held + piece:  |------- shown -------|-- stop string --|~~ dropped ~~|
                   or  |------- shown -------|-- beginning of a stop string --|
        """
        if not self._stops:
            return piece
        buffer = self._held + piece
        match = _first_match(buffer, self._stops)
        if match is not None:
            start, self._stop = match
            self._held = ""
            return buffer[: start + len(self._stop)] if self._include_stop else buffer[:start]
        num_shown = len(buffer) - max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[num_shown:]
        return buffer[:num_shown]


class Detokenizer:
    """Turns tokens into text one at a time, at a constant cost per token.

    A token's text depends on its neighbours (a byte of a character, a space that only the first word
    loses), so it is read off the difference between two decodings. Only a window of the last tokens is
    decoded:

        window:   | t0 t1 t2 t3 t4 | t5 t6 |
        its text: |   released     | at most 3 U+FFFD: perhaps the start of a character |
    """

    def __init__(self, decode: Callable[[list[int]], str], skipped_ids: frozenset[int]) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._window: list[int] = []
        self._released = ""  # the beginning of the window's text
        self._num_settled = 0  # leading tokens of the window whose text is released completely
        self._max_tokens = _WINDOW_TOKENS

    def push(self, token_id: int) -> str:
        """The text that is certain now."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._text()
        num_certain = len(text) - _num_incomplete(text)
        piece = text[len(self._released) : num_certain]
        self._released += piece
        if len(self._released) == len(text):
            self._num_settled = len(self._window)
        if len(self._window) >= self._max_tokens:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """The remaining text, U+FFFD for incomplete characters."""
        piece = self._text()[len(self._released) :]
        self._released += piece
        return piece

    def _text(self) -> str:
        """The window's text; it begins with `_released`."""
        text = self._decode(self._window)
        if not text.startswith(self._released):
            # The decoder changed its mind about text already released, as byte fallback does when a
            # character is followed by the first byte of another. Go on from the unreleased tokens.
            del self._window[: self._num_settled]
            self._num_settled = 0
            self._released = ""
            text = self._decode(self._window)
        return text

    def _shorten(self, text: str) -> None:
        """Drops the window's first tokens if the rest decodes to an end of `text` without them.

        Starting inside a character spoils only the start of the new window's text, which counts as released.
        """
        window = self._window[-_KEPT_TOKENS:]
        new_text = self._decode(window)
        num_pending = len(text) - len(self._released)
        num_compared = num_pending + 1  # the pending text, and one character before it
        agrees = len(new_text) >= num_compared and text.endswith(new_text[-num_compared:])
        if not agrees and len(self._window) < _MAX_WINDOW_TOKENS:
            self._max_tokens = 2 * len(self._window)  # tried rarely: the cost per token stays constant
            return
        self._num_settled = max(0, self._num_settled - (len(self._window) - len(window)))
        self._window = window
        self._released = new_text[: max(0, len(new_text) - num_pending)]
        self._max_tokens = _WINDOW_TOKENS


def _num_incomplete(text: str) -> int:
    """Number of characters at the end of `text` that later bytes may turn into another character."""
    return len(text) - len(text[-_MAX_INCOMPLETE:].rstrip(REPLACEMENT)) - len(text[:-_MAX_INCOMPLETE])


def _first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Position and text of the stop string that is complete first; of several, the longest.

    "Complete first" makes the answer independent of how tokens cut the text.
    """
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
