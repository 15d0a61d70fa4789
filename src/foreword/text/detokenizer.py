"""Detokenizers: turn tokens into text, one at a time. The pieces add up to the text of all tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Protocol

REPLACEMENT = "\ufffd"
"""The character that decoders write for bytes that are not a character, or only a part of one."""

_MAX_INCOMPLETE = 3
"""The most replacement characters that later bytes can turn into one character, which has up to 4 bytes in UTF-8."""

_WINDOW_TOKENS = 12
"""The number of tokens at which a detokenizer's window is shortened."""

_KEPT_TOKENS = 6
"""The number of tokens of a shortened window. Each has at least one byte, so any incomplete character fits."""

_MAX_WINDOW_TOKENS = 256
"""A window of fewer tokens is shortened only if the shorter window gives the same text; a longer one always is."""


class Detokenizer(Protocol):
    """Turns the tokens of one text into text."""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is certain now."""

    def flush(self) -> str:
        """The remaining text as the decoder writes it, with U+FFFD for an incomplete character."""

    def cut(self) -> str:
        """The remaining text of an output that was cut off, without an incomplete character."""

    @property
    def pending(self) -> str:
        """Whole characters that are held back, because a later token may make them unreadable."""

    @property
    def num_characters(self) -> int:
        """Length of the text so far, `pending` included. The text of the next token begins there."""


class ByteDetokenizer:
    """A detokenizer for byte-level vocabularies: a text's bytes are its tokens' bytes, one after the other."""

    pending = ""

    def __init__(
        self, bytes_of: Callable[[int], bytes | None], skipped_ids: Collection[int], after: Sequence[int] = ()
    ) -> None:
        """`after`: the tokens that the text continues. If these end inside a character, the text completes it."""
        self.num_characters = 0
        self._bytes_of, self._skipped_ids = bytes_of, skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in _end_of(after, skipped_ids):
            self._utf8.decode(bytes_of(token_id) or b"")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        piece = self._utf8.decode(self._bytes_of(token_id) or b"")
        self.num_characters += len(piece)
        return piece

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def cut(self) -> str:
        return ""


class _ByteRun:
    """Consecutive byte tokens, which the decoder reads as a whole: as characters if all bytes are valid UTF-8,
    otherwise as one U+FFFD for each byte.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        """The whole characters so far."""
        self.is_broken = False
        """Whether the run can no longer become valid UTF-8."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, token_id: int, byte: int) -> str:
        """Add a token; returns the text that is certain now: none, unless the run can no longer become valid UTF-8."""
        self.token_ids.append(token_id)
        if self.is_broken:
            return REPLACEMENT
        try:
            self.text += self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self.is_broken, self.text = True, ""
            return REPLACEMENT * len(self.token_ids)
        return ""

    @property
    def begun_ids(self) -> list[int]:
        """The last tokens, if they are the beginning of a character."""
        return [] if self.is_broken else self.token_ids[len(self.text.encode()) :]


class WindowDetokenizer:
    """A detokenizer for tokens whose text depends on their neighbours, such as the bytes of one character.

    A token's text is the difference between two decodings. Only a window of the last tokens is decoded, at a constant
    cost per token:

        window:   | t0 t1 t2 t3 t4 | t5 t6 |
        its text: |   released     | at most 3 U+FFFD: perhaps the start of a character |

    A run of byte tokens that the decoder reads as a whole is kept outside the window until the run ends:

        t0 t1 t2 | <0xC3> <0xA9> ...     pending: "é"
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped_ids: Collection[int],
        byte_of: Mapping[int, int],
        after: Sequence[int] = (),
    ) -> None:
        """`byte_of`: tokens whose runs the decoder reads as a whole; `after`: the tokens that the text continues."""
        self.num_released = 0
        self._decode, self._skipped_ids, self._byte_of = decode, skipped_ids, byte_of
        self._window: list[int] = []
        self._released = ""  # the beginning of the window's text
        self._num_settled = 0  # leading tokens of the window whose text is released completely
        self._max_tokens = _WINDOW_TOKENS
        self._run: _ByteRun | None = None
        for token_id in _end_of(after, skipped_ids, byte_of):
            self.push(token_id)
        begun_ids: list[int] = [] if self._run is None else self._run.begun_ids
        if self._run is not None and not self._run.is_broken:
            self._close_run()  # its characters are part of the earlier text
        self.num_released = 0
        for token_id in begun_ids:
            self.push(token_id)

    @property
    def pending(self) -> str:
        return "" if self._run is None else self._characters(self._run)

    @property
    def num_characters(self) -> int:
        return self.num_released + len(self.pending)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        byte = self._byte_of.get(token_id)
        if byte is not None:
            self._run = self._run or _ByteRun()
            piece = self._run.push(token_id, byte)
        elif self._run is not None and not self._adds_text(self._run.token_ids[-1], token_id):
            return ""  # an id without a token, which does not split a run
        else:
            piece = self._close_run() + self._push(token_id)
        self.num_released += len(piece)
        return piece

    def flush(self) -> str:
        if self._run is not None:
            return self._close_run()
        piece = self._text()[len(self._released) :]
        self._released += piece
        return piece

    def cut(self) -> str:
        if self._run is not None:
            return self._characters(self._run)
        return self.flush().rstrip(REPLACEMENT)

    def _adds_text(self, before: int, token_id: int) -> bool:
        return self._decode([before, token_id]) != self._decode([before])

    def _close_run(self) -> str:
        """End the run of byte tokens; returns the part of its text that was not returned before. The last token stays
        in the window as the neighbour of the next token.
        """
        run, self._run = self._run, None
        if run is None:
            return ""
        if run.is_broken:
            piece = ""
        else:
            piece = REPLACEMENT * len(run.token_ids) if run.begun_ids else self._characters(run)
        self._window = [*self._window[1 - _KEPT_TOKENS :], run.token_ids[-1]]
        self._released, self._num_settled = self._decode(self._window), len(self._window)
        return piece

    def _characters(self, run: _ByteRun) -> str:
        """The whole characters of a run. At the beginning of a text, the decoder may drop a space from them."""
        if self._window or not run.text:
            return run.text
        return self._decode(run.token_ids[: len(run.text.encode())])

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._text()
        num_certain = len(text) - (0 if self._byte_of else _num_incomplete(text))
        piece = text[len(self._released) : num_certain]
        self._released += piece
        if len(self._released) == len(text):
            self._num_settled = len(self._window)
        if len(self._window) >= self._max_tokens:
            self._shorten(text)
        return piece

    def _text(self) -> str:
        """The window's text; it begins with `_released`."""
        text = self._decode(self._window)
        if not text.startswith(self._released):
            # The decoder now decodes released tokens to other text. Go on from the unreleased tokens.
            del self._window[: self._num_settled]
            self._num_settled = 0
            self._released = ""
            text = self._decode(self._window)
        return text

    def _shorten(self, text: str) -> None:
        """Drop the window's first tokens if the other tokens alone still decode to the end of `text`.

        If the new window starts inside a character, only the start of the window's text is wrong. This start was
        released earlier, so it is not used.
        """
        window = self._window[-_KEPT_TOKENS:]
        new_text = self._decode(window)
        num_pending = len(text) - len(self._released)
        num_compared = num_pending + 1  # the pending text, and one character before it
        agrees = len(new_text) >= num_compared and text.endswith(new_text[-num_compared:])
        if not agrees and len(self._window) < _MAX_WINDOW_TOKENS:
            self._max_tokens = 2 * len(self._window)  # try again rarely: the cost per token stays constant
            return
        self._num_settled = max(0, self._num_settled - (len(self._window) - len(window)))
        self._window = window
        self._released = new_text[: max(0, len(new_text) - num_pending)]
        self._max_tokens = _WINDOW_TOKENS


def _end_of(token_ids: Sequence[int], skipped_ids: Collection[int], byte_of: Collection[int] = ()) -> list[int]:
    """The last tokens that are not skipped. More are taken until the first one is no byte token, so no run is cut."""
    text_ids = (int(token_id) for token_id in reversed(token_ids) if token_id not in skipped_ids)
    end = list(islice(text_ids, _KEPT_TOKENS))
    while end and end[-1] in byte_of:
        before = next(text_ids, None)
        if before is None:
            break
        end.append(before)
    return end[::-1]


def _num_incomplete(text: str) -> int:
    """The number of characters at the end of `text` that later bytes may turn into another character."""
    return len(text) - len(text[-_MAX_INCOMPLETE:].rstrip(REPLACEMENT)) - len(text[:-_MAX_INCOMPLETE])
