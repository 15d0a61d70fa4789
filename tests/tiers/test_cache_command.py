"""`foreword cache`: what it says of a directory, the damage it finds, and what it deletes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from foreword import cli
from foreword.tiers.clock import Clock
from foreword.tiers.files import RealFiles
from foreword.tiers.run_format import PAGE, RunHeader, block_checksum, encode_header, padded
from foreword.tiers.segments import scan_runs
from foreword.tiers.upkeep import survey as survey_module
from foreword.tiers.upkeep import table
from tiers.block_world import (
    BLOCK_BYTES,
    NAMESPACE,
    OPTIONS,
    OTHER_NAMESPACE,
    keys_of,
    load,
    opened,
    run_of,
    segment_files,
    store,
)
from tiers.test_kills import kill, start_child

FILES = RealFiles()
DAY_S = 86400
SMALL = replace(OPTIONS, segment_bytes=20_000)
"""Segments that hold one run of two blocks."""
FACTS = {
    "model_name": "Qwen/Qwen2-0.5B",
    "block_size": 16,
    "exact": True,
    "foreword_version": "0.1",
    "arithmetic": {
        "path": {"device": "cpu", "attention": ["CpuAttention", "pairs"]},
        "libraries": {"torch": "2.12.0"},
        "processor": {"kind": "znver3"},
    },
}


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cache(capsys, tmp_path):
    """Run `foreword cache ACTION` on `tmp_path`."""

    def run(action, *options, path=tmp_path):
        return Ran(cli.main(["cache", action, str(path), *options]), *capsys.readouterr())

    return run


def fill(path, number=0, *, namespace=NAMESPACE, age_s=0, count=1):
    """Write segments of two blocks each, `age_s` ago."""
    with opened(path, SMALL, clock=Clock(wall=lambda: time.time() - age_s)) as tier:
        tier.describe(namespace, FACTS if namespace == NAMESPACE else {**FACTS, "model_name": "other"})
        for first in range(2 * number, 2 * (number + count), 2):
            assert store(tier, keys_of([first, first + 1], namespace=namespace)).num_done == 2


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x20
    path.write_bytes(content)


def runs_of(path) -> list[RunHeader]:
    fd = FILES.open_for_reading(path)
    try:
        return list(scan_runs(FILES, fd, 0, path.stat().st_size, uncached=False))
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------ stats and list


def test_stats_counts_blocks_bytes_groups_days_and_processes(tmp_path, cache):
    fill(tmp_path, count=3, age_s=2 * DAY_S)
    with opened(tmp_path) as tier:
        store(tier, keys_of([0, 1, 2], group_id=7))
        found = json.loads(cache("stats", "--json").stdout)
        text = cache("stats").stdout
    (told,) = found["namespaces"]
    assert (found["num_blocks"], found["num_segments"]) == (9, 4)
    assert found["payload_bytes"] == told["payload_bytes"] == 9 * BLOCK_BYTES
    physical = sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path))
    assert physical <= found["physical_bytes"] <= physical + (64 << 10)  # the snapshot is the rest
    assert told["groups"] == {
        "0": {"num_blocks": 6, "payload_bytes": 6 * BLOCK_BYTES},
        "7": {"num_blocks": 3, "payload_bytes": 3 * BLOCK_BYTES},
    }
    assert list(found["bytes_by_day"].values()) == [6 * BLOCK_BYTES, 3 * BLOCK_BYTES]
    assert 0 < found["free_bytes"] < found["total_bytes"]
    assert found["default_budget_bytes"] > 0
    assert [process["is_live"] for process in found["processes"]] == [True]
    assert "9 blocks in 4 segments" in text
    assert "52.73 KiB" in text
    assert "in use by  no process" in cache("stats").stdout


def test_list_names_model_arithmetic_sharing_tokens_and_ages(tmp_path, cache):
    fill(tmp_path, age_s=3 * DAY_S)
    fill(tmp_path, 1, namespace=OTHER_NAMESPACE)
    with opened(tmp_path) as tier:
        store(tier, keys_of([50], namespace=b"nobody described"))
        tier.store(run_of(keys_of([8, 9, 10]), flags=3)).wait(30)
    heads, first, second, third = (re.split(r"  +", line) for line in cache("list").stdout.splitlines())
    assert heads[0] == "NAMESPACE"
    assert first[0] == NAMESPACE.hex()[:8]
    text = " ".join(first)
    assert "Qwen/Qwen2-0.5B cpu znver3, CpuAttention pairs, torch 2.12.0, foreword 0.1 exact 5 80 29.3 KiB 3 " in text
    assert second[:2] == [OTHER_NAMESPACE.hex()[:8], "other"]
    assert third[:2] == [b"nobody described".hex()[:8], "unknown"]
    told = json.loads(cache("list", "--json").stdout)["namespaces"][0]
    assert told["newest_s"] - told["oldest_s"] == pytest.approx(3 * DAY_S, abs=60)
    assert told["num_tokens"] == 5 * 16
    assert told["manifest"]["arithmetic"] == FACTS["arithmetic"]


def test_copies_of_a_block_count_once_as_tokens(tmp_path, cache):
    with opened(tmp_path, SMALL) as first, opened(tmp_path, SMALL) as second:
        for tier in (first, second):
            tier.describe(NAMESPACE, FACTS)
            store(tier, keys_of([1, 2]))
    (told,) = json.loads(cache("list", "--json").stdout)["namespaces"]
    assert (told["num_blocks"], told["num_distinct_blocks"], told["num_tokens"]) == (4, 2, 32)


def test_an_empty_cache_is_no_error(tmp_path, cache):
    opened(tmp_path).close(0)
    assert cache("list").stdout == "the cache is empty\n"
    assert "0 blocks in 0 segments" in cache("stats").stdout
    assert cache("verify") == (0, "0 blocks sound, 0 damaged; read 0 bytes in 0 segments\n", "")
    assert cache("prune", "--all").stdout == "deleted 0 segments, 0 blocks, 0 bytes\n"


@pytest.mark.parametrize("facts", [{"arithmetic": 3, "block_size": "x", "exact": []}, {"model_name": "\x1b[31m"}])
def test_strange_facts_of_a_manifest_are_shown_without_harm(tmp_path, cache, facts):
    with opened(tmp_path) as tier:
        store(tier, keys_of([1]))
        tier.describe(NAMESPACE, facts)
    result = cache("list")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout


# ------------------------------------------------------------------------------ verify


def test_verify_names_file_offset_key_and_reason_of_a_flipped_byte(tmp_path, cache):
    fill(tmp_path, count=3)
    assert cache("verify").stdout.startswith("6 blocks sound, 0 damaged; read 60 KiB in 3 segments")
    path = segment_files(tmp_path)[1]
    (run,) = runs_of(path)
    where = int(run.entries["page"][1]) * PAGE
    flip(path, where + 5)
    result = cache("verify")
    key = keys_of([3]).keys[0].tobytes().hex()
    assert result.returncode == 1
    assert f"{path.relative_to(tmp_path)}  offset {where}  key {key}  the checksum differs" in result.stdout
    assert "5 blocks sound, 1 damaged" in result.stdout
    assert f"foreword cache prune --damaged {tmp_path}" in result.stdout
    assert len(segment_files(tmp_path)) == 3


def test_verify_finds_a_damaged_header_and_goes_on_after_it(tmp_path, cache):
    with opened(tmp_path) as tier:
        for number in (0, 2, 4):
            store(tier, keys_of([number, number + 1]))
    (path,) = segment_files(tmp_path)
    second = runs_of(path)[1]
    flip(path, second.offset + 100)
    result = cache("verify")
    assert result.returncode == 1
    assert f"offset {second.offset}  key -  no sound header in {second.run_bytes:,} bytes" in result.stdout
    assert "4 blocks sound, 0 damaged" in result.stdout


@pytest.mark.parametrize("cut", [1, PAGE, 2 * PAGE + 1, 5 * PAGE - 1])
def test_verify_finds_a_truncated_segment(tmp_path, cache, cut):
    fill(tmp_path)
    (path,) = segment_files(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    result = cache("verify")
    assert result.returncode == 1
    assert ("the file ends before the block does" if cut <= 4 * PAGE else "no sound header") in result.stdout
    assert cache("prune", "--damaged").returncode == 0
    assert segment_files(tmp_path) == []


def test_verify_reports_files_that_are_no_segments_manifests_or_folders(tmp_path, cache):
    fill(tmp_path, count=2)
    first, second = segment_files(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    second.unlink()
    second.mkdir()
    (tmp_path / "v1" / ("0" * 32)).symlink_to(tmp_path)
    (tmp_path / "v1" / f"{OTHER_NAMESPACE.hex()}.json").write_text("{}")
    result = cache("verify")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    for path, reason in (
        (first, "cannot be read"),
        (second, "cannot be read"),
        (tmp_path / "v1" / ("0" * 32), "not a"),
    ):
        assert any(line.startswith(str(path.relative_to(tmp_path))) and reason in line for line in lines), path
    assert "the manifest is torn or no manifest" in result.stdout
    assert "cannot be read" in cache("stats").stderr
    # Neither a folder nor what a link points to is deleted.
    result = cache("prune", "--damaged")
    assert result.returncode == 1
    assert f"{second.relative_to(tmp_path)} cannot be deleted: Is a directory" in result.stderr
    assert elsewhere.exists()
    assert not first.is_symlink()
    assert not (tmp_path / "v1" / f"{OTHER_NAMESPACE.hex()}.json").exists()


def test_verify_does_not_judge_the_run_that_a_live_process_is_writing(tmp_path, cache):
    with opened(tmp_path) as tier:
        store(tier, keys_of([0, 1]))
        (path,) = segment_files(tmp_path)
        with path.open("ab") as file:
            file.write(path.read_bytes()[: 2 * PAGE])  # the begin of a run, which a write has not ended
        result = cache("verify")
        assert result.returncode == 0
        assert "2 blocks sound" in result.stdout
        assert "1 segment ends in a run that a live process is writing" in result.stdout
    assert cache("verify").returncode == 1


def test_verify_shows_progress_at_a_terminal_and_removes_it(tmp_path, cache, monkeypatch):
    fill(tmp_path, count=3)
    ours, theirs = os.openpty()
    monkeypatch.setattr(table, "REDRAW_S", 0.0)
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert cache("verify").returncode == 0
        terminal.write("end")
        terminal.flush()
        shown = ""
        while not shown.endswith("end"):
            shown += os.read(ours, 10_000).decode()
    os.close(ours)
    assert "verifying  33% of 60 KiB" in shown
    assert "verifying 100% of 60 KiB" in shown
    assert shown.endswith("\r\x1b[Kend")


def encrypt(tmp_path) -> Path:
    key_file = tmp_path / "key"
    key_file.write_bytes(os.urandom(32))
    key_file.chmod(0o600)
    with opened(tmp_path / "cache", replace(SMALL, key_file=key_file)) as tier:
        store(tier, keys_of([0, 1]))
    return key_file


def test_verify_checks_encrypted_blocks_with_the_key_and_says_what_it_cannot_check_without(tmp_path, cache):
    path, key_file = tmp_path / "cache", encrypt(tmp_path)
    result = cache("verify", path=path)
    assert (result.returncode, "2 blocks sound" in result.stdout) == (0, True)
    assert "2 blocks of these are encrypted" in result.stdout
    assert "give --key-file" in result.stdout
    assert "encrypted" not in cache("verify", "--key-file", str(key_file), path=path).stdout
    key_file.write_bytes(bytes(32))
    assert "another secret" in cache("verify", "--key-file", str(key_file), path=path).stdout


def test_a_forged_ciphertext_with_a_right_checksum_is_found_with_the_key_alone(tmp_path, cache):
    path, key_file = tmp_path / "cache", encrypt(tmp_path)
    (segment,) = segment_files(path)
    (run,) = runs_of(segment)
    content, entry = bytearray(segment.read_bytes()), run.entries[0]
    begin, stored_bytes = int(entry["page"]) * PAGE, int(entry["stored_bytes"])
    content[begin + 20] ^= 1
    payload = memoryview(bytes(content[begin : begin + padded(stored_bytes)]))
    entries = run.entries.copy()
    entries["checksum"][0] = np.frombuffer(
        block_checksum(run.namespace, 0, entry["key"].tobytes(), stored_bytes, payload), np.uint8
    )
    content[: run.header_bytes] = encode_header(replace(run, entries=entries))
    segment.write_bytes(content)
    assert cache("verify", path=path).returncode == 0
    result = cache("verify", "--key-file", str(key_file), path=path)
    assert result.returncode == 1
    assert "the block does not decrypt" in result.stdout


# ------------------------------------------------------------------------------ prune


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


# ------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize("action", ["stats", "list", "verify", "prune"])
def test_directories_that_are_no_cache_are_refused_by_every_action(tmp_path, cache, action):
    wish = ["--all"] if action == "prune" else []

    def refused(path, message):
        result = cache(action, *wish, path=path)
        assert (result.returncode, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1
        assert str(path) in result.stderr
        assert message in result.stderr

    refused(tmp_path / "nowhere", "does not exist; give the directory")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "holds no cache; give the directory")
    assert list((tmp_path / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a directory")
    refused(tmp_path / "file" / "below", "Not a directory")
    fill(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o777)
    refused(tmp_path / "cache", "chmod go-w")
    (tmp_path / "cache").chmod(0o755)
    (tmp_path / "cache" / "v1").chmod(0o750)
    refused(tmp_path / "cache", "chmod 700")
    (tmp_path / "cache" / "v1").chmod(0o700)
    assert cache(action, *wish, path=tmp_path / "cache").returncode == 0
    if os.geteuid() == 0:  # only root can give a directory to another user
        os.chown(tmp_path / "cache", 12345, -1)
        refused(tmp_path / "cache", "belongs to user 12345")


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


def test_the_command_starts_without_torch_and_says_all_in_a_process_of_its_own(tmp_path):
    fill(tmp_path)
    code = (
        "import sys; from foreword.cli import main; code = main(sys.argv[1:]); print(sorted(sys.modules)); exit(code)"
    )
    for action in ("stats", "list", "verify", "prune"):
        wish = ["--all"] if action == "prune" else []
        ran = subprocess.run(
            [sys.executable, "-c", code, "cache", action, str(tmp_path), *wish],
            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert ran.stderr == ""
        assert not {"'torch'", "'transformers'", "'numba'", "'rich'"} & set(ran.stdout.strip("[]\n").split(", "))
    assert segment_files(tmp_path) == []
