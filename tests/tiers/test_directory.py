"""The cache's directory: what is refused and why, modes under any umask, locks, and whose folder is whose."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from foreword.errors import ConfigError
from foreword.tiers.disk.directory import CacheDirectory, segments_in
from foreword.tiers.disk.files import RealFiles, Space

FILES = RealFiles()


def modes(path: Path) -> dict[str, int]:
    return {str(found.relative_to(path)): stat.S_IMODE(found.lstat().st_mode) for found in path.rglob("*")}


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o777], ids=oct)
def umask(request):
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_folders_are_0700_and_files_0600_whatever_the_umask(tmp_path, umask):
    directory = CacheDirectory(FILES, tmp_path / "cache")
    fd = FILES.create(directory.home / "000001-00000000.fwseg")
    os.close(fd)
    directory.close()
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    for name, mode in modes(tmp_path / "cache").items():
        assert mode == (0o700 if (tmp_path / "cache" / name).is_dir() else 0o600), name


def test_a_directory_that_others_can_write_is_refused(tmp_path):
    for mode in (0o770, 0o707, 0o777, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"{mode:04o}.*chmod go-w"):
            CacheDirectory(FILES, tmp_path)
    assert list(tmp_path.iterdir()) == []
    tmp_path.chmod(0o755)  # others may see that it is there
    CacheDirectory(FILES, tmp_path).close()
    assert stat.S_IMODE((tmp_path / "v1").stat().st_mode) == 0o700


def test_an_inner_folder_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1").chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        CacheDirectory(FILES, tmp_path)


class OwnedByAnother(RealFiles):
    """Reports another owner for a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stat(self, path: Path) -> os.stat_result:
        found = super().stat(path)
        if path != self.path:
            return found
        return os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])


def test_a_directory_of_another_user_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid() + 1}.*directory of its own"):
        CacheDirectory(OwnedByAnother(tmp_path), tmp_path)
    (tmp_path / "v1").mkdir(0o700)
    with pytest.raises(ConfigError, match="belongs to user"):
        CacheDirectory(OwnedByAnother(tmp_path / "v1"), tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_that_really_belongs_to_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        CacheDirectory(FILES, tmp_path)


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        CacheDirectory(FILES, tmp_path / "file")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "v1").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        CacheDirectory(FILES, tmp_path / "cache")
    with pytest.raises(ConfigError, match="cannot be used"):
        CacheDirectory(FILES, tmp_path / "file" / "below")


class ReadOnly(RealFiles):
    """A file system that is mounted read-only."""

    def space(self, path: Path) -> Space:
        return super().space(path)._replace(is_read_only=True)


def test_a_read_only_file_system_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Read-only file system.*local disk"):
        CacheDirectory(ReadOnly(), tmp_path)


def test_a_symbolic_link_to_the_directory_is_followed_once(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    directory = CacheDirectory(FILES, tmp_path / "link")
    assert directory.path == tmp_path / "real"
    directory.close()


def test_two_that_live_have_two_folders_and_the_next_takes_that_of_a_dead_one(tmp_path):
    first, second = CacheDirectory(FILES, tmp_path), CacheDirectory(FILES, tmp_path)
    assert first.home != second.home
    assert first.other_homes() == [second.home]
    second.close()
    third = CacheDirectory(FILES, tmp_path)
    assert third.home == second.home
    first.close()
    third.close()


def segment(home: Path, number: int) -> Path:
    path = home / f"{number:06d}-{number:08x}.fwseg"
    os.close(FILES.create(path))
    return path


def test_the_segments_of_the_dead_are_adopted_and_those_of_the_living_are_not(tmp_path):
    dying, living, heir = (CacheDirectory(FILES, tmp_path) for _ in range(3))
    segment(dying.home, 10)
    segment(dying.home, 9)
    (dying.home / "index").write_text("a snapshot")
    kept = segment(living.home, 1)
    assert heir.adopt() == 0
    dying.close()
    assert heir.adopt() == 2
    assert [path.name for path in segments_in(FILES, heir.home)] == ["000009-00000009.fwseg", "000010-0000000a.fwseg"]
    assert not dying.home.exists()
    assert segments_in(FILES, living.home) == [kept]
    heir.close()
    living.close()


def test_nobody_tidies_while_another_does(tmp_path):
    dying, first, second = (CacheDirectory(FILES, tmp_path) for _ in range(3))
    segment(dying.home, 1)
    dying.close()
    janitor = FILES.open_lock(first.root / "JANITOR")
    assert FILES.try_lock(janitor)
    assert second.adopt() == 0
    os.close(janitor)
    assert second.adopt() == 1
    first.close()
    second.close()


def test_a_folder_without_its_name_is_not_taken_for_a_dead_one(tmp_path):
    first = CacheDirectory(FILES, tmp_path)
    (first.root / "new-0123").mkdir()
    (first.root / "0123456789abcdef0123456789abcdef").write_text("no folder")
    assert first.adopt() == 0
    first.close()


def test_names_of_segments_are_in_the_order_of_their_numbers(tmp_path):
    directory = CacheDirectory(FILES, tmp_path)
    paths = [segment(directory.home, number) for number in (1_000_000, 999_999, 2)]
    assert segments_in(FILES, directory.home) == paths[::-1]
    (directory.home / "000003.fwseg").write_text("another name")
    assert len(segments_in(FILES, directory.home)) == 3
    assert segments_in(FILES, tmp_path / "nowhere") == []
    directory.close()
    directory.close()


def test_a_dead_folder_that_cannot_be_removed_keeps_no_other_from_being_adopted(tmp_path, caplog):
    directories = [CacheDirectory(FILES, tmp_path) for _ in range(3)]
    mine, *dead = sorted(directories, key=lambda directory: directory.home, reverse=True)
    for number, directory in enumerate(dead, 1):
        segment(directory.home, number)
    first = min(directory.home for directory in dead)
    (first / "not-ours").mkdir()
    for directory in dead:
        directory.close()
    mine.adopt()
    assert [path.name for path in segments_in(FILES, mine.home)] == ["000001-00000001.fwseg", "000002-00000002.fwseg"]
    assert f"{first} of a dead process cannot be taken over" in caplog.text
    assert mine.other_homes() == [first]
    mine.close()
