"""Entries live on in the next process: their blocks come from a tier, their times from a file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.tiering.test_director import PROMPT, output, prompt_of, world_on
from foreword.engine import BREAKPOINT, Keep
from foreword.engine.keeper import EntryFile, SavedEntry
from hash_runner import HashEngine
from late_tier import LateTier

DAY = 1_800_000_000.0


class Process:
    """An engine on a tier and a file that outlive it, with a clock of its own."""

    def __init__(self, tier: LateTier, path: Path, wall: float, *, start: float = 500.0) -> None:
        self.now, self._start, self._wall = start, start, wall
        self._tier = tier
        self.world: HashEngine = world_on(tier, max_pinned_share=0.5)
        self.world.engine.clock = lambda: self.now
        self.entries = self.world.engine.entries
        self.entries.wall_clock = lambda: self._wall + self.now - self._start
        self.entries.open(EntryFile(path))

    def run(self, tokens: list[int]) -> int:
        """Ask for one token; returns the prompt tokens that were found."""
        self._number = getattr(self, "_number", 0) + 1
        found = output(self.world, f"r{self._number}", tokens, max_tokens=1)
        while not found.finished:
            self.world.engine.step()
            self._tier.finish()
        while self.world.engine.store_on():
            self._tier.finish()
        return found.num_cached_tokens

    def listed(self) -> list[tuple[str, int, float]]:
        return [(one.source, one.num_kept_tokens, one.until - self.now) for one in self.entries.entries()]


def first(tmp_path: Path, keep: Keep) -> tuple[LateTier, Path]:
    """A process that keeps a prompt, stores it and ends."""
    tier, path = LateTier(), tmp_path / "x.entries"
    process = Process(tier, path, DAY)
    process.run(PROMPT)
    assert process.entries.pin(prompt_of(PROMPT), keep).num_kept_tokens == 40
    while process.world.engine.store_on():
        tier.finish()
    process.entries.save(at_once=True)
    return tier, path


def test_an_entry_is_kept_again_when_a_prompt_begins_with_it(tmp_path):
    tier, path = first(tmp_path, Keep(300.0, BREAKPOINT))
    again = Process(tier, path, DAY + 100, start=7.0)
    assert again.listed() == [(BREAKPOINT, 0, 200.0)]
    again.run([9] * 40)
    assert again.listed() == [(BREAKPOINT, 0, 200.0)], "another prompt does not wake it"
    assert again.run([*PROMPT, 9, 9]) == 40
    assert again.listed() == [(BREAKPOINT, 40, 300.0)], "a use refreshes it"
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_end_that_use_does_not_move_stays_through_a_restart(tmp_path):
    tier, path = first(tmp_path, Keep(300.0, "resource", name="r", until=800.0))
    again = Process(tier, path, DAY + 100)
    again.run([*PROMPT, 9, 9])
    assert again.listed() == [("resource", 40, 200.0)]
    again.entries.save(at_once=True)
    third = Process(tier, path, DAY + 150)
    assert third.listed() == [("resource", 0, 150.0)]
    third.entries.set_end("r", third.now + 20)
    assert third.listed() == [("resource", 0, 20.0)]
    third.now += 21
    assert third.listed() == []


def test_a_use_never_brings_an_end_nearer(tmp_path):
    tier, path = first(tmp_path, Keep(50.0, BREAKPOINT))
    again = Process(tier, path, DAY)
    (entry,) = again.entries.entries()
    again.entries.set_end(entry.name, again.now + 100)
    again.run([*PROMPT, 9, 9])
    assert again.listed() == [(BREAKPOINT, 40, 100.0)]


def test_what_ended_meanwhile_is_forgotten(tmp_path):
    tier, path = first(tmp_path, Keep(300.0))
    assert Process(tier, path, DAY + 301).listed() == []
    again = Process(tier, path, DAY + 100)
    again.entries.drop(again.entries.entries()[0].name)
    assert again.listed() == []
    again.run(PROMPT)
    again.entries.save(at_once=True)
    assert again.listed() == Process(tier, path, DAY + 100).listed() == []


SOUND = {
    "name": "n",
    "owner": None,
    "source": "pin",
    "num_tokens": 4,
    "last_key": "00",
    "until": DAY,
    "refresh_s": None,
}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"entries": 3}',
        '{"entries": [{}]}',
        '{"entries": [' * 10_000,
        '{"entries": [{"name": 1, "owner": null, "source": "s", "num_tokens": 4, "last_key": "", "until": 1, '
        '"refresh_s": null}]}',
        '{"entries": [{"name": "n", "owner": null, "source": "s", "num_tokens": 4, "last_key": "x", "until": 1, '
        '"refresh_s": null}]}',
    ],
)
def test_a_damaged_file_is_forgotten_and_said_so(tmp_path, caplog, text):
    path = tmp_path / "x.entries"
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert EntryFile(path).read() == []
    assert "cannot be read" in caplog.text
    EntryFile(path).write([SavedEntry(**SOUND)])
    assert EntryFile(path).read() == [SavedEntry(**SOUND)]


def test_a_file_that_cannot_be_written_is_said_so_and_nothing_else_happens(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        EntryFile(tmp_path / "missing" / "x").write([])
    assert "cannot be written" in caplog.text


def test_an_entry_that_finds_no_budget_when_a_prompt_begins_with_it_waits_for_the_next(tmp_path):
    tier, path = first(tmp_path, Keep(300.0, "resource", name="r", until=800.0))
    again = Process(tier, path, DAY + 100)
    other = [8] * 39
    for number in range(4):  # they use the whole budget of 32 blocks
        again.run([number, *other])
        again.entries.pin(prompt_of([number, *other]), Keep(50.0))
    again.run([*PROMPT, 9])
    assert ("resource", 0, 200.0) in again.listed()
    again.now += 51
    again.run([*PROMPT, 9, 9])
    assert again.listed() == [("resource", 40, 149.0)]
