"""Lines of other programs: read as what they mean, or refused with the program's name and the setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreword.errors import TraceError
from foreword.lint.prompts import read_prompts
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
VLLM_REQUEST = (
    "INFO {} 01:00:00 [a.py:1] Request x details: prompt: None, prompt_token_ids: {}, prompt_embeds shape: None."
)
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
    """Lines that vLLM 0.33's own RequestLogger and formatters wrote, plain and with VLLM_LOGGING_COLOR=1."""
    file = Path(__file__).parent / "vllm_requests.txt"
    seen = read(file)
    assert [one.num_prompt_tokens for one in seen] == [3, 4, 3, 4]
    assert seen[2].timestamp_ms - seen[1].timestamp_ms == 17_000
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    prompts = read_prompts(file, tokenizer).prompts
    assert [one.token_ids.tolist() for one in prompts] == [[1, 2, 3], [1, 2, 3, 4]] * 2


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
        ({**LITELLM, "messages": "x", "completion_tokens": float("inf")}, "cannot be read"),
        ({**LITELLM, "messages": "x", "startTime": 10**400}, "cannot be read"),
        ({**LITELLM, "messages": "[" * 100_000}, "cannot be read"),
        (VLLM_REQUEST.format("99-99", "[1]"), "is not JSON"),
        (VLLM_REQUEST.format("11-27", "[1,,2]"), "is not JSON"),
        (VLLM_REQUEST.format("11-27", "None"), "holds no requests; give"),
        ({**LITELLM, "call_type": "aembedding", "messages": "x"}, "holds no requests; give"),
        ({**LITELLM, "cache_hit": True, "messages": "x"}, "holds no requests; give"),
        ({**LITELLM, "status": "failure", "messages": "x"}, "holds no requests; give"),
        ({"attributes": {**OTEL, "gen_ai.operation.name": "invoke_agent"}}, "holds no requests; give"),
        ({"attributes": {"gen_ai.operation.name": "execute_tool"}}, "holds no requests; give"),
    ],
)
def test_what_was_left_out_is_refused_by_name(tmp_path: Path, record: Any, message: str) -> None:
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


def test_turns_that_end_inside_a_block_take_an_engine_s_blocks(tmp_path: Path) -> None:
    """700 tokens and 100 more are two blocks of 512; the second one of the first turn is found by nobody."""
    lines = [turn("a", 1, 2, input_length=700), turn("a", 3, input_length=100), turn("b", 1, 2, input_length=700)]
    one, two, other = read(lines_in(tmp_path, *lines))
    assert [len(each.keys) for each in (one, two)] == [2, 2]
    assert (two.num_prompt_tokens, two.tokens_of(2)) == (800, 800)
    assert one.keys[0] == two.keys[0]
    assert one.keys[1] != two.keys[1]
    assert other.keys.tolist() == one.keys.tolist()


def test_an_empty_first_turn_makes_no_turn_a_whole_prompt(tmp_path: Path) -> None:
    empty = turn("a", input_length=100)
    lines = [empty, turn("a", 1, 2), turn("b", 5, 6), turn("b", 7, 8), {**empty, "session_id": "c"}, turn("c", 1, 2)]
    seen = read(lines_in(tmp_path, *lines))
    assert [len(one.keys) for one in seen] == [0, 3, 2, 4, 0, 3]
    assert seen[1].num_prompt_tokens == 1124
    assert seen[1].keys[0] != seen[5].keys[0], "what the first turns have in common is not known"


def test_delays_are_any_numbers_and_a_session_ends_with_a_turn_that_is_refused(tmp_path: Path) -> None:
    lines = [turn("a", 1, timestamp=0), turn("a", 2, delay=1.5), turn("a", 3, delay="x"), turn("a", 4), turn("b", 1)]
    reader = TraceReader(lines_in(tmp_path, *lines))
    assert [(len(one.keys), one.timestamp_ms) for one in reader] == [(1, 0), (2, 1.5), (1, None)]
    assert "was refused" in reader.malformed[1]


def test_pictures_of_a_tracer_are_told_apart(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    parts = [[{"type": "uri", "modality": "image", "uri": f"file:{name}"}, *PARTS] for name in "aba"]
    spans = [{"attributes": {"gen_ai.input.messages": [{"role": "user", "parts": one}]}} for one in parts]
    one, two, three = read(lines_in(tmp_path, *spans), tokenizer)
    assert one.keys.tolist() == three.keys.tolist() != two.keys.tolist()
