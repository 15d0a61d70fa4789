"""Reads Anthropic's messages, system prompt and tools into a chat.

Successive messages of one role become one turn, as in Anthropic's own service.
A system message in the middle stays in its place, so that the prompt still begins like the earlier prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from foreword.engine import BREAKPOINT, Keep
from foreword.lint.bodies import BILLING_HEADER
from foreword.server.api_errors import APIError, bad_request
from foreword.server.chats.chat import Chat, thinking_inputs
from foreword.server.chats.tools import ToolChoice
from foreword.server.dialects.anthropic.fields import (
    AnyBlock,
    CacheControl,
    CountMessageTokensRequest,
    CreateMessageRequest,
    ImageBlock,
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from foreword.server.service import ChatMark, Ending, Service
from foreword.text.conversation import PICTURES, Place, earlier_call, function_tool

TTL_S = {"5m": 300.0, "1h": 3600.0}
MOST_MARKS = 4
Plain = dict[str, Any]
Request = CreateMessageRequest | CountMessageTokensRequest


@dataclass(frozen=True, slots=True)
class _Block:
    """A block that can have a mark."""

    where: str
    control: CacheControl | None
    place: Place | None
    """The end of the block; None: the block is not part of the prompt."""

    @property
    def ttl(self) -> str:
        return (self.control and self.control.ttl) or "5m"


class Marks:
    """The cache marks of a body. `see` must get all blocks that can have marks: tools, then system, then messages."""

    def __init__(self) -> None:
        self._marked: list[_Block] = []
        self._last: _Block | None = None

    def see(self, where: str, control: CacheControl | None, place: Place | None) -> None:
        self._last = _Block(where, control, place)
        if control is not None:
            self._marked.append(self._last)

    def checked(self, automatic: CacheControl | None) -> list[ChatMark]:
        """Return the marks, including the automatic mark. Raises APIError 400 with Anthropic's words."""
        marked, last = self._marked, self._last
        if automatic is not None and last is not None:
            automatic_block = _Block(last.where, automatic, last.place)
            if last.control is None:
                marked = [*marked, automatic_block]
            elif last.ttl != automatic_block.ttl:
                raise bad_request(
                    f"cache_control.ttl: {automatic_block.ttl!r} differs from the ttl {last.ttl!r} of the last block, "
                    f"{last.where}; give both the same"
                )
        if len(marked) > MOST_MARKS:
            raise bad_request(
                f"A maximum of {MOST_MARKS} blocks with cache_control may be provided. Found {len(marked)}."
            )
        for before, block in pairwise(marked):
            if (before.ttl, block.ttl) == ("5m", "1h"):
                raise bad_request(
                    f"{block.where}.cache_control.ttl: a ttl='1h' cache_control block must not come after a ttl='5m' "
                    "cache_control block. Note that blocks are processed in the following order: `tools`, `system`, "
                    "`messages`."
                )
        return [ChatMark(mark.place, Keep(TTL_S[mark.ttl], BREAKPOINT)) for mark in marked if mark.place is not None]


def chat_of(service: Service, body: Request, num_bytes: int) -> Chat:
    """Return the chat that a body asks for. Raises APIError 400."""
    template = service.tokenizer.chat_template or ""
    choice = _tool_choice(body)
    inputs = _template_inputs(body, template, is_forced=choice.mode == "required")
    turns = _turns(body.messages)
    continues = turns[-1].role == "assistant" and not turns[-1].is_blank
    if turns[-1].role == "assistant" and turns[-1].is_blank:
        turns.pop()
    if continues:
        _check_continued(turns[-1], body)
    marks = Marks()
    tools = _tools(body.tools or (), marks)
    writer = _MessageWriter(_system(body.system, marks), marks)
    thinking = body.thinking
    return Chat(
        writer.messages(turns),
        tools,
        choice,
        inputs,
        Ending(continue_final_message=continues),
        thinking_budget=thinking.budget_tokens if thinking is not None and thinking.type == "enabled" else None,
        marks=marks.checked(body.cache_control),
        num_bytes=num_bytes,
    )


# -------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class _Turn:
    """Successive messages of one role."""

    role: str
    where: str
    """The place of the turn's first message, for errors."""
    blocks: Sequence[tuple[str, AnyBlock]]
    """The place and the content of each block of the turn."""

    @property
    def is_blank(self) -> bool:
        return all(isinstance(block, TextBlock) and not block.text.strip() for _, block in self.blocks)


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    turns = []
    for role, same in groupby(enumerate(messages), lambda numbered: numbered[1].role):
        members = list(same)
        blocks = [
            (f"messages.{number}.content.{at}", block)
            for number, message in members
            for at, block in enumerate(message.content)
        ]
        turns.append(_Turn(role, f"messages.{members[0][0]}", blocks))
    for before, turn, after in zip([None, *turns], turns, [*turns[1:], None], strict=False):
        if turn.role != "system":
            continue
        if before is None:
            raise bad_request(f"{turn.where}: the first message cannot be of the role 'system'; use `system` for it")
        if before.role != "user" or (after is not None and after.role != "assistant"):
            raise bad_request(f"{turn.where}: a system message must follow a user turn, and precede none")
    return turns


class _MessageWriter:
    """Appends turns to the messages of a chat template."""

    def __init__(self, messages: list[Plain], marks: Marks) -> None:
        self._messages = messages
        self._marks = marks
        self._names: dict[str, str] = {}
        """Id of a call -> name of the called function."""

    def messages(self, turns: Iterable[_Turn]) -> list[Plain]:
        for turn in turns:
            match turn.role:
                case "user":
                    self._user(turn)
                case "assistant":
                    self._assistant(turn)
                case _:
                    self._system(turn)
        return self._messages

    def _user(self, turn: _Turn) -> None:
        texts: list[tuple[str, TextBlock | ImageBlock]] = []
        for where, block in turn.blocks:
            match block:
                case TextBlock() | ImageBlock():
                    texts.append((where, block))
                case ToolResultBlock():
                    self._add_text(texts)
                    texts = []
                    self._messages.append(self._result(where, block))
                case _:
                    raise _misplaced(where, block, "assistant")
        if not turn.blocks:
            raise bad_request(f"{turn.where}.content: user messages must have non-empty content")
        self._add_text(texts)

    def _add_text(self, blocks: Sequence[tuple[str, TextBlock | ImageBlock]]) -> None:
        if blocks:
            content = _joined(blocks, self._marks, len(self._messages))
            self._messages.append({"role": "user", "content": content, **_pictures(blocks)})

    def _result(self, where: str, block: ToolResultBlock) -> Plain:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise bad_request(
                f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id[:100]}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in a previous message."
            )
        at, begun = len(self._messages), "Error: " if block.is_error else ""
        parts = [(f"{where}.content.{number}", part) for number, part in enumerate(block.content or ())]
        content = _joined(parts, self._marks, at, begun)
        self._marks.see(where, block.cache_control, Place(at, len(content)))
        return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content, **_pictures(parts)}

    def _assistant(self, turn: _Turn) -> None:
        texts: list[str] = []
        size = 0
        thoughts: list[str] = []
        message: Plain = {"role": "assistant", "content": ""}
        for where, block in turn.blocks:
            match block:
                case TextBlock():
                    texts.append(block.text)
                    size += len(block.text)
                    if block.text:
                        self._marks.see(where, block.cache_control, Place(len(self._messages), size))
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case RedactedThinkingBlock():
                    pass  # only the server that encrypted the block can read it
                case ToolUseBlock():
                    self._names[block.id] = block.name
                    message.setdefault("tool_calls", []).append(earlier_call(block.id, block.name, block.input))
                    self._marks.see(where, block.cache_control, Place(len(self._messages)))
                case _:
                    raise _misplaced(where, block, "user")
        message["content"] = "".join(texts)
        if any(thoughts):  # a server that hides reasoning sends an empty text
            message["reasoning_content"] = "".join(thoughts)
        self._messages.append(message)

    def _system(self, turn: _Turn) -> None:
        blocks: list[tuple[str, TextBlock]] = []
        for where, block in turn.blocks:
            if not isinstance(block, TextBlock):
                raise _misplaced(
                    where, block, "user" if isinstance(block, ToolResultBlock | ImageBlock) else "assistant"
                )
            blocks.append((where, block))
        self._messages.append({"role": "system", "content": _joined(blocks, self._marks, len(self._messages))})


def _system(blocks: Sequence[TextBlock] | None, marks: Marks) -> list[Plain]:
    placed = [(f"system.{number}", block) for number, block in enumerate(blocks or ())]
    if placed and placed[0][1].text.startswith(BILLING_HEADER):
        marks.see(placed[0][0], placed[0][1].cache_control, None)
        del placed[0]
    return [{"role": "system", "content": _joined(placed, marks, 0)}] if placed else []


def _pictures(blocks: Iterable[tuple[str, TextBlock | ImageBlock]]) -> Plain:
    """Return the pictures among blocks as a field of a message; empty without pictures."""
    files = [block.file() for _, block in blocks if isinstance(block, ImageBlock)]
    return {PICTURES: files} if files else {}


def _joined(blocks: Iterable[tuple[str, TextBlock | ImageBlock]], marks: Marks, index: int, begun: str = "") -> str:
    """Return a message's content: `begun`, then the texts of blocks. Each block is passed to `marks`."""
    pieces, size, separator = [begun], len(begun), ""
    for where, block in blocks:
        pieces += ["" if isinstance(block, ImageBlock) else separator, block.text]
        size += len(pieces[-2]) + len(pieces[-1])
        separator = "" if isinstance(block, ImageBlock) else "\n"
        if block.text:
            marks.see(where, block.cache_control, Place(index, size))
    return "".join(pieces)


def _misplaced(where: str, block: AnyBlock, role: str) -> APIError:
    return bad_request(f"{where}: `{block.type}` blocks can only be in {role} messages")


def _check_continued(turn: _Turn, body: Request) -> None:
    """Raise APIError 400 for an answer that cannot be continued: it has calls or no text, or must follow a schema."""
    calls = [block.id for _, block in turn.blocks if isinstance(block, ToolUseBlock)]
    if calls:
        raise bad_request(
            f"{turn.where}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(calls)[:200]}. Each `tool_use` block must have a corresponding `tool_result` block in the "
            "next message."
        )
    if not any(isinstance(block, TextBlock) and block.text.strip() for _, block in turn.blocks):
        raise bad_request(f"{turn.where}: the last answer has no text to continue; give text, or leave the message out")
    if output_format(body) is not None:
        raise bad_request("output_config.format: cannot be combined with a last message of the assistant")


# ---------------------------------------------------------------------- tools


def _tools(tools: Sequence[Tool], marks: Marks) -> list[Plain]:
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("tools: Tool names must be unique.")
    for number, tool in enumerate(tools):
        marks.see(f"tools.{number}", tool.cache_control, Place(None, number + 1))
    return [function_tool(tool.name, tool.description, tool.input_schema) for tool in tools]


def _tool_choice(body: Request) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    at_most_one = bool(choice.disable_parallel_tool_use)
    match choice.type:
        case "auto" | "none":
            return ToolChoice(choice.type, at_most_one=at_most_one)
        case _ if not body.tools:
            raise bad_request("tool_choice: may only be specified while providing tools")
        case "any":
            return ToolChoice("required", at_most_one=at_most_one)
        case _ if choice.name is None:
            raise bad_request("tool_choice.tool.name: Field required")
    return ToolChoice("required", (choice.name,), at_most_one=True)


def output_format(body: Request) -> dict[str, Any] | None:
    """Return the JSON schema that the answer must follow; None for any text."""
    form = (body.output_config and body.output_config.format) or body.output_format
    return None if form is None else form.json_schema


def _template_inputs(body: Request, template: str, *, is_forced: bool) -> Plain:
    """Return the template's inputs for thinking. Without `thinking`, the model answers at once if it can."""
    kind = "disabled" if body.thinking is None else body.thinking.type
    effort = body.output_config.effort if body.output_config is not None else None
    if kind == "enabled" and "think" not in template:
        raise bad_request(
            "thinking.type: 'enabled' is not supported by this model (capability_rejected:thinking); leave it out"
        )
    if kind == "enabled" and is_forced:
        raise bad_request("thinking: may not be enabled when tool_choice forces tool use")
    return thinking_inputs(template, enabled=kind != "disabled", effort=effort)
