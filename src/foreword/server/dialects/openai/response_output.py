"""The output of a response: its items, and the events that report them.

Knows the names, order and fields of items and events. Whole and streamed responses are built by the same steps, so they
are equal.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.server.bodies.json_scan import parse_json
from foreword.server.dialect import Event
from foreword.server.service import new_id
from foreword.text.reply import Call, Part, Reasoning, Text

Item = dict[str, Any]
Logprobs = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool, as clients know it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether it is called with a text."""


class OutputItems:
    """The items of one response while its parts arrive. Each step yields the events that report it."""

    def __init__(self, tools: Mapping[str, CalledTool], *, with_encrypted: bool) -> None:
        """`tools` by the names that the model calls; `with_encrypted` adds reasoning as stateless clients keep it."""
        self.items: list[Item] = []
        self._tools = tools
        self._with_encrypted = with_encrypted
        self._num_events = 0
        self._texts: list[str] = []
        """Pieces of the open item's text."""
        self._logprobs: Logprobs = []
        self._open: type[Text] | type[Reasoning] | None = None

    def event(self, kind: str, **data: Any) -> Event:
        """The next event."""
        event = {"type": kind, "sequence_number": self._num_events, **data}
        self._num_events += 1
        return kind, event

    def add(self, part: Part, logprobs: Logprobs) -> Iterator[Event]:
        """Add a part. `logprobs` are those of the tokens that came with it; they are shown with texts."""
        if isinstance(part, Call):
            yield from self._close()
            yield from self._call(part)
            return
        if self._open is not type(part):
            yield from self._close()
            yield from self._begin(part)
        self._texts.append(part.text)
        if isinstance(part, Reasoning):
            yield self.event("response.reasoning_text.delta", **self._where, delta=part.text)
        else:
            self._logprobs += logprobs
            yield self.event("response.output_text.delta", **self._where, delta=part.text, logprobs=logprobs)

    def finish(self, status: str) -> Iterator[Event]:
        """End the output; a response that said nothing has one empty message."""
        if not self.items:
            yield from self._begin(Text(""))
        yield from self._close(status)

    @property
    def _where(self) -> Item:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}

    def _begin(self, part: Text | Reasoning) -> Iterator[Event]:
        self._open = type(part)
        item: Item = {"status": "in_progress", "content": []}
        if isinstance(part, Text):
            item |= {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        else:
            item |= {"id": new_id("rs_"), "type": "reasoning", "summary": []}
        self.items.append(item)
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=dict(item))
        yield self.event("response.content_part.added", **self._where, part=self._part("", []))

    def _part(self, text: str, logprobs: Logprobs) -> Item:
        if self._open is Reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if self._open is None:
            return
        text, logprobs, item = "".join(self._texts), self._logprobs, self.items[-1]
        part = self._part(text, logprobs)
        item |= {"status": status, "content": [part]}
        if self._open is Text:
            yield self.event("response.output_text.done", **self._where, text=text, logprobs=logprobs)
        else:
            yield self.event("response.reasoning_text.done", **self._where, text=text)
            if self._with_encrypted:  # nothing is secret here: a client that keeps only this field sends it back
                item["encrypted_content"] = base64.b64encode(text.encode()).decode()
        yield self.event("response.content_part.done", **self._where, part=part)
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open, self._texts, self._logprobs = None, [], []

    def _call(self, call: Call) -> Iterator[Event]:
        tool = self._tools.get(call.name, CalledTool(call.name))
        is_custom = tool.is_custom
        kind, field, written = ("function_call", "arguments", call.arguments)
        if is_custom:
            kind, field, written = ("custom_tool_call", "input", _input_of(call.arguments))
        item = {"id": new_id("ctc_" if is_custom else "fc_"), "type": kind, "status": "in_progress"}
        item |= {"call_id": call.id or f"call_{secrets.token_hex(12)}", "name": tool.name, field: ""}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        self.items.append(item)
        index = len(self.items) - 1
        yield self.event("response.output_item.added", output_index=index, item=dict(item))
        where = {"item_id": item["id"], "output_index": index}
        stem = "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
        yield self.event(f"{stem}.delta", **where, delta=written)
        item |= {field: written, "status": "completed" if call.is_complete else "incomplete"}
        yield self.event(f"{stem}.done", **where, **{field: written}, **({} if is_custom else {"name": tool.name}))
        yield self.event("response.output_item.done", output_index=index, item=item)


def _input_of(arguments: str) -> str:
    """The text that a custom tool is called with; the arguments as they are if they have no such text."""
    try:
        given = parse_json(arguments)
    except ValueError:
        return arguments
    text = given.get("input") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
