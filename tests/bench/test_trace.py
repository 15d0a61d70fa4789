"""`foreword bench trace`: recordings are read and scaled right, and reuse is what they allow, to the token."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from foreword.bench.trace import (
    TraceBenchOptions,
    TraceReport,
    TraceRequest,
    UnlimitedCache,
    add_arguments,
    prompt_token_ids,
    read_trace,
    run,
    run_trace,
)
from foreword.errors import ConfigError, TraceError
from foreword.replay.trace import TraceWriter

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
BYTES_PER_BLOCK = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, KV heads, head size, bytes
ENOUGH_BYTES = 2000 * BYTES_PER_BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model so small that only the engine's own work takes time."""
    import torch

    from foreword.model.checkpoint.random_weights import RandomModelShape, save_random_model

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("random_model")
    save_random_model(folder, RandomModelShape(2, 64, 4, 2, 128, 256, 8192), dtype="float32")
    return str(folder)


def line(input_length: int, hash_ids: Sequence[int], output_length: int = 64, timestamp: int = 0) -> str:
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": list(hash_ids),
        }
    )


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
    return file


def read(file: Path, *, max_requests: int = 100, max_output_tokens: int = 100) -> list[TraceRequest]:
    return read_trace(file, max_requests=max_requests, max_output_tokens=max_output_tokens)


def bench(file: Path, model: str, kv_cache_memory_bytes: int = ENOUGH_BYTES, **options: Any) -> TraceReport:
    options["kv_cache_memory_bytes"] = kv_cache_memory_bytes
    with open(os.devnull, "w") as nowhere:
        return run_trace(TraceBenchOptions(file, model, **options), Console(file=nowhere))


def random_trace(seed: int, num_requests: int) -> list[str]:
    """Conversations that grow by turns, branch and repeat, with partial last blocks."""
    rng = np.random.default_rng(seed)
    known: list[list[int]] = [[]]
    lines = []
    next_id = 0
    for _ in range(num_requests):
        prefix = known[rng.integers(len(known))]
        prefix = prefix[: rng.integers(len(prefix) + 1)]
        num_new = int(rng.integers(0 if prefix else 1, 5))
        ids = [*prefix, *range(next_id, next_id + num_new)]
        next_id += num_new
        known.append(ids)
        last = 512 if rng.random() < 0.3 else int(rng.integers(1, 513))
        if last < 512 and not num_new:  # the same id would stand for a full and for a partial block
            last = 512
        lines.append(line(512 * (len(ids) - 1) + last, ids, int(rng.integers(1, 400))))
        if last < 512:
            known[-1] = ids[:-1]
    return lines


# ---------------------------------------------------------------------------------------- recording


def test_lengths_and_blocks_are_divided_by_32_and_a_partial_block_is_rounded_up(tmp_path: Path) -> None:
    file = write(tmp_path, line(1126, [0, 7, 9], output_length=33, timestamp=5))
    assert read(file) == [TraceRequest(5.0, (0, 7, 9), 36, 2)]
    assert read(file)[0].full_block_ids == (0, 7)


def test_a_partial_block_that_rounds_up_to_16_tokens_is_full(tmp_path: Path) -> None:
    (request,) = read(write(tmp_path, line(500, [3])))
    assert (request.num_prompt_tokens, request.full_block_ids) == (16, (3,))


@pytest.mark.parametrize(("recorded", "scaled"), [(0, 1), (1, 1), (32, 1), (320, 10), (10_000, 12)])
def test_answers_are_at_least_one_token_and_at_most_the_cap(tmp_path: Path, recorded: int, scaled: int) -> None:
    (request,) = read(write(tmp_path, line(512, [0], recorded)), max_output_tokens=12)
    assert request.num_output_tokens == scaled


def test_requests_come_in_order_of_arrival_and_of_the_file_among_equals(tmp_path: Path) -> None:
    file = write(tmp_path, line(1, [0], timestamp=9), line(1, [1], timestamp=4), line(1, [2], timestamp=9))
    assert [request.block_ids for request in read(file)] == [(1,), (0,), (2,)]


def test_lines_after_the_last_wanted_request_are_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, line(512, [0]), "", line(512, [1]), "not JSON")
    assert len(read(file, max_requests=2)) == 2


def test_a_partial_block_without_an_id_is_like_no_other(tmp_path: Path) -> None:
    first, second = read(write(tmp_path, line(1126, [0, 7]), line(1126, [0, 7])))
    assert (first.num_prompt_tokens, first.full_block_ids) == (36, (0, 7))
    tokens = [prompt_token_ids(request, 1000, seed=0).tolist() for request in (first, second)]
    assert tokens[0][:32] == tokens[1][:32]
    assert tokens[0][32:] != tokens[1][32:]
    assert len(read(write(tmp_path, line(100, [])))[0].block_ids) == 1


def test_what_the_server_records_is_read_with_its_own_lengths(tmp_path: Path) -> None:
    file = tmp_path / "recorded.jsonl"
    with TraceWriter(file) as writer:
        for tail in (3, 4):
            prompt = [*range(40), tail]
            writer.write(timestamp_ms=tail, prompt_token_ids=prompt, num_output_tokens=5)
    first, second = read(file)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (41, 5)
    assert first.full_block_ids == second.full_block_ids
    assert len(first.full_block_ids) == 2
    assert first.block_ids[2] != second.block_ids[2]


def test_a_block_id_always_stands_for_the_same_tokens_and_a_partial_block_for_their_beginning() -> None:
    first = prompt_token_ids(TraceRequest(0, (4, 5), 32, 1), 1000, seed=0)
    second = prompt_token_ids(TraceRequest(0, (9, 4, 5), 40, 1), 1000, seed=0)
    assert second.dtype == np.int32
    assert len(second) == 40
    assert second[16:].tolist() == first[:24].tolist()
    assert first[:16].tolist() != first[16:].tolist()
    assert first.tolist() != prompt_token_ids(TraceRequest(0, (4, 5), 32, 1), 1000, seed=1).tolist()


@pytest.mark.parametrize(
    ("malformed", "complaint"),
    [
        ("{", "line 2 .* is not JSON"),
        ("[1, 2]", "line 2 .* must be one JSON object"),
        ('{"timestamp": 0, "output_length": 1, "hash_ids": []}', "line 2 .*input_length=None"),
        (line(0, []), "line 2 .*input_length=0; .* at least 1"),
        (line(512, [0], -1), "line 2 .*output_length=-1"),
        (line(512, [0], 10**400), "line 2 .*output_length=1000.*from 0 to 2"),
        (line(512, [0]).replace("512", '"512"'), "line 2 .*input_length='512'"),
        (line(512, [0]).replace("512", "512.5"), "line 2 .*input_length=512.5"),
        (line(512, [0]).replace('"timestamp": 0', '"timestamp": NaN'), "line 2 .*timestamp=nan"),
        (line(512, [0]).replace('"timestamp": 0', '"timestamp": true'), "line 2 .*timestamp=True"),
        (line(512, [-1]), "line 2 .*hash_ids=.*at least 0"),
        (line(512, [0]).replace("[0]", "[0.5]"), "line 2 .*hash_ids="),
        (line(512, [0]).replace("[0]", "7"), "line 2 .*hash_ids=7"),
        (line(1025, [0]), "line 2 .*1 ids, but input_length=1025 takes 2 full or 3 blocks .*one id per block"),
        (line(512, [0, 1]), "line 2 .*2 ids, but input_length=512 takes 1 blocks"),
    ],
)
def test_a_malformed_line_is_named_with_its_remedy(tmp_path: Path, malformed: str, complaint: str) -> None:
    file = write(tmp_path, line(512, [0]), malformed)
    with pytest.raises(TraceError, match=complaint):
        read(file)


def test_a_file_that_is_missing_empty_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(TraceError, match="holds no requests"):
        read(write(tmp_path, "", "  "))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read(tmp_path / "binary")


def test_an_unlimited_cache_reuses_the_longest_leading_run_that_any_earlier_request_has(tmp_path: Path) -> None:
    for seed in range(20):
        unlimited = UnlimitedCache()
        earlier: list[tuple[int, ...]] = []
        for request in read(write(tmp_path, *random_trace(seed, 40))):
            ids = request.full_block_ids
            runs = [next((n for n in range(len(ids), 0, -1) if other[:n] == ids[:n]), 0) for other in earlier]
            expected = min(16 * max(runs, default=0), request.num_prompt_tokens - 1)
            assert unlimited.admit(request) == expected
            earlier.append(ids)


# ------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize(("max_in_flight", "prefix_index"), [(1, "radix"), (4, "hash")])
def test_the_engine_reuses_what_the_trace_allows(
    tmp_path: Path, model: str, max_in_flight: int, prefix_index: str
) -> None:
    file = write(
        tmp_path,
        line(1024, [0, 1]),  # 32 tokens, nothing to reuse
        line(1024, [0, 2]),  # 16 of 32
        line(1126, [0, 1, 3]),  # 32 of 36
        line(1024, [0, 1]),  # the whole prompt but its last token: 31 of 32
        line(1024, [2, 0]),  # the same blocks after another prefix: nothing
    )
    report = bench(file, model, max_in_flight=max_in_flight, prefix_index=prefix_index)
    assert report.requests == 5
    assert report.prompt_tokens == 164
    assert report.tokens_reused == report.tokens_reusable == 79
    assert report.generated_tokens == 10
    assert report.tokens_computed == 164 - 79 + 10 - 5
    assert report.equal
    assert report.explanation == ""
    assert report.hit_rate == pytest.approx(79 / 164)
    assert (report.evictions, report.preemptions, report.requests_skipped) == (0, 0, 0)


def test_a_partial_block_is_not_reused(tmp_path: Path, model: str) -> None:
    file = write(tmp_path, line(100, [0]), line(100, [0]), line(612, [1, 2]), line(612, [1, 2]))
    report = bench(file, model)
    assert report.prompt_tokens == 4 + 4 + 20 + 20
    assert report.tokens_reused == report.tokens_reusable == 16
    assert report.equal


@pytest.mark.parametrize("max_in_flight", [1, 16])
def test_reuse_is_exact_whatever_runs_at_the_same_time(tmp_path: Path, model: str, max_in_flight: int) -> None:
    report = bench(write(tmp_path, *random_trace(3, 60)), model, max_in_flight=max_in_flight, prefix_index="hash")
    assert report.tokens_reused == report.tokens_reusable == 1293
    assert report.tokens_reused_beyond == 0
    assert report.equal


def test_what_a_radix_index_reuses_of_partly_matching_blocks_is_counted_apart(tmp_path: Path, model: str) -> None:
    """With 256 different tokens, some blocks begin alike by chance."""
    report = bench(write(tmp_path, *random_trace(3, 60)), model, max_in_flight=3)
    assert report.tokens_reusable == 1293
    assert report.tokens_reused_beyond == report.tokens_reused - 1293 > 0
    assert report.equal


def test_a_partial_block_that_an_answer_has_filled_may_be_reused_beyond_what_ids_tell(
    tmp_path: Path, model: str
) -> None:
    file = write(tmp_path, line(612, [1, 2], output_length=640), line(612, [1, 2]))  # 16 + 4 tokens
    found = {}
    for prefix_index in ("radix", "hash"):
        report = bench(file, model, max_in_flight=1, prefix_index=prefix_index)
        assert report.equal
        assert report.tokens_reusable == 16
        found[prefix_index] = report.tokens_reused
    assert found == {"radix": 19, "hash": 16}


def test_reuse_lost_to_eviction_is_explained(tmp_path: Path, model: str) -> None:
    lines = [line(512 * 8, range(8 * turn, 8 * turn + 8)) for turn in (0, 1, 2, 0)]
    report = bench(write(tmp_path, *lines), model, kv_cache_memory_bytes=12 * BYTES_PER_BLOCK, max_in_flight=1)
    assert report.tokens_reusable == 127
    assert report.tokens_reused < report.tokens_reusable
    assert not report.equal
    assert report.evictions > 0
    assert f"{report.evictions} cached blocks were evicted" in report.explanation


def test_without_a_prefix_cache_nothing_is_reused_and_the_reason_is_named(tmp_path: Path, model: str) -> None:
    report = bench(write(tmp_path, line(1024, [0, 1]), line(1024, [0, 1])), model, enable_prefix_caching=False)
    assert (report.tokens_reused, report.tokens_reusable) == (0, 31)
    assert report.explanation == "prefix caching is off"


def test_requests_that_can_never_fit_are_skipped_and_counted(tmp_path: Path, model: str) -> None:
    long = line(512 * 40, range(100, 140))
    file = write(tmp_path, long, long, long, line(512, [0]), long, line(1024, [0, 1]))
    report = bench(file, model, kv_cache_memory_bytes=12 * BYTES_PER_BLOCK, max_in_flight=2)
    assert (report.requests, report.requests_skipped) == (2, 4)
    assert report.tokens_reused == 16
    assert report.equal


def test_a_trace_of_which_nothing_fits_gives_an_empty_report(tmp_path: Path, model: str) -> None:
    file = write(tmp_path, line(512 * 40, range(40)))
    report = bench(file, model, kv_cache_memory_bytes=12 * BYTES_PER_BLOCK)
    assert (report.requests, report.requests_skipped, report.hit_rate) == (0, 1, 0.0)
    assert report.ttft_hits.median_ms is report.ttft_misses.median_ms is None


def test_waiting_times_are_reported_for_hits_and_misses(tmp_path: Path, model: str) -> None:
    shared = range(6)
    file = write(tmp_path, line(512 * 6, shared), *(line(512 * 7, [*shared, 10 + turn]) for turn in range(4)))
    report = bench(file, model)
    assert (report.ttft_hits.requests, report.ttft_misses.requests) == (4, 1)
    assert report.ttft_hits.median_prompt_tokens == 112
    assert report.ttft_hits.p90_ms is not None
    assert report.ttft_hits.median_ms is not None
    assert 0 < report.ttft_hits.median_ms <= report.ttft_hits.p90_ms


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_in_flight=0"):
        TraceBenchOptions(Path("trace.jsonl"), max_in_flight=0)
    with pytest.raises(ConfigError, match="seed=-1"):
        TraceBenchOptions(Path("trace.jsonl"), seed=-1)


def test_the_command_prints_a_table_and_with_json_nothing_else_on_stdout(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, line(1024, [0, 1]), line(1024, [0, 2]))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    command = [str(file), "--model", model, "--kv-cache-memory-bytes", str(ENOUGH_BYTES)]
    assert run(parser.parse_args(command)) == 0
    assert "equal, 0 evictions" in capsys.readouterr().out

    assert run(parser.parse_args([*command, "--json"])) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert report["benchmark"] == "trace"
    assert report["equal"] is True
    assert report["tokens_reused"] == 16
    assert "hit rate" in printed.err


@pytest.mark.skipif(not MOONCAKE.is_file(), reason="the recorded traces are not beside the repository")
def test_the_beginning_of_a_recorded_hour_reuses_what_it_allows(model: str) -> None:
    report = bench(MOONCAKE, model, max_requests=30, max_output_tokens=4, prefix_index="hash")
    assert report.prompt_tokens == 13_300
    assert report.tokens_reused == report.tokens_reusable == 464
    assert report.equal
