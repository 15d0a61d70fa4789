"""Lines of other programs: read as what they mean, or refused with the program's name and the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.errors import TraceError
from foreword.lint.file import read_prompts
from foreword.replay.trace import RecordedRequest, TraceReader
from foreword.text import Tokenizer
from real_models import real_model

MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say hello."}]
LITELLM = {
    "id": "x",
    "call_type": "acompletion",
    "litellm_call_id": "y",
    "startTime": 1795000000.5,
    "completion_tokens": 7,
}
PARTS = [{"type": "text", "content": "Say hello."}]
OTEL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "You are brief."}]),
    "gen_ai.input.messages": json.dumps([{"role": "user", "parts": PARTS}]),
    "gen_ai.usage.output_tokens": 7,
}
TYPED = [
    {"key": name, "value": {"stringValue" if isinstance(value, str) else "intValue": value}}
    for name, value in OTEL.items()
]
RECORDS: dict[str, dict[str, Any]] = {
    "LiteLLM": {**LITELLM, "messages": MESSAGES, "model_parameters": {"temperature": 0}},
    "LiteLLM's spend log": {**LITELLM, "messages": "{}", "proxy_server_request": json.dumps({"messages": MESSAGES})},
    "LiteLLM, from its proxy": {**LITELLM, "messages": None, "proxy_server_request": {"body": {"messages": MESSAGES}}},
    "OpenTelemetry's span": {"name": "chat", "start_time": "2026-11-18T11:06:40.500000Z", "attributes": OTEL},
    "OTLP": {"startTimeUnixNano": "1795000000500000000", "attributes": TYPED},
}


def lines_in(folder: Path, *lines: object) -> Path:
    file = folder / "log.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def read(file: Path, tokenizer: Tokenizer | None = None) -> list[RecordedRequest]:
    return list(TraceReader(file, strict=True, tokenizer=tokenizer))


def test_gateways_and_tracers_give_the_prompt_time_and_length_that_the_body_gives(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    plain = {"messages": MESSAGES, "timestamp": 1795000000500.0, "max_tokens": 7}
    first, *others = read(lines_in(tmp_path, plain, *RECORDS.values()), tokenizer)
    assert len(others) == len(RECORDS)
    for name, one in zip(RECORDS, others, strict=True):
        assert one.keys.tolist() == first.keys.tolist(), name
        assert one[2:] == first[2:], name
        assert one.timestamp_ms == pytest.approx(first.timestamp_ms), name
    prompts = read_prompts(lines_in(tmp_path, plain, *RECORDS.values()), tokenizer).prompts
    assert all((one.token_ids == prompts[0].token_ids).all() for one in prompts)


def test_calls_of_tools_are_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    parts = [{"type": "tool_call", "id": "1", "name": "weather", "arguments": {"city": "Paris"}}]
    answer = [{"type": "tool_call_response", "id": "1", "response": "sunny"}]
    messages = [
        {"role": "user", "parts": PARTS},
        {"role": "assistant", "parts": parts},
        {"role": "tool", "parts": answer},
    ]
    file = lines_in(tmp_path, {"attributes": {"gen_ai.input.messages": messages}})
    (prompt,) = read_prompts(file, tokenizer).prompts
    assert "weather" in prompt.texts[1]
    assert "sunny" in prompt.texts[2]


def test_vllm_s_log_is_read_and_its_other_lines_are_passed_over(tmp_path: Path) -> None:
    """Lines as vLLM 0.33 formats them."""
    head = "(APIServer pid=7) "
    lines = [
        head + "INFO 11-27 01:00:00 [launcher.py:37] Available routes are:",
        head
        + "DEBUG 11-27 01:00:01 [request_logger.py:55] Request chat-a details: prompt: 'a, prompt_token_ids: [9]\\n', "
        "prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.",
        head + "INFO 11-27 01:00:01 [request_logger.py:65] Received request chatcmpl-a: params: SamplingParams(n=1), "
        "lora_request: None.",
        head + "DEBUG 11-27 01:00:03 [request_logger.py:55] Request cmpl-b details: prompt: None, "
        "prompt_token_ids: [1, 2, 3, 4], prompt_embeds shape: None.",
    ]
    one, two = read(lines_in(tmp_path, *lines))
    assert [one.num_prompt_tokens, two.num_prompt_tokens] == [3, 4]
    assert two.timestamp_ms - one.timestamp_ms == 2000
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    assert [one.token_ids.tolist() for one in read_prompts(lines_in(tmp_path, *lines), tokenizer).prompts] == [
        [1, 2, 3],
        [1, 2, 3, 4],
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {**LITELLM, "messages": [{"role": "user", "content": "redacted-by-litellm"}]},
            "LiteLLM left out the messages",
        ),
        ({**LITELLM, "messages": {}}, "LiteLLM left out the messages"),
        ({"attributes": {"gen_ai.operation.name": "chat"}}, "CAPTURE_MESSAGE_CONTENT"),
        ({"attributes": {"gen_ai.prompt.0.content": "x"}}, "gen_ai_latest_experimental"),
        ({"resourceSpans": []}, "write one span or log on each line"),
        ({"attributes": {"gen_ai.input.messages": "[{}]"}}, "cannot be read"),
        ({**LITELLM, "messages": "[broken"}, "cannot be read"),
    ],
)
def test_what_was_left_out_is_refused_by_name(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(lines_in(tmp_path, record))


def test_packed_files_and_lcp_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    (tmp_path / "b.lcp").write_bytes(b"\x01\x00")
    with pytest.raises(TraceError, match="packed by zstd"):
        read(tmp_path / "a.zst")
    with pytest.raises(TraceError, match="libCacheSim's format lcp"):
        read(tmp_path / "b.lcp")


# ----------------------------------------------------------------------------------------------- AIPerf's sessions


def turn(session: str | None, *ids: int, **more: object) -> dict[str, object]:
    named = {} if session is None else {"session_id": session}
    return {**named, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids), **more}


def test_a_turn_of_aiperf_has_the_session_s_earlier_blocks_before_its_own(tmp_path: Path) -> None:
    file = lines_in(
        tmp_path, turn("a", 1, 2, timestamp=0), turn("a", 3, 4, delay=1000), turn("b", 1, 2, timestamp=5000)
    )
    reader = TraceReader(file)
    for _ in range(2):  # a reader may be used again
        requests = list(reader)
        assert [len(one.keys) for one in requests] == [2, 4, 2]
        assert [one.timestamp_ms for one in requests] == [0, 1000, 5000]
        assert [one.num_prompt_tokens for one in requests] == [1024, 2048, 1024]
        seen: set[int] = set()
        found = 0
        for one in requests:
            found += sum(key in seen for key in one.keys.tolist())
            seen.update(one.keys.tolist())
        assert found / 8 == 0.5


def test_turns_that_repeat_the_session_are_whole_prompts(tmp_path: Path) -> None:
    lines = [turn("a", 1), turn("a", 1, 2), turn("a", 9, 2), turn(None, 1, 2), turn("b", 5), turn("b", 6)]
    assert [len(one.keys) for one in read(lines_in(tmp_path, *lines))] == [1, 2, 2, 2, 1, 1]
    with pytest.raises(TraceError, match="session_id"):
        read(lines_in(tmp_path, {**turn("a", 1), "session_id": [1]}))
