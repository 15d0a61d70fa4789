"""Picture marks: where pictures stand in the text of a message, until a chat template writes its own sign for them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from foreword.errors import InvalidRequestError

MARK = f"\x02picture {secrets.token_hex(16)}\x03"
"""Stands for a picture. No client can guess it, so a text with it has a picture there."""
PICTURES = "\x02pictures"
"""The field of a plain message that has the files of its pictures, in the order of their marks; no caller has one."""


def joined(texts: Sequence[str], between: str) -> str:
    """Texts with something between them, but next to pictures."""
    if MARK not in texts:
        return between.join(texts)
    whole = ""
    for text in texts:
        whole += text if not whole or text == MARK or whole.endswith(MARK) else between + text
    return whole


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The files of all pictures of a conversation, in the order of their marks."""
    return [file for message in messages for file in message.get(PICTURES, ())]


def pictures_in_order(
    messages: Sequence[Mapping[str, Any]], write: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> list[Any]:
    """The files of all pictures in the order that `write` gives to their marks: it may move messages and texts."""
    files, numbers = pictures_of(messages), count()
    if (num_marks := sum(str(one["content"]).count(MARK) for one in messages)) != len(files):
        raise InvalidRequestError(f"the messages have {len(files)} pictures, but {num_marks} places for them")
    numbered = [
        {**one, "content": re.sub(MARK, lambda mark: f"{mark[0]}{next(numbers)};", one["content"])} for one in messages
    ]
    contents = [message.get("content") or "" for message in write(numbered)]
    texts = [one if isinstance(one, str) else "".join(part.get("text", "") for part in one) for one in contents]
    return [files[int(number)] for number in re.findall(rf"{MARK}(\d+);", "".join(texts))]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a conversation with pictures for a template: contents with marks become lists of parts."""
    return [_in_parts({key: value for key, value in message.items() if key != PICTURES}) for message in messages]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content, parts = message.get("content"), list[dict[str, Any]]()
    if content is None or (isinstance(content, str) and MARK not in content):
        return message
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part.get("type") != "text":
            parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(MARK)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}
