"""Cached contents in memory and in their folder: bounds, times, restarts, several servers, damage."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from foreword import __version__
from foreword.config import TierConfig
from foreword.errors import ConfigError
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.resources import store
from foreword.server.resources.store import (
    FOLDER_NAME,
    CachedContent,
    CachedContents,
    ContentFolder,
    new_content_id,
    open_folder,
)

ALICE, BOB = Tenant("alice"), Tenant("bob")
MODEL = "5" * 64


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def folder_in(cache_dir: Path, key_file: Path | None = None, model: str = MODEL) -> ContentFolder:
    options = TierConfig(cache_dir=str(cache_dir), cache_key_file=None if key_file is None else str(key_file))
    folder = open_folder(options, model)
    assert folder is not None
    return folder


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


def content(
    tenant: Tenant = ALICE, expires_s: float = 2000.0, source: bytes = b'{"contents": "\xc3\xa9"}'
) -> CachedContent:
    at = 10**9
    return CachedContent(
        new_content_id(), tenant.name, "m", "a\nname", "salt", source, at, at, int(expires_s * 1e6), 17
    )


def added(kept: CachedContents, one: CachedContent) -> CachedContent:
    async def add() -> None:
        with kept.room_for(one):
            await kept.add(one)

    asyncio.run(add())
    return one


def found(kept: CachedContents, tenant: Tenant = ALICE) -> list[CachedContent]:
    return asyncio.run(kept.of_tenant(tenant))


def files_in(cache_dir: Path) -> list[Path]:
    return sorted(path for path in (cache_dir / FOLDER_NAME).rglob("*") if path.is_file())


# ---------------------------------------------------------------------- bounds


def test_a_tenant_has_at_most_so_many_contents_and_all_together_16_times_as_many():
    kept = CachedContents(Clock(), 2)
    added(kept, content())
    one = content()
    with kept.room_for(one), pytest.raises(APIError, match="this tenant may have 2") as refused:
        added(kept, content())
    assert refused.value.status == 429
    added(kept, one)  # its room was given back
    for number in range(15):
        for _ in range(2):
            added(kept, content(Tenant(f"t{number}")))
    with pytest.raises(APIError, match="all tenants together may have 32"):
        added(kept, content(BOB))
    asyncio.run(kept.delete(one))
    added(kept, content(BOB))
    with pytest.raises(APIError):
        added(CachedContents(Clock(), 0), content())


def test_the_bytes_of_a_tenant_and_of_all_are_bounded(monkeypatch):
    monkeypatch.setattr(store, "MAX_BYTES_OF_TENANT", 20_000)
    monkeypatch.setattr(store, "MAX_BYTES", 50_000)
    kept = CachedContents(Clock(), 100)
    for tenant in map(Tenant, "abc"):
        added(kept, content(tenant, source=bytes(15_000)))
        with pytest.raises(APIError, match="this tenant"):
            added(kept, content(tenant, source=bytes(5_000)))
    assert 45_000 < kept.num_bytes < 50_000
    with pytest.raises(APIError, match="all tenants"):
        added(kept, content(Tenant("d"), source=bytes(5_000)))


# ----------------------------------------------------------------------- times


def test_a_content_is_there_until_its_end_and_its_file_goes_with_it(cache_dir):
    clock = Clock()
    kept = CachedContents(clock, 9, folder_in(cache_dir))
    one, other = added(kept, content(expires_s=1010)), added(kept, content(expires_s=1020))
    clock.now = 1009.0
    assert found(kept) == sorted([one, other], key=lambda content: content.id)
    assert asyncio.run(kept.find(BOB, one.id)) is None
    assert asyncio.run(kept.set_end(one, 1030 * 10**6, 1009 * 10**6)) == replace(
        one, expires_us=1030 * 10**6, updated_us=1009 * 10**6
    )
    clock.now = 1020.0
    assert [content.id for content in found(kept)] == [one.id]
    assert asyncio.run(kept.set_end(other, 1040 * 10**6, 1020 * 10**6)) is None
    assert [path.name for path in files_in(cache_dir)] == [one.id]
    clock.now = 1030.0
    assert asyncio.run(kept.set_end(one, 1040 * 10**6, 1029 * 10**6)) is None, "it ended while the call waited"
    assert asyncio.run(kept.find(ALICE, one.id)) is None
    assert files_in(cache_dir) == []
    assert kept.num_bytes == 0


# ---------------------------------------------------------------------- folder


def test_contents_come_back_after_a_restart_without_those_that_have_ended(cache_dir):
    clock = Clock()
    kept = CachedContents(clock, 9, folder_in(cache_dir))
    one, of_bob = added(kept, content()), added(kept, content(BOB))
    added(kept, content(expires_s=1001))
    asyncio.run(kept.delete(added(kept, content())))
    clock.now = 1500.0
    again = CachedContents(clock, 9, folder_in(cache_dir))
    assert (found(again), found(again, BOB)) == ([one], [of_bob])
    assert len(files_in(cache_dir)) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_in(cache_dir)} == {0o600}
    assert stat.S_IMODE((cache_dir / FOLDER_NAME).stat().st_mode) == 0o700
    assert found(CachedContents(clock, 9, folder_in(cache_dir, model="6" * 64))) == [], "another model's"


def test_a_key_file_encrypts_what_is_stored(cache_dir, key_file, caplog):
    kept = CachedContents(Clock(), 9, folder_in(cache_dir, key_file))
    one = added(kept, content(source=b'"a secret document"'))
    [path] = files_in(cache_dir)
    assert b"secret" not in path.read_bytes()
    assert b"alice" not in path.read_bytes()
    assert found(CachedContents(Clock(), 9, folder_in(cache_dir, key_file))) == [one]
    assert found(CachedContents(Clock(), 9, folder_in(cache_dir))) == []
    assert "another key file" in caplog.text
    forged = path.with_name(new_content_id())
    forged.write_bytes(path.read_bytes())  # the content of one id under another
    assert found(CachedContents(Clock(), 9, folder_in(cache_dir, key_file))) == [one]
    assert "not what was written under its name" in caplog.text


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_damaged_file_is_left_out_with_a_warning(cache_dir, key_file, caplog, encrypted):
    key = key_file if encrypted else None
    kept = CachedContents(Clock(), 99, folder_in(cache_dir, key))
    whole = added(kept, content())
    added(kept, content())
    chance = random.Random(1)
    damaged = next(path for path in files_in(cache_dir) if path.name != whole.id)
    sound = damaged.read_bytes()
    for _ in range(60):
        torn = bytearray(sound[: chance.randrange(len(sound))] if chance.random() < 0.5 else sound)
        if len(torn) == len(sound):
            torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(8)
        damaged.write_bytes(torn)
        caplog.clear()
        again = CachedContents(Clock(), 99, folder_in(cache_dir, key))
        assert found(again) == [whole]
        assert [record.levelno for record in caplog.records] == [logging.WARNING], "once, not at each look"
    damaged.unlink()
    damaged.symlink_to(files_in(cache_dir)[0])
    assert found(CachedContents(Clock(), 99, folder_in(cache_dir, key))) == [whole]


def test_a_content_of_a_newer_version_is_named_as_such_and_leaves_the_others_alone(cache_dir, caplog):
    kept = CachedContents(Clock(), 99, folder_in(cache_dir))
    newer, ours = added(kept, content()), added(kept, content())
    path = next(path for path in files_in(cache_dir) if path.name == newer.id)
    path.write_bytes(path.read_bytes().replace(b"content 1\n", b"content 2\n", 1))
    again = CachedContents(Clock(), 99, folder_in(cache_dir))
    with pytest.raises(APIError, match=f"{newer.id}.*format 2.*newer.*{__version__}.*update the server") as refused:
        asyncio.run(again.find(ALICE, newer.id))
    assert refused.value.status == 409
    assert asyncio.run(again.find(ALICE, ours.id)) == ours
    path.unlink()
    assert asyncio.run(again.find(ALICE, newer.id)) is None


def test_a_folder_that_others_can_reach_is_refused_and_one_that_cannot_be_made_is_done_without(cache_dir, caplog):
    folder_in(cache_dir)
    (cache_dir / FOLDER_NAME).chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        folder_in(cache_dir)
    assert open_folder(TierConfig(cache_dir=str(cache_dir / "none")), MODEL) is None
    assert "will not outlive this process" in caplog.text
    assert open_folder(TierConfig(), MODEL) is None


def test_a_content_that_cannot_be_written_is_served_from_memory(cache_dir, caplog):
    kept = CachedContents(Clock(), 9, folder_in(cache_dir))
    [path] = (cache_dir / FOLDER_NAME).iterdir()
    path.rmdir()
    one = added(kept, content())
    assert "cannot be written" in caplog.text
    assert asyncio.run(kept.find(ALICE, one.id)) == one
    asyncio.run(kept.delete(one))
    assert asyncio.run(kept.find(ALICE, one.id)) is None


def test_what_a_killed_process_left_unfinished_goes_after_an_hour(cache_dir):
    folder_in(cache_dir)
    [path] = (cache_dir / FOLDER_NAME).iterdir()
    for name, age_s in (("new-1", 4000), ("new-2", 0)):
        (path / name).touch()
        os.utime(path / name, (os.stat(path / name).st_mtime - age_s,) * 2)
    folder_in(cache_dir)
    assert [left.name for left in files_in(cache_dir)] == ["new-2"]


def test_a_file_that_another_process_finishes_while_a_server_starts_does_no_harm(cache_dir, monkeypatch):
    folder_in(cache_dir)
    [path] = (cache_dir / FOLDER_NAME).iterdir()
    (path / "new-1").touch()

    class Overtaken(store.RealFiles):
        def list_folder(self, path):
            names = super().list_folder(path)
            for name in names:
                (path / name).rename(path / new_content_id())
            return names

    monkeypatch.setattr(store, "RealFiles", Overtaken)
    folder_in(cache_dir)  # which is there: contents still outlive the process


class Servers:
    """Two servers of one folder, and the plain dictionary of what they must have."""

    def __init__(self, cache_dir: Path, seed: int) -> None:
        self.chance, self.clock = random.Random(seed), Clock()
        self.folders = [folder_in(cache_dir), folder_in(cache_dir)]
        self.kept = [CachedContents(self.clock, 8, folder) for folder in self.folders]
        self.expected: dict[str, CachedContent] = {}

    def of(self, tenant: Tenant) -> dict[str, CachedContent]:
        live = (one for one in self.expected.values() if one.expires_us > self.clock.now * 1e6)
        return {one.id: one for one in live if one.tenant == tenant.name}

    async def change(self) -> None:
        at = self.chance.randrange(2)
        tenant = self.chance.choice((ALICE, BOB))
        own = list(self.of(tenant).values())
        match self.chance.randrange(6):
            case 0 | 1:
                await self.add(self.kept[at], tenant, has_room=len(own) < 8)
            case 2 if own:
                await self.move(self.kept[at], tenant, self.chance.choice(own))
            case 3 if own:
                known = await self.kept[at].find(tenant, self.chance.choice(own).id)
                assert known is not None
                await self.kept[at].delete(known)
                del self.expected[known.id]
            case 4:
                self.clock.now += self.chance.randrange(3)
            case 5:
                self.kept[at] = CachedContents(self.clock, 8, self.folders[at])

    async def add(self, kept: CachedContents, tenant: Tenant, *, has_room: bool) -> None:
        one = content(tenant, self.clock.now + self.chance.randrange(1, 9))
        await kept.tidy()
        if has_room:
            with kept.room_for(one):
                await kept.add(one)
            self.expected[one.id] = one
        else:
            with pytest.raises(APIError), kept.room_for(one):
                pass

    async def move(self, kept: CachedContents, tenant: Tenant, one: CachedContent) -> None:
        known = await kept.find(tenant, one.id)
        assert known == one
        moved = await kept.set_end(one, kept.now_us + self.chance.randrange(9) * 10**6, kept.now_us)
        assert moved is not None
        self.expected[one.id] = moved


@pytest.mark.parametrize("seed", range(4))
def test_servers_of_one_folder_agree_whatever_happens(cache_dir, seed):
    """Random calls, restarts and waiting."""
    servers = Servers(cache_dir, seed)

    async def run() -> None:
        for _ in range(200):
            await servers.change()
            kept = servers.chance.choice(servers.kept)
            for tenant in (ALICE, BOB):
                assert {one.id: one for one in await kept.of_tenant(tenant)} == servers.of(tenant)

    asyncio.run(run())
    live = servers.of(ALICE) | servers.of(BOB)
    assert live.keys() <= {path.name for path in files_in(cache_dir)}
