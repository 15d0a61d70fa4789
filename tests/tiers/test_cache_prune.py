"""`foreword cache prune`: what it deletes, what it spares, and what the others see of it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from foreword.tiers.disk.segments import PAGE
from foreword.tiers.upkeep import survey as survey_module
from tiers.block_world import (
    NAMESPACE,
    OTHER_NAMESPACE,
    keys_of,
    load,
    opened,
    segment_files,
    store,
)
from tiers.cache_folders import DAY_S, FACTS, FILES, fill, flip
from tiers.test_kills import kill, start_child


def test_prune_by_size_deletes_the_oldest_and_what_is_left_is_served(tmp_path, cache):
    for number, age_s in enumerate((300, 100, 200)):
        fill(tmp_path, number, age_s=age_s)
    result = cache("prune", "--max-size", "30KB")
    assert result.returncode == 0
    assert "deleted 2 segments, 4 blocks, 40 KiB" in result.stdout
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of(range(6))).tolist() == [False, False, True, True, False, False]
        assert load(tier, keys_of([2, 3])).num_done == 2
    assert cache("verify").returncode == 0


def test_prune_says_what_a_dry_run_would_delete_and_deletes_nothing(tmp_path, cache):
    fill(tmp_path, count=2)
    before = sorted(path for path in tmp_path.rglob("*") if path.name != "JANITOR")
    result = cache("prune", "--all", "--damaged", "--dry-run")
    assert result.stdout.count("would delete") == 3
    assert "would delete 2 segments, 4 blocks, 40 KiB" in result.stdout
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "JANITOR") == before


def test_prune_by_age_keeps_segments_with_something_newer(tmp_path, cache):
    fill(tmp_path, 0, age_s=10 * DAY_S)
    fill(tmp_path, 1, age_s=5 * DAY_S)
    fill(tmp_path, 2, age_s=-10 * DAY_S)  # a clock that was wrong
    assert "deleted 1 segment, 2 blocks" in cache("prune", "--older-than", "7d").stdout
    assert "deleted 0 segments" in cache("prune", "--older-than", "7d").stdout
    assert "deleted 1 segment" in cache("prune", "--older-than", "36h").stdout
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of(range(6))).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    "wish", [["--namespace", OTHER_NAMESPACE.hex()[:6].upper()], ["--other-models", "Qwen/Qwen2-0.5B"]]
)
def test_prune_by_namespace_or_model_keeps_segments_with_blocks_of_others(tmp_path, cache, wish):
    fill(tmp_path, 0)
    fill(tmp_path, 1, namespace=OTHER_NAMESPACE)
    with opened(tmp_path) as tier:  # both in one segment
        store(tier, keys_of([90]))
        store(tier, keys_of([91], namespace=OTHER_NAMESPACE))
    result = cache("prune", *wish)
    assert "deleted 1 segment, 2 blocks" in result.stdout
    assert "kept 1 segment in which blocks of other namespaces lie too" in result.stdout
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of([0, 1, 90])).all()
        assert tier.lookup(keys_of([2, 3, 91], namespace=OTHER_NAMESPACE)).tolist() == [False, False, True]


def test_prune_damaged_deletes_the_segments_with_damage_and_counts_what_goes_with_it(tmp_path, cache):
    fill(tmp_path, count=3)
    path = segment_files(tmp_path)[1]
    flip(path, PAGE)
    result = cache("prune", "--damaged")
    assert "damage; 1 of its blocks are sound and go too" in result.stdout
    assert len(segment_files(tmp_path)) == 2
    assert cache("verify").returncode == 0


def test_prune_all_leaves_no_folder_of_a_dead_process_and_no_manifest(tmp_path, cache):
    fill(tmp_path, count=2)
    (tmp_path / "v1" / f"{OTHER_NAMESPACE.hex()}.json").write_text("torn")
    assert "deleted 2 segments" in cache("prune", "--all").stdout
    assert sorted(path.name for path in (tmp_path / "v1").iterdir()) == ["JANITOR"]
    fill(tmp_path)
    assert cache("verify").stdout.startswith("2 blocks sound")


def test_wishes_add_up_and_size_is_what_is_left_after_them(tmp_path, cache):
    fill(tmp_path, 0, age_s=100)
    fill(tmp_path, 1, namespace=OTHER_NAMESPACE)
    fill(tmp_path, 2, age_s=50)
    result = cache("prune", "--namespace", OTHER_NAMESPACE.hex(), "--max-size", "55KB")
    assert "deleted 1 segment, 2 blocks" in result.stdout
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of([0, 1, 4, 5])).all()


def stop(child, path):
    """Stop a child at a moment when it does not tidy the directory."""
    while True:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        janitor = FILES.open_lock(path / "v1" / "JANITOR")
        is_free = FILES.try_lock(janitor)
        os.close(janitor)
        if is_free:
            return
        child.send_signal(signal.SIGCONT)


def test_a_second_process_that_lives_is_seen_is_spared_and_stores_on(tmp_path, cache):
    child = start_child(tmp_path)
    try:
        while int(child.stdout.readline()) < 10:
            pass
        stop(child, tmp_path)
        # Not every file system lets the holder of a lock be found.
        assert re.search(rf"in use by  (process {child.pid}|a live process)\n", cache("stats").stdout)
        result = cache("verify")
        assert (result.returncode, "blocks sound" in result.stdout) == (0, True), result.stdout
        files = segment_files(tmp_path)
        assert len(files) > 1
        # A segment that has just been written may be written on, whatever its number.
        for path in files:
            os.utime(path)
        assert "deleted 0 segments" in cache("prune", "--all").stdout
        # After a minute only the last one may.
        for path in files:
            os.utime(path, (0, time.time() - 2 * survey_module.QUIET_S))
        result = cache("prune", "--all")
        assert segment_files(tmp_path) == files[-1:]
        assert re.search(rf"kept {files[-1].relative_to(tmp_path)}: .*process.* may be writing it", result.stdout)
        child.send_signal(signal.SIGCONT)
        # The process copes with what has gone: it stores on, and what it stores is right.
        for _ in range(20):
            last = int(child.stdout.readline())
    finally:
        kill(child)
    with opened(tmp_path) as tier:
        assert load(tier, keys_of(range(4 * last - 16, 4 * last))).num_done == 16


def test_a_live_process_without_blocks_keeps_its_folder_and_its_manifest(tmp_path, cache):
    with opened(tmp_path) as tier:
        tier.describe(NAMESPACE, FACTS)
        before = sorted(tmp_path.rglob("*"))
        assert cache("prune", "--all").returncode == 0
        assert sorted(tmp_path.rglob("*")) == before
        assert "Qwen/Qwen2-0.5B" in cache("list").stdout
    assert cache("prune", "--all").returncode == 0
    assert cache("list").stdout == "the cache is empty\n"


def test_nobody_takes_over_a_dead_folder_while_prune_holds_the_directory(tmp_path):
    fill(tmp_path)
    with survey_module.held(FILES, tmp_path) as found, opened(tmp_path) as tier:
        assert len(list((tmp_path / "v1").glob("?" * 32))) == 2
        assert [segment.path for segment in found.segments] == segment_files(tmp_path)
        assert not tier.lookup(keys_of([0])).any()
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of([0, 1])).all()


def test_prune_waits_for_whoever_tidies_and_then_says_so(tmp_path, cache, monkeypatch):
    fill(tmp_path)
    monkeypatch.setattr(survey_module, "JANITOR_PATIENCE_S", 0.05)
    janitor = FILES.open_lock(tmp_path / "v1" / "JANITOR")
    assert FILES.try_lock(janitor)
    result = cache("prune", "--all")
    assert result.returncode == 2
    assert "another process is tidying" in result.stderr
    os.close(janitor)
    assert cache("prune", "--all").returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing says what to delete; give --max-size"),
        (["--namespace", "xyz"], "--namespace 'xyz' is not 1 to 32 hexadecimal digits"),
        (["--namespace", "ff"], "--namespace 'ff' is no namespace of '{path}'; there are: 616e6f74, 6d6f6465"),
        (["--namespace", "6"], "--namespace '6' begins 2 namespaces"),
        (["--other-models", "llama"], "--other-models 'llama' is no model with blocks"),
        (["--other-models", "llama"], "there are: 'Qwen/Qwen2-0.5B', 'other'"),
        (["--max-size", "big"], "'big' is no number of bytes; write it as 4GB"),
        (["--older-than", "7"], "--older-than '7' is no age; write it as"),
        (["--older-than", "9" * 400 + "w"], "9w' is no age; write it as"),
        (["--all", "--key-file", "no-such-key"], "'no-such-key' cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_in_what_to_delete_are_named_and_nothing_is_deleted(tmp_path, cache, options, message):
    fill(tmp_path)
    fill(tmp_path, 1, namespace=OTHER_NAMESPACE)
    result = cache("prune", *options)
    assert result.returncode == 2
    assert message.format(path=tmp_path) in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(segment_files(tmp_path)) == 2
