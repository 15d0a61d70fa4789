"""Lines that other programs write, as bodies of requests: vLLM's request log, LiteLLM's and OpenTelemetry's records.

What such a line leaves out, such as redacted text, is an error that names the program and the setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from foreword.errors import TraceError

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_VLLM_LINE = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]\s]+:\d+\] ?(.*)$")
_VLLM_REQUEST = re.compile(
    r"Request \S+ details: prompt: .*, prompt_token_ids: (\[[\d, ]*\]|None), prompt_embeds shape: "
)
REDACTED = "redacted-by-litellm"
OTEL_MESSAGES = "gen_ai.input.messages"
OTEL_OPERATIONS = (None, "chat", "text_completion", "generate_content")
"""Those that call a model; others, such as of agents and tools, have such spans as children."""
_LITELLM_CALL = re.compile(
    r"a?(text_)?completion(_with_retries)?|a?responses|a?anthropic_messages|a?generate_content(_stream)?"
    r"|(allm_|llm_)?pass_?through_(endpoint|route)"
)
DIGEST_DIGITS = 12


class NoRequestError(TraceError):
    """A line of a known program that is no prompt: it is passed over and counted nowhere."""


def of_vllm_log(line: str) -> dict[str, Any] | None:
    """The request of a line of vLLM's log; None for any other line. Raises NoRequestError if it has none."""
    found = None if line.startswith(("{", "[")) else _VLLM_LINE.search(_COLOR.sub("", line.rstrip("\r\n")))
    if found is None:
        return None
    request = _VLLM_REQUEST.match(found[2])
    if request is None or request[1] == "None":
        raise NoRequestError("a line of vLLM's log without the token ids of a prompt")
    try:
        moment = datetime.strptime(f"2000-{found[1]}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)  # it writes no year
        return {"prompt_token_ids": json.loads(request[1]), "timestamp": moment.timestamp() * 1000}
    except ValueError:
        return None


def as_body(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The body of a record of LiteLLM or OpenTelemetry; any other record as it is. Raises TraceError."""
    if {"resourceSpans", "resourceLogs"} & set(record):
        raise TraceError(f"{where} is an export of OpenTelemetry with many records; write one span or log on each line")
    try:
        attributes = _attributes(record.get("attributes"))
        if any(name.startswith("gen_ai.") for name in attributes):
            return _of_otel(record, attributes, where)
        if "litellm_call_id" in record or {"call_type", "startTime"} <= set(record):
            return _of_litellm(record, where)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(
            f"{where} looks like a record of LiteLLM or OpenTelemetry and cannot be read ({type(error).__name__}: "
            f"{str(error)[:60]}); give the body of the request"
        ) from error
    return record


def _of_litellm(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    call = record.get("call_type")
    if call and not _LITELLM_CALL.fullmatch(str(call)):
        raise NoRequestError(f"{where} is a call of LiteLLM that has no prompt: {call}")
    if str(record.get("cache_hit")).lower() == "true" or record.get("status") == "failure":
        raise NoRequestError(f"{where} is a call of LiteLLM that no model has answered")
    messages = _parsed(record.get("messages"))
    body: dict[str, Any] = {**(_parsed(record.get("model_parameters")) or {})}
    if not messages:
        sent = _parsed(record.get("proxy_server_request")) or {}
        body |= sent.get("body", sent)
        messages = body.get("messages")
    if not messages or REDACTED in json.dumps(messages):
        raise TraceError(f"{where}: LiteLLM left out the messages; log with turn_off_message_logging=false")
    body |= {"prompt" if isinstance(messages, str) else "messages": messages}
    return _with_numbers(body, record.get("startTime"), record.get("completion_tokens"))


def _of_otel(record: Mapping[str, Any], attributes: Mapping[str, Any], where: str) -> dict[str, Any]:
    operation = attributes.get("gen_ai.operation.name")
    if operation not in OTEL_OPERATIONS:
        raise NoRequestError(f"{where} is a span of {operation}, not of a call of a model")
    if OTEL_MESSAGES not in attributes:
        raise TraceError(
            f"{where}: the record of OpenTelemetry has no {OTEL_MESSAGES}; capture contents, with "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT and the conventions of gen_ai_latest_experimental"
        )
    system = _parsed(attributes.get("gen_ai.system_instructions")) or []
    messages: list[dict[str, Any]] = [{"role": "system", "content": _text(system)}] if system else []
    for message in _parsed(attributes[OTEL_MESSAGES]):
        parts = message["parts"]
        for part in parts:
            if part["type"] == "tool_call_response":
                result = part.get("response", part.get("result"))
                content = result if isinstance(result, str) else json.dumps(result)
                messages.append({"role": "tool", "tool_call_id": part.get("id") or "", "content": content})
        calls = [
            {
                "id": part.get("id") or "",
                "type": "function",
                "function": {"name": part["name"], "arguments": part.get("arguments")},
            }
            for part in parts
            if part["type"] == "tool_call"
        ]
        text = _text(parts)
        if text or calls:
            messages.append({"role": message["role"], "content": text, **({"tool_calls": calls} if calls else {})})
    tools = [
        {"type": "function", "function": tool} for tool in _parsed(attributes.get("gen_ai.tool.definitions")) or ()
    ]
    body = {"messages": messages, **({"tools": tools} if tools else {})}
    names = ("timestamp", "startTimeUnixNano", "timeUnixNano", "start_time")
    time = next((record[name] for name in names if record.get(name) is not None), None)
    return _with_numbers(body, time, attributes.get("gen_ai.usage.output_tokens"))


def _text(parts: Any) -> str:
    """The text of parts; one that is no text, such as a picture, stands as its type and a digest."""
    return "\n".join(
        part["content"]
        if part["type"] == "text"
        else f"[{part['type']} {sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:DIGEST_DIGITS]}]"
        for part in parts
        if part["type"] not in ("tool_call", "tool_call_response", "reasoning")
    )


def _parsed(value: Any) -> Any:
    """A value that may be written as text in JSON."""
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _attributes(given: Any) -> dict[str, Any]:
    """Attributes as a map, or as OTLP's list of keys and typed values."""
    if isinstance(given, list):
        return {one["key"]: next(iter(one["value"].values()), None) for one in given}
    return dict(given) if isinstance(given, Mapping) else {}


def _with_numbers(body: dict[str, Any], time: Any, num_output_tokens: Any) -> dict[str, Any]:
    """A body with the time in ms, of text in ISO 8601, of seconds or of nanoseconds, and the length of its answer."""
    if isinstance(time, str) and not time.isdigit():
        body["timestamp"] = datetime.fromisoformat(time).timestamp() * 1000
    elif time is not None:
        number = float(time)
        body["timestamp"] = number / 1e6 if number > 1e15 else number if number > 1e11 else number * 1000
    if num_output_tokens is not None:
        body["output_length"] = int(num_output_tokens)
    return body
