"""`foreword cache stats | list | verify`: what they say of a directory, and the damage that is found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreword.tiers.disk.segments import PAGE, block_checksum, encode_header, padded
from foreword.tiers.tier import GROUP_APART
from foreword.tiers.upkeep import table
from tiers.block_world import (
    BLOCK_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    keys_of,
    opened,
    run_of,
    segment_files,
    store,
)
from tiers.cache_folders import DAY_S, FACTS, SMALL, fill, flip, runs_of

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


def test_encoded_pictures_are_named_and_are_no_tokens(tmp_path, cache):
    with opened(tmp_path, SMALL) as tier:
        tier.describe(NAMESPACE, FACTS)
        store(tier, keys_of([1, 2]))
        store(tier, keys_of([1, 2, 3], group_id=GROUP_APART))
    (told,) = json.loads(cache("list", "--json").stdout)["namespaces"]
    assert (told["num_blocks"], told["num_tokens"]) == (5, 32)
    assert re.search(r"  pictures +3 ", cache("stats").stdout)


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
