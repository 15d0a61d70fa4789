"""Limits on the contents of one request. They are checked before single items are processed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from foreword.server.api_errors import APIError, bad_request
from foreword.server.bodies.fields import Body
from foreword.server.bodies.json_scan import JsonSize

MAX_DEPTH = 128
MAX_FIELDS = 256
MAX_ENTRIES = 1024
"""Default limit of the entries of a list or an object in a body."""

_MOST = {"stop": 16, "tools": 128, "metadata": 16}

NUM_OTHER_VALUES = 50_000
"""Limit of a body's values outside its prompts: schemas, tools, biases."""

NUM_OTHER_BYTES = 2**20
BYTES_PER_TOKEN = 12
"""The most bytes that a token id takes in JSON: ten digits, a comma and a space."""
BYTES_PER_CHARACTER = 12
"""The most bytes that a character takes in JSON: a surrogate pair whose two halves are written as escapes."""
VALUES_PER_MESSAGE = 8

_NOT_TEXT = {
    **dict.fromkeys(("image", "image_url", "input_image"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url"), "videos"),
    **dict.fromkeys(("file", "input_file"), "files"),
}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of one server."""

    max_body_bytes: int
    max_model_len: int
    max_prompts: int
    """Limit of one call's prompts."""
    vocab_size: int
    max_token_characters: int
    """The number of characters of the longest token."""
    max_pictures: int = 0
    """Limit of a conversation's pictures; 0: the model takes no pictures."""
    picture_refusal: str = "takes no images"
    """The words in errors for pictures, if the server takes none."""

    @property
    def max_characters(self) -> int:
        """The number of characters of the longest text that can fit into `max_model_len` tokens."""
        return self.max_model_len * self.max_token_characters

    def most_bytes(self, model: type[Body]) -> int:
        """Return the limit of a body's bytes. It is high enough for the longest prompts, or for pictures."""
        if self.max_pictures and model.HOLDS != "prompts":
            return self.max_body_bytes
        num_bytes = BYTES_PER_CHARACTER * self.max_characters + BYTES_PER_TOKEN * self.max_model_len + NUM_OTHER_BYTES
        return min(self.max_body_bytes, num_bytes * self._num_prompts(model))

    def _num_prompts(self, model: type[Body]) -> int:
        return self.max_prompts if model.HOLDS == "prompts" else 1

    def check_size(self, model: type[Body], size: JsonSize) -> None:
        """Raise APIError 400 if a body has too many values or too many levels of nesting."""
        if size.depth > MAX_DEPTH:
            raise bad_request(
                f"The body has lists and objects {size.depth} deep inside each other; at most {MAX_DEPTH} are taken, "
                "write it flatter."
            )
        num_containers = NUM_OTHER_VALUES + VALUES_PER_MESSAGE * self.max_model_len
        num_values = num_containers
        if model.HOLDS != "text":
            num_values += self._num_prompts(model) * self.max_model_len
        for count, limit, name in (
            (size.num_values, num_values, "values"),
            (size.num_containers, num_containers, "lists and objects"),
        ):
            if count > limit:
                raise bad_request(f"The body has {count} {name}; at most {limit} are taken, send fewer.")

    def check_counts(self, model: type[Body], body: Any) -> None:
        """Raise APIError 400 if a field of parsed JSON has more entries, characters or tokens than the server takes."""
        if not isinstance(body, dict):
            raise bad_request("Invalid value for the body: it must be a JSON object")
        _at_most(body, MAX_FIELDS, "the body")
        is_truncated = body.get("truncate_prompt_tokens") is not None  # then a prompt of token ids may be longer
        for name, value in body.items():
            if not (is_truncated and name == "prompt" and _has_token_ids(value)):
                self._check_field(model, name, value)
            elif not isinstance(value[0], int):
                self._check_prompts(name, value)

    def _check_field(self, model: type[Body], name: str, value: Any) -> None:
        match name:
            case "prompt" | "items":
                self._check_prompt(name, value)
            case "input" | "documents" if model.HOLDS == "prompts":
                self._check_prompt(name, value)
            case "messages" | "input":
                self._check_conversation(name, value)
                self._check_text(name, value)
            case "contents":
                self._check_conversation(name, value, "parts")
            case "systemInstruction" | "system_instruction":
                self._check_conversation(name, [value], "parts")
            case "generateContentRequest" | "generate_content_request" if value is not None:
                self.check_counts(model, value)
            case "instructions" | "instruction" | "documents" | "question" | "query":
                self._check_pieces(name, value)
            case "system":
                self._check_conversation(name, [{"content": value}])
            case "tokens" | "context":
                _at_most(value, self.max_model_len, name)
            case "allowed_token_ids":
                _at_most(value, self.vocab_size, name)
            case _:
                _at_most(value, _MOST.get(name, MAX_ENTRIES), name)
                for inner, below in _inner_objects(name, value):
                    _at_most(below, MAX_FIELDS, inner)

    def _check_prompt(self, name: str, prompt: Any) -> None:
        """Check a text, a list of token ids, or several texts or lists."""
        if not isinstance(prompt, list):
            self._check_text(name, prompt)
        elif prompt and isinstance(prompt[0], int):
            self._check_tokens(name, prompt)
        else:
            self._check_prompts(name, prompt)
            for number, entry in enumerate(prompt):
                self._check_text(f"{name}[{number}]", entry.get("text") if isinstance(entry, dict) else entry)
                self._check_tokens(f"{name}[{number}]", entry)

    def _check_prompts(self, name: str, prompts: Any) -> None:
        if len(prompts) > self.max_prompts:
            raise bad_request(
                f"{name} has {len(prompts)} entries; at most {self.max_prompts} are taken in one call "
                "(--max-choices), send fewer",
                param=name,
            )

    def _check_pieces(self, name: str, value: Any) -> None:
        """Check a text, a list of token ids, or a list of such texts and lists that becomes one prompt."""
        is_one = not isinstance(value, list) or bool(value and isinstance(value[0], int))
        pieces = [value] if is_one else value
        _at_most(pieces, MAX_ENTRIES, name)
        self._check_characters(name, sum(len(piece) for piece in pieces if isinstance(piece, str)))
        self._check_tokens(name, [token_id for piece in pieces if isinstance(piece, list) for token_id in piece])

    def _check_conversation(self, name: str, messages: Any, key: str = "content") -> None:
        """Check messages, each with its text or its parts under `key`. A single object counts as a list of one, as in
        Google's API.
        """
        if isinstance(messages, dict):
            messages = [messages]
        if not isinstance(messages, list):
            return
        _at_most(messages, self.max_model_len, name)
        num_characters = num_parts = num_pictures = 0
        for number, message in enumerate(messages):
            content = message.get(key, message.get("output")) if isinstance(message, dict) else None
            if isinstance(content, dict):
                content = [content]
            if isinstance(content, str):
                num_characters += len(content)
            elif isinstance(content, list):
                num_parts += len(content)
                if num_parts <= self.max_model_len:
                    num_characters += sum(_num_characters(part) for part in content)
                    num_pictures += self._num_pictures(content, f"{name}[{number}].{key}")
            if self.max_pictures and isinstance(message, dict) and isinstance(message.get("images"), list):
                num_pictures += len(message["images"])  # Ollama's field for pictures
        if num_parts > self.max_model_len:
            raise _too_many(num_parts, self.max_model_len, f"the contents of {name}", name)
        if num_pictures > self.max_pictures:
            raise bad_request(
                f"{name} has {num_pictures} pictures; at most {self.max_pictures} are taken (--max-pictures), send "
                "fewer",
                param=name,
            )
        self._check_characters(name, num_characters)

    def _num_pictures(self, parts: list[Any], where: str) -> int:
        """Count the pictures among parts. Raises APIError 400 for media that the model does not take."""
        count = 0
        for number, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, Mapping) else None
            medium = _NOT_TEXT.get(kind) if isinstance(kind, str) else None
            if self.max_pictures and kind == "tool_result" and isinstance(part.get("content"), list):
                count += self._num_pictures(part["content"], f"{where}[{number}].content")
            elif self.max_pictures and (medium == "images" or _has_inline_data(part)):
                count += 1
            elif medium is not None:
                refusal = self.picture_refusal if medium == "images" else f"takes no {medium}"
                raise bad_request(
                    f"{where}[{number}] is of the type {kind!r}; this server {refusal}, send text alone",
                    param=f"{where}[{number}]",
                )
        return count

    def _check_text(self, name: str, text: Any) -> None:
        if isinstance(text, str):
            self._check_characters(name, len(text))

    def _check_characters(self, name: str, num_characters: int) -> None:
        if num_characters > self.max_characters:
            raise bad_request(
                f"{name} has {num_characters} characters; the {self.max_model_len} tokens of this server's "
                f"max_model_len hold at most {self.max_characters} of them, send less text",
                param=name,
                code="context_length_exceeded",
            )

    def _check_tokens(self, name: str, token_ids: Any) -> None:
        if isinstance(token_ids, list) and len(token_ids) > self.max_model_len:
            raise bad_request(
                f"{name} has {len(token_ids)} tokens; this server's max_model_len is {self.max_model_len}, send fewer",
                param=name,
                code="context_length_exceeded",
            )


def _has_token_ids(prompt: Any) -> bool:
    """Say whether a prompt is a list of token ids, or several such lists. `check_size` has limited their number."""
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)


def _inner_objects(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each object in a field that may have only a limited number of keys."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield f"{name}[{number}]", entry
            if isinstance(entry, dict):
                yield f"{name}[{number}].function", entry.get("function")
    elif isinstance(value, dict):
        for key in ("json_schema", "format", "function"):
            yield f"{name}.{key}", value.get(key)


def _at_most(value: Any, limit: int, name: str) -> None:
    if isinstance(value, (list, dict)) and len(value) > limit:
        raise _too_many(len(value), limit, name, name)


def _too_many(count: int, limit: int, what: str, param: str) -> APIError:
    return bad_request(f"{what[:100]} has {count} entries; at most {limit} are taken, send fewer", param=param[:100])


def _has_inline_data(part: Any) -> bool:
    return isinstance(part, Mapping) and ("inlineData" in part or "inline_data" in part)


def _num_characters(part: Any) -> int:
    text = part.get("text") if isinstance(part, dict) else None
    return len(text) if isinstance(text, str) else 0
