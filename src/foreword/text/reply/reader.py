"""ReplyReader: splits a reply, as it comes, into text, reasoning and calls.

Tests compare it with transformers' own reader. That reader raises an error at malformed calls, and ends a call at a
marker inside a string. This reader does neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.request import ToolCall
from foreword.text.reply.arguments import schemas_of
from foreword.text.reply.call_bodies import CallBody, may_grow, open_body
from foreword.text.reply.format import ReplyFormat

_CONTEXT = 64
"""The number of characters to keep before the position from which to read, for patterns with look-behind."""
_MOST_SPACE = 64
"""Most characters of white space to hold back for a marker whose pattern begins with white space."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer, for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


Call = ToolCall
Part = Text | Reasoning | Call


def joined(parts: list[Part]) -> list[Part]:
    """Join neighbouring parts of one kind, and drop empty parts."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text) and isinstance(last, Text):
            merged[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Call) or part.text:
            merged.append(part)
    return merged


class ReplyReader:
    """Splits one reply into parts. The parts are the same for every way of cutting the text into pieces.

    Text that may begin a marker is held back until that is clear. A call is held back until it ends. White space around
    calls and reasoning is dropped. If a text turns out not to be a call, it is shown as text with its markers.
    """

    def __init__(
        self,
        form: ReplyFormat,
        prompt_end: str = "",
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reads_calls: bool = True,
    ) -> None:
        """`prompt_end`: the prompt's last text, special tokens included. It may have opened a region already.

        Some families write all arguments as texts. These are cast to the types in the schemas of `tools`. Without
        `reads_calls`, calls stay text.
        """
        self.num_calls = 0
        """The number of calls that were returned."""
        self.reasoning_spans: list[tuple[int, int]] = []
        """Begin and end of each piece of reasoning, markers included, in characters of the reply."""
        self._form = form
        self._num_done = 0
        """The reply's characters that have left the buffer; negative while the buffer has text of the prompt."""
        self._schemas = schemas_of(tools)
        fields = form.template.fields.values()
        self._fields = [field for field in fields if reads_calls or form.kind(field.name) != "call"]
        self._implicit = next((field for field in self._fields if field.open_re is None), None)
        self._region: Any = None
        """The field that is being read, such as the reasoning, if its opening marker was read; else None."""
        self._call: CallBody | None = None
        self._raw: list[str] = []
        """The text of the call that is being read. If it turns out not to be a call, this text is shown."""
        self._buffer, self._at = "", 0
        self._space: list[str] = []
        """White space after the last text: the next part decides whether it is shown."""
        self._last = ""
        """What was read last: "text"; "opened": the marker that opens reasoning; "shown": text of reasoning;
        "reasoning": the marker that ends it; "call"; "": nothing yet, or the marker that opens a text."""
        self._lead = ""
        """The separator to write before the next text, if there was earlier text of the same field."""
        self._seen: set[str] = set()
        self._parts: list[Part] = []
        if prompt_end:
            self._read_prompt(prompt_end)

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._region is not None and self._form.kind(self._region.name) == "reasoning"

    def push(self, text: str) -> list[Part]:
        """Add text of the reply; returns the parts that are clear now, in order."""
        self._buffer += text
        self._read(at_end=False)
        cut = max(0, self._at - _CONTEXT)
        self._buffer, self._at, self._num_done = self._buffer[cut:], self._at - cut, self._num_done + cut
        return self._taken()

    def finish(self) -> list[Part]:
        """End the reply; returns the remaining parts."""
        self._read(at_end=True)
        if self._space and not self.is_reasoning and self._last in ("", "text"):
            self._parts.append(Text("".join(self._space)))
        self._space = []
        return self._taken()

    def _taken(self) -> list[Part]:
        if not self._parts:
            return []
        parts, self._parts = joined(self._parts), []
        self.num_calls += sum(isinstance(part, Call) for part in parts)
        return parts

    def _read_prompt(self, prompt_end: str) -> None:
        """Read the prompt's end. Then the reader knows whether the reply begins inside a field, such as the reasoning.

        Parts that are read from the prompt are dropped, as they do not belong to the reply.
        """
        starts = [match.end() for match in self._form.template.start_anchor_re.finditer(prompt_end)]
        thinking = self._form.thinking
        if starts:
            self._buffer = prompt_end[starts[-1] :]
        elif thinking is not None and prompt_end.rstrip().endswith(thinking.opens):  # a template with other anchors
            self._buffer = thinking.opens
        if not self._buffer:
            return
        self._read(at_end=False)
        while self._call is None and self._read_text(at_end=True):
            pass
        if self._call is None:
            self._at = len(self._buffer)
        self._num_done = -self._at
        self._parts, self._space, self.reasoning_spans = [], [], []

    # --------------------------------------------------------------- regions

    def _read(self, *, at_end: bool) -> None:
        while self._read_call(at_end=at_end) if self._call is not None else self._read_text(at_end=at_end):
            pass

    def _read_text(self, *, at_end: bool) -> bool:
        """Read up to the next marker, or to text that may become one. Returns whether a marker was found."""
        was_reasoning = self.is_reasoning
        self._marker_at = self._num_done + self._at
        has_marker = self._read_to_marker(at_end=at_end)
        if was_reasoning:
            before = self.reasoning_spans.pop() if self.reasoning_spans else (self._marker_at,) * 2
            self.reasoning_spans.append((before[0], self._num_done + self._at))
        elif self.is_reasoning:
            self.reasoning_spans.append((self._marker_at, self._num_done + self._at))
        return has_marker

    def _read_to_marker(self, *, at_end: bool) -> bool:
        field, match, held = self._next_marker(at_end=at_end)
        start = held if match is None else match.start()
        if start > self._at:
            self._show(self._buffer[self._at : start])
        if match is None:
            self._at = start
            return False
        self._at = match.end()
        if self._region is None and field is not self._implicit:
            self._marker_at = self._num_done + match.start()
            self._open(field, match)
            return True
        if self._region is None and match.start() == match.end():
            return self._step_over()
        self._close()
        return True

    def _step_over(self) -> bool:
        """Show one character, so that an empty marker does not match here again. False at the end of the buffer."""
        if self._at == len(self._buffer):
            return False
        self._at += 1
        self._show(self._buffer[self._at - 1])
        return True

    def _next_marker(self, *, at_end: bool) -> tuple[Any, Any, int]:
        """Find the next marker that more text cannot change. Returns its field and match, and where certain text ends.

        Without such a marker, field and match are None.

        The first marker counts; if several begin at one position, the longest.
        """
        buffer, held, best = self._buffer, len(self._buffer), None
        if self._region is not None:
            watched = [(self._region, False)]
        else:
            watched = [(field, field is not self._implicit) for field in self._fields]
        for field, opens in watched:
            pattern = field.open_re if opens else field.close_re
            if pattern is None:
                match = None
            elif opens and self._implicit is not None and self._form.kind(field.name) == "reasoning":
                match = self._thinking_here(pattern, at_end=at_end)
            else:
                match = pattern.search(buffer, self._at, partial=not at_end)
            if match is None:
                continue
            literals, can_extend = (
                (field.open_literals, field.open_literal_can_extend)
                if opens
                else (field.close_literals, field.close_literal_can_extend)
            )
            is_final = literals is not None and not can_extend and not match.partial
            if not at_end and not is_final and may_grow(match, buffer):
                held = min(held, match.start())
                continue
            key = (match.start(), match.start() - match.end(), not opens, field.name)
            if best is None or key < best[0]:
                best = (key, field, match)
        if best is not None and (at_end or best[2].start() < held):
            return best[1], best[2], held
        if len(buffer) - held > _MOST_SPACE and buffer[held:].isspace():
            held = len(buffer) - _MOST_SPACE
        return None, None, held

    def _thinking_here(self, pattern: Any, *, at_end: bool) -> Any:
        """The marker that opens thinking, if it comes next, perhaps after white space.

        None after text of the answer, which only quotes the marker.
        """
        if self._last == "text":
            return None
        start = len(self._buffer) - len(self._buffer[self._at :].lstrip())
        matches = (pattern.match(self._buffer, begin, partial=not at_end) for begin in dict.fromkeys((self._at, start)))
        return next((match for match in matches if match is not None), None)

    def _open(self, field: Any, match: Any) -> None:
        kind = self._form.kind(field.name)
        if kind == "call":
            captures = {name: text for name, text in match.groupdict().items() if text is not None}
            marker = match.group()
            self._call = open_body(field, captures, self._schemas, has_marker=bool(marker.strip()))
            self._raw = [*self._space, marker]
        else:
            self._region = field
            self._lead = (field.join or "") if field.name in self._seen else ""
            self._seen.add(field.name)
            self._last = "" if kind == "text" else "opened"
        self._space = []

    def _close(self) -> None:
        if self._region is not None:
            self._last = "text" if self._form.kind(self._region.name) == "text" else "reasoning"
            self._region = None
        self._space = []

    def _read_call(self, *, at_end: bool) -> bool:
        """Continue to read a call. Returns whether it has ended, or failed."""
        assert self._call is not None
        call, before = self._call, self._at
        self._at = call.read(self._buffer, before, at_end=at_end)
        self._raw.append(self._buffer[before : self._at])
        if call.has_failed:
            self._call, raw = None, "".join(self._raw)
            if not raw:
                return self._step_over()
            self._show(raw)
        elif call.calls is not None:
            self._call = None
            self._parts += call.calls
            self._last = "call"
        else:
            return False
        return True

    def _show(self, text: str) -> None:
        """Show text of the open region. White space at its end is held back."""
        if text.isspace():
            self._space.append(text)
            return
        text = "".join([*self._space, text])
        if self._last in ("reasoning", "opened"):
            text = text.lstrip()
        visible = text.rstrip()
        self._space = [text[len(visible) :]] if len(visible) < len(text) else []
        self._parts.append((Reasoning if self.is_reasoning else Text)(self._lead + visible))
        self._lead = ""
        self._last = "shown" if self.is_reasoning else "text"
