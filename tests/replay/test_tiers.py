"""`foreword replay --tier`: what a tier finds, and what is worth storing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreword.cli import main
from foreword.errors import ConfigError
from foreword.replay.tiers import TierOption, TwoLevels

OF_ALL = ("all", "twice", "room", "heads")


def served(levels: TwoLevels, prompts: list[list[int]]) -> tuple[int, int, int]:
    """Blocks found in memory, loaded, and written."""
    for prompt in prompts:
        levels.admit(prompt)
    return levels.result.memory_hits, levels.result.tier_hits, levels.result.num_written


def test_what_memory_has_lost_comes_from_the_tier():
    prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 7]]
    assert served(TwoLevels(3, 100, "all", 16), prompts) == (2, 3, 7)
    assert served(TwoLevels(3, 0, "all", 16), prompts) == (2, 0, 10)


def test_a_tier_of_any_size_finds_what_one_memory_of_that_size_would():
    """All blocks are stored, so the two levels together are one LRU as large as the tier."""
    rng = np.random.default_rng(0)
    prompts = [[int(rng.zipf(1.5)) % 40 * 100 + depth for depth in range(4)] for _ in range(2000)]
    for size in (16, 40, 80):
        one = served(TwoLevels(size, 0, "all", 16), prompts)[0]
        in_memory, from_tier, _ = served(TwoLevels(8, size, "all", 16), prompts)
        assert in_memory > 0
        assert in_memory + from_tier == one


def test_what_comes_once_is_not_written_by_twice():
    prompts = [[1, 2]] + [[100 + n, 200 + n] for n in range(50)] + [[1, 2]] + [[1000 + n] for n in range(9)] + [[1, 2]]
    assert served(TwoLevels(4, 100, "twice", 16), prompts) == (0, 2, 2)
    assert served(TwoLevels(4, 1000, "all", 16), prompts) == (0, 4, 2 + 100 + 9)


def test_room_writes_everything_until_the_tier_is_full():
    prompts = [[n, 1000 + n] for n in range(50)]
    assert served(TwoLevels(4, 20, "room", 16), [*prompts, [49, 1049], [0, 1000]]) == (2, 2, 20)


def test_heads_stores_the_beginnings_of_prompts():
    levels = TwoLevels(1000, 1000, "heads", 1024)
    levels.admit(list(range(50)))
    assert levels.result.num_written == 4


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": n, "input_length": 1024, "output_length": 1, "hash_ids": [n % 3, 100 + n % 7]})
        for n in range(60)
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_the_command_shows_each_memory_and_each_rule(trace, capsys):
    options = ["--capacity", "4,100", "--policy", "lru", "--kv-bytes-per-token", "1000", "--tier", "disk=20MB,1GB/s"]
    assert main(["replay", str(trace), *options, "--json"]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)["tiers"]
    assert [(row["capacity"], row["admission"]) for row in rows] == [
        (capacity, admission) for capacity in ("4", "100") for admission in OF_ALL
    ]
    small, large = rows[0], rows[4]
    assert small["memory_hits"] + small["tier_hits"] == large["memory_hits"] == 96
    assert small["tier_blocks"] == 20_000_000 // (512 * 1000)
    assert small["loaded_bytes"] == small["tier_hits"] * 512_000
    assert small["load_s"] == pytest.approx(small["loaded_bytes"] / 1e9)
    assert "With disk of 20MB below the memory" in printed.err


@pytest.mark.parametrize("text", ["disk", "disk=", "=5", "disk=50GB,fast", "disk=1,2,3", "disk=-5"])
def test_what_is_no_tier_is_refused(text):
    with pytest.raises(ConfigError, match=r"disk|tier|capacity"):
        TierOption.parse(text).capacity(512, 1000)


def test_bytes_need_a_model():
    with pytest.raises(ConfigError, match="--model"):
        TierOption.parse("disk=5GB").capacity(512, None)
