"""The text of one output as its tokens arrive: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.text.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class StreamStep:
    """The result of one `TextStream.push`."""

    new_text: str
    """The text that this push released; may be empty."""
    stop: str | None
    """The stop string that ended the output; None if the output goes on."""
    num_tokens_used: int
    """The number of pushed tokens that were read: all, or up to the token that completed the stop string."""


class TextStream:
    """The text of one output while its tokens arrive.

    The text that it releases is final: whole characters, nothing beyond a stop string, and no text that may
    be the beginning of a stop string. If no stop string comes, the pieces add up to the decoded text of all
    tokens. Decoders with byte fallback read a run of byte tokens as a whole, so the run's characters are released only
    when the run has ended. Before that, stop strings are already looked for in these characters.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], *, include_stop: bool, min_tokens: int
    ) -> None:
        """Use `Tokenizer.stream` to make one."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._num_exempt = 0  # pending characters of the first `min_tokens` tokens
        self._held = ""  # ends with the longest possible beginning of a stop string
        self._pieces: list[str] = []
        self._stop: str | None = None
        self._finished = False

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int]) -> StreamStep:
        """Read tokens up to the one that completes a stop string. After a stop string, no token is read."""
        assert not self._finished, "push() after finish()"
        released: list[str] = []
        num_used = 0
        for token_id in token_ids:
            if self._stop is not None:
                break
            num_used += 1
            self._num_tokens += 1
            piece = self._detokenizer.push(int(token_id))
            if self._num_tokens > self._min_tokens:
                piece = self._release(piece)
            elif self._num_tokens == self._min_tokens:
                self._num_exempt = len(self._detokenizer.pending)
            released.append(piece)
        return StreamStep(self._append("".join(released)), self._stop, num_used)

    def finish(self) -> str:
        """End the output. Returns the text held back until now, with U+FFFD for incomplete characters."""
        return self._end(self._detokenizer.flush)

    def cut(self) -> str:
        """End an output that was cut off. Returns the text held back until now, without an incomplete character."""
        return self._end(self._detokenizer.cut)

    def _end(self, flush: Callable[[], str]) -> str:
        if self._finished:
            return ""
        self._finished = True
        if self._stop is not None:
            return ""
        piece = flush()
        if self._num_tokens > self._min_tokens:
            piece = self._release(piece, is_last=True)  # U+FFFD may be part of a stop string
        return self._append(piece + self._held)

    def _append(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _release(self, piece: str, *, is_last: bool = False) -> str:
        """The part of the held text + `piece` that may be shown; sets `_stop`, and keeps the rest in `_held`.

        held + piece:  |------- shown -------|-- stop string --|~~ dropped ~~|
                   or  |------- shown -------|-- beginning of a stop string --|

        Stop strings are also looked for in the whole characters that wait in the detokenizer. If a stop string ends
        there, the output ends too, so later tokens cannot change these characters.
        """
        if not self._stops:
            return piece
        exempt, piece = piece[: self._num_exempt], piece[self._num_exempt :]
        self._num_exempt -= len(exempt)
        pending = "" if is_last else self._detokenizer.pending[self._num_exempt :]
        buffer = self._held + piece
        match = _first_match(buffer + pending, self._stops)
        if match is not None:
            start, self._stop = match
            self._held = ""
            return exempt + (buffer + pending)[: start + len(self._stop) if self._include_stop else start]
        num_shown = len(buffer) - max(overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[num_shown:]
        return exempt + buffer[:num_shown]


def _first_match(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Position and text of the stop string that is complete first; if several end at one place, the longest.

    By this rule, the answer does not depend on how tokens cut the text.
    """
    matches = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not matches:
        return None
    _, start, stop = min(matches)
    return start, stop


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `marker`."""
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
