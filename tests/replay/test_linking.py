"""Traces of chunks: what is found by prefixes and anywhere, at each capacity, and what methods compute again."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
from pathlib import Path
from random import Random

import pytest

from foreword.cli import main
from foreword.errors import ConfigError, TraceError
from foreword.replay.linking import Chunk, LinkMethod, chunk_file, read_chunks, replay_linking

NONE, FIRST, DEVIATION = (LinkMethod.parse(name) for name in ("none", "first-4", "deviation-0.25"))


def chunks(text: str, num_tokens: int = 10) -> tuple[Chunk, ...]:
    return tuple(Chunk(letter, num_tokens, "") for letter in text)


def found(requests: list[str], capacity: int | None = None) -> tuple[int, int, int]:
    [one] = replay_linking([chunks(text) for text in requests], [capacity], [NONE])
    return one.prefix_tokens, one.found_tokens, one.num_linked


def test_a_chunk_is_found_anywhere_and_a_prefix_only_after_the_same_chunks() -> None:
    assert found(["abc", "abd"]) == (20, 20, 0)
    assert found(["abc", "acb"]) == (10, 30, 2)
    assert found(["abc", "cab"]) == (0, 30, 2)  # the first chunk stands where it was computed
    assert found(["abc", "xyz"]) == (0, 0, 0)


def test_chunks_with_other_ids_are_other_chunks_whatever_their_hashes() -> None:
    assert hash(-1) == hash(-2)
    prompts = [(Chunk(number, 10, ""), Chunk("b", 10, "")) for number in (-1, -2)]
    [one] = replay_linking(prompts, [None], [NONE])
    assert (one.prefix_tokens, one.found_tokens) == (0, 10)


def test_a_chunk_that_stands_twice_in_a_prompt_is_computed_once_for_later_ones() -> None:
    assert found(["aa"]) == (0, 0, 0)
    assert found(["aa", "aa"]) == (20, 20, 0)


def test_what_memory_cannot_hold_is_computed_again() -> None:
    assert found(["abc", "abc"], 30) == (30, 30, 0)
    assert found(["abc", "abc"], 20) == (20, 20, 0)  # a prompt's end is evicted before its beginning
    assert found(["abc", "def", "abc"], 30) == (0, 0, 0)
    assert found(["ab", "ba", "ab"], 20) == (0, 40, 2)  # prefixes take twice the memory


def test_methods_compute_a_part_of_each_linked_chunk_again() -> None:
    requests = [chunks("abc"), (Chunk("a", 10, ""), Chunk("c", 10, ""), Chunk("b", 10, ""))]
    [one] = replay_linking(requests, [None], [NONE, FIRST, DEVIATION])
    assert one.recomputed == {"none": 0.0, "first-4": 8.0, "deviation-0.25": 5.0}
    assert one.share() == 10 / 60
    assert [one.share(name) for name in one.recomputed] == [30 / 60, 22 / 60, 25 / 60]


def test_no_method_computes_more_of_a_chunk_than_it_has() -> None:
    requests = [(Chunk("x", 1, ""), Chunk("a", 3, "")), (Chunk("y", 1, ""), Chunk("a", 3, ""))]
    [one] = replay_linking(requests, [None], [LinkMethod.parse("first-16")])
    assert one.recomputed == {"first-16": 3.0}


def test_more_memory_finds_more_and_chunks_find_what_prefixes_find() -> None:
    random = Random(5)
    sizes = {letter: random.randrange(5, 30) for letter in "rabcdefghijklmnop"}
    prompts = ["r" + "".join(random.sample("abcdefghijklmnop", 4)) for _ in range(200)]
    requests = [tuple(Chunk(letter, sizes[letter], "") for letter in prompt) for prompt in prompts]
    capacities = [40, 80, 160, 320, None]
    replays = replay_linking(requests, capacities, [NONE])
    for before, after in itertools.pairwise(replays):
        assert before.prefix_tokens <= after.prefix_tokens
        assert before.found_tokens <= after.found_tokens
    assert replays[-1].prefix_tokens < replays[-1].found_tokens
    seen: set[int | str] = set()
    expected = 0
    for request in requests:
        expected += sum(one.num_tokens for one in request if one.id in seen)
        seen |= {one.id for one in request}
    assert replays[-1].found_tokens == expected


@pytest.mark.parametrize("name", ["first", "first-x", "first--1", "deviation-1.5", "deviation", "all", ""])
def test_an_unknown_method_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--link '{name}' is unknown; use none, first-16 or deviation-0.15"):
        LinkMethod.parse(name)


# ------------------------------------------------------------------------------------------------------ files


@pytest.fixture
def ragpulse(tmp_path: Path) -> Path:
    """A folder as RAGPulse is published."""
    lengths = {
        "1_sys_prompt": {1: 100},
        "2_passages": {2: 30, 3: 40},
        "3_history": {4: 5},
        "4_user_input": {5: 7, 6: 9},
    }
    for name, of_ids in lengths.items():
        lines = (json.dumps({f"{name[2:]}_id": key, "token_length": length}) for key, length in of_ids.items())
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    parts = [([2, 3], 5), ([3, 2], 6)]
    records = [
        {
            "timestamp": "82",
            "input_length": 182,
            "output_length": 9,
            "hash_ids": {"user_input": [user], "sys_prompt": [1], "passages_ids": passages, "history": [4]},
        }
        for passages, user in parts
    ]
    (tmp_path / "0_trace.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


def test_ragpulses_parts_are_read_in_the_order_of_its_own_replay(ragpulse: Path) -> None:
    file = chunk_file(ragpulse)
    assert file == ragpulse / "0_trace.jsonl" == chunk_file(ragpulse / "0_trace.jsonl")
    first, second = read_chunks(file)
    assert [(one.id, one.num_tokens) for one in first] == [(1, 100), (2, 30), (3, 40), (4, 5), (5, 7)]
    assert [one.part for one in second] == ["sys_prompt", "passages", "passages", "history", "user_input"]


def test_chunks_are_read_from_lines_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('\n{"chunks": [["rules", 5, "system"], [7, 3]]}\n{"chunks": []}\n{"chunks": [[7, 3]]}\n')
    assert chunk_file(file) == file
    assert list(read_chunks(file)) == [(Chunk("rules", 5, "system"), Chunk(7, 3, "")), (Chunk(7, 3, ""),)]
    assert len(list(read_chunks(file, 1))) == 1


def test_chunks_are_read_gzipped_and_with_a_byte_order_mark_too(tmp_path: Path) -> None:
    text = b'{"chunks": [[7, 3]]}\n'
    for name, content in (("bom.jsonl", codecs.BOM_UTF8 + text), ("packed.jsonl.gz", gzip.compress(text))):
        file = tmp_path / name
        file.write_bytes(content)
        assert chunk_file(file) == file
        assert list(read_chunks(file)) == [(Chunk(7, 3, ""),)]
    file.write_bytes(content[:-9])
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_chunks(file))


@pytest.mark.parametrize("text", ["", "{", '{"hash_ids": [1]}', "[1, 2]", '{"prompt": "chunks"}'])
def test_other_traces_have_no_chunks(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)
    assert chunk_file(file) is None
    assert chunk_file(tmp_path) is None
    assert chunk_file(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"chunks": 5}', "line 2 .*chunks=5; it must be a list"),
        ('{"chunks": [5]}', "the chunk 5 is not"),
        ('{"chunks": [["a", -1]]}', r"is not \[id, tokens\]"),
        ('{"chunks": [["a", true]]}', r"is not \[id, tokens\]"),
        ('{"chunks": [["a", 1, "p", 2]]}', r"is not \[id, tokens\]"),
        ('{"chunks": [[[1], 1]]}', r"is not \[id, tokens\]"),
        ("[1]", "each line must be one JSON object"),
        ("{", "line 2 of trace .* is not JSON"),
        ('{"hash_ids": {"history": [9]}}', "has no files of chunk lengths"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{{"chunks": [["a", 1]]}}\n{line}\n')
    with pytest.raises(TraceError, match=message):
        list(read_chunks(file))


def test_a_chunk_without_a_length_is_named(ragpulse: Path) -> None:
    (ragpulse / "3_history.jsonl").unlink()
    with pytest.raises(TraceError, match=r"line 1 .*history names chunk 4, whose length is in no file of its folder"):
        list(read_chunks(ragpulse / "0_trace.jsonl"))
    (ragpulse / "3_history.jsonl").write_text('{"history_id": "4", "token_length": 5}')
    with pytest.raises(TraceError, match="is not a chunk's id and its length"):
        list(read_chunks(ragpulse / "0_trace.jsonl"))


# ---------------------------------------------------------------------------------------------------- command


def test_the_command_tells_what_linking_adds(ragpulse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(ragpulse), "--capacity", "150", "--link", "none,first-16", "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["not_computed"]["unlimited"] == {
        "prefix": 100 / 366,
        "none": 175 / 366,
        "first-16": (175 - 16 - 16 - 5) / 366,
    }
    assert report["counts"]["150"]["capacity_tokens"] == 150
    assert "passages" in captured.err
    assert "3 chunks come again where no prefix ends with them" in captured.err


def test_bytes_are_those_of_a_models_kv(ragpulse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", str(ragpulse), "--capacity", "1MB", "--json"]
    assert main([*arguments, "--kv-bytes-per-token", "10000"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["1MB"]["capacity_tokens"] == 100
    assert main(arguments) == 2
    assert "is in bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "lru"], "--policy has no meaning for a trace of chunks"),
        (["--prefill-rate", "9000"], "--prefill-rate has no meaning for a trace of chunks"),
        (["--block-tokens", "16"], "--block-tokens has no meaning"),
        (["--tier", "disk=5"], "--tier has no meaning"),
        (["--link", "all"], "--link 'all' is unknown"),
        (["--capacity", "x"], "'x' is no capacity"),
        (["--max-requests", "0"], "max_requests=0 is too small"),
    ],
)
def test_what_needs_blocks_is_refused(
    ragpulse: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(ragpulse), *arguments]) == 2
    assert message in capsys.readouterr().err
