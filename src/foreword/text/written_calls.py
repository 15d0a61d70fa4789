"""Written calls: tools and their calls as text, for chat templates that take none.

Knows tools and calls in OpenAI's form, and the form of a family's calls. A family without one gets JSON between tags,
which small models know from the templates of many others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foreword.text.reply.format import GENERIC, ReplyFormat, family


def written_calls(calls: Sequence[Mapping[str, Any]], reply: ReplyFormat | None) -> str:
    """Calls as a model of this family writes them."""
    form = _call_form(reply)
    one_by_one = [_written(call["function"], form, number) for number, call in enumerate(calls)]
    between = str(form.get("between", ""))
    return f"{form.get('begin', '')}{between.join(one_by_one)}{form.get('end', '')}"


def tool_instructions(tools: Sequence[Mapping[str, Any]], reply: ReplyFormat | None) -> str:
    """What tells a model of its tools and of how to call them."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    example = written_calls([{"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}], reply)
    return "\n".join(["You can call these functions:", *lines, "", "To call a function, answer with:", example])


def _call_form(reply: ReplyFormat | None) -> Mapping[str, Any]:
    form = reply.call_form if reply is not None and reply.call_form is not None else family(GENERIC).call_form
    assert form is not None
    return form


def _written(function: Mapping[str, Any], form: Mapping[str, Any], number: int) -> str:
    opening, closing = (
        str(form[key])
        .replace("{name}", function["name"])
        .replace("{number}", str(number))
        .replace("{id}", f"{number:09d}")
        for key in ("open", "close")
    )
    return f"{opening}{_arguments(function['arguments'], form.get('arguments'))}{closing}"


def _arguments(arguments: Any, tags: Mapping[str, str] | None) -> str:
    if isinstance(arguments, str):
        return arguments
    if tags is None:
        return json.dumps(arguments, ensure_ascii=False)
    mark = tags.get("string", "")
    written = []
    for key, value in arguments.items():
        text = f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        written.append(tags["open"].replace("{key}", key) + text + tags["close"])
    return tags.get("between", "").join(written)
