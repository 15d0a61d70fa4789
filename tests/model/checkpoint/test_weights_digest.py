"""Digests of weights: what changes them, what is remembered, and what must not be believed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from foreword.config import ModelConfig
from foreword.errors import ModelLoadError
from foreword.model.checkpoint import weights_digest
from foreword.model.checkpoint.weights_digest import RememberedDigests, WeightsDigest, weight_files

LONG_AGO_S = -1.0
"""Files made in this very moment count as settled."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of one file, which is read in several pieces."""
    monkeypatch.setattr(weights_digest, "PIECE_BYTES", 1000)
    monkeypatch.setattr(weights_digest, "READ_BYTES", 300)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(i % 251 for i in range(4321)))
    return folder


@pytest.fixture
def remembered(tmp_path: Path) -> RememberedDigests:
    return RememberedDigests(tmp_path / "cache" / "weights.json", least_bytes=1, settled_s=LONG_AGO_S)


def digest(folder: Path, remembered: RememberedDigests) -> str:
    with WeightsDigest(ModelConfig(str(folder)), remembered) as weights:
        found = weights.hex()
    assert found is not None
    return found


def flip(path: Path, byte: int) -> None:
    time.sleep(0.05)  # a file system's clock ticks every 4 to 10 ms; within a tick the stamp stays
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("byte", [0, 999, 1000, 4320])
def test_one_bit_changes_the_digest(folder: Path, remembered: RememberedDigests, byte: int) -> None:
    before = digest(folder, remembered)
    flip(folder / "model.safetensors", byte)
    assert digest(folder, remembered) != before
    flip(folder / "model.safetensors", byte)
    assert digest(folder, remembered) == before


def test_equal_weights_elsewhere_have_the_same_digest(folder: Path, remembered: RememberedDigests) -> None:
    moved = folder.parent / "another name"
    shutil.copytree(folder, moved)
    assert digest(moved, remembered) == digest(folder, remembered)


def test_what_is_remembered_is_not_read_again(
    folder: Path, remembered: RememberedDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest(folder, remembered)
    read: list[Path] = []
    piece = weights_digest._piece

    def noted(path: Path, start: int, end: int) -> bytes:
        read.append(path)
        return piece(path, start, end)

    monkeypatch.setattr(weights_digest, "_piece", noted)
    assert digest(folder, remembered) == before
    assert read == []
    os.utime(folder / "model.safetensors")
    assert digest(folder, remembered) == before
    assert len(read) == 5


def test_an_old_date_that_somebody_set_back_deceives_nobody(folder: Path, remembered: RememberedDigests) -> None:
    path = folder / "model.safetensors"
    before, found = digest(folder, remembered), path.stat()
    with path.open("r+b") as file:
        file.write(b"\xff")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert path.stat().st_mtime_ns == found.st_mtime_ns
    assert digest(folder, remembered) != before


def test_young_and_small_files_are_not_remembered(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache.json"
    digest(folder, RememberedDigests(place, least_bytes=1))
    digest(folder, RememberedDigests(place, least_bytes=5000, settled_s=LONG_AGO_S))
    assert not place.exists()


def test_only_the_user_reads_what_is_remembered(folder: Path, remembered: RememberedDigests, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        digest(folder, remembered)
    finally:
        os.umask(mask)
    place = tmp_path / "cache"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()] == [0o600]


@pytest.mark.parametrize("harm", ["writable by others", "a link", "torn", "no object", "not a digest"])
def test_what_others_may_have_written_is_not_believed(
    folder: Path, remembered: RememberedDigests, tmp_path: Path, harm: str
) -> None:
    before, place = digest(folder, remembered), tmp_path / "cache" / "weights.json"
    entries = {path: [*entry[:-1], "00" * 32] for path, entry in json.loads(place.read_text()).items()}
    place.write_text(json.dumps(entries))
    assert digest(folder, remembered) != before, "the entry is looked at"
    if harm == "writable by others":
        place.chmod(0o666)
    elif harm == "a link":
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        wrong = {path: [*entry[:-1], "xyz"] for path, entry in entries.items()}
        place.write_text({"torn": place.read_text()[:-9], "no object": "[1]", "not a digest": json.dumps(wrong)}[harm])
    assert digest(folder, remembered) == before


def test_where_nothing_can_be_written_the_digest_is_computed_each_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = RememberedDigests(tmp_path / "file" / "weights.json", least_bytes=1, settled_s=LONG_AGO_S)
    assert digest(folder, blocked) == digest(folder, blocked)


def test_weights_that_change_while_the_model_loads_are_refused(folder: Path, remembered: RememberedDigests) -> None:
    with WeightsDigest(ModelConfig(str(folder)), remembered) as weights:
        flip(folder / "model.safetensors", 7)
        with pytest.raises(
            ModelLoadError, match=r"model.safetensors of model .* changed while it was read; start again"
        ):
            weights.hex()


def test_transformers_order_of_files_and_its_indexes_are_followed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert [path.name for path in weight_files(tmp_path)] == ["pytorch_model.bin"]
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}})
    )
    assert [path.name for path in weight_files(tmp_path)] == ["1.safetensors", "2.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.safetensors"}')
    (tmp_path / "other.safetensors").touch()
    assert [path.name for path in weight_files(tmp_path)] == ["other.safetensors"]


def test_an_adapter_in_the_folder_counts_and_so_does_what_it_is_added_to(
    folder: Path, remembered: RememberedDigests
) -> None:
    plain = digest(folder, remembered)
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    (adapter / "adapter_model.safetensors").write_bytes(b"low ranks")
    before = digest(adapter, remembered)
    assert before != plain
    flip(adapter / "adapter_model.safetensors", 0)
    changed = digest(adapter, remembered)
    assert changed != before
    flip(folder / "model.safetensors", 0)
    assert len({plain, before, changed, digest(adapter, remembered)}) == 4


def test_adapters_that_name_each_other_have_the_digest_of_their_own_files(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, base in zip(folders, reversed(folders), strict=True):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
        (folder / "model.safetensors").write_bytes(b"weights")
    names = [str(path.relative_to(tmp_path)) for path in weight_files(folders[0])]
    assert names == [
        "one/model.safetensors",
        "other/model.safetensors",
        "other/adapter_config.json",
        "one/adapter_config.json",
    ]


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 5}}', "[" * 100_000])
def test_an_index_that_makes_no_sense_is_left_to_the_loader(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with WeightsDigest(ModelConfig(str(tmp_path))):
        pass


def test_without_files_there_is_no_digest(tmp_path: Path) -> None:
    with WeightsDigest(ModelConfig(str(tmp_path))) as weights:
        assert weights.hex() is None
