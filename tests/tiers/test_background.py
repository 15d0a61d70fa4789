"""Threads that store give way to those that compute; the others keep their priority."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from foreword.tiers.background import NICE
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.job_thread import JobThread
from foreword.tiers.ticket import Outcome, Ticket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own elsewhere")


def nice_of(thread_id: int | None) -> int:
    """The 19th field of a thread's `stat`; the second is a name in brackets that may hold spaces."""
    fields = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[16])


def test_of_a_disk_tier_s_threads_the_one_that_stores_gives_way(tmp_path: Path) -> None:
    own, before = nice_of(threading.get_native_id()), set(threading.enumerate())
    tier = DiskTier(tmp_path, DiskOptions(budget_bytes=1 << 26, segment_bytes=1 << 22))
    try:
        tier.wait_scanned()
        found = {thread.name: nice_of(thread.native_id) for thread in set(threading.enumerate()) - before}
        assert found["foreword-tier-store"] == NICE
        assert found["foreword-tier-load"] == own
    finally:
        tier.close(0.0)
    assert nice_of(threading.get_native_id()) == own


class Look:
    """A job that notes the priority of the thread that works on it."""

    def __init__(self) -> None:
        self.ticket = Ticket(1)
        self.nice = -1

    def work(self) -> None:
        self.nice = nice_of(threading.get_native_id())
        self.ticket.finish(Outcome.DONE)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_thread_of_jobs_gives_way_if_it_is_told_to(in_background: bool) -> None:
    thread: JobThread[Look] = JobThread("test", Look.work, 10, in_background=in_background)
    thread.start()
    look, own = Look(), nice_of(threading.get_native_id())
    thread.add(look, 1)
    assert look.ticket.wait(10)
    thread.stop_after(1.0)
    thread.join(10.0)
    assert look.nice == (NICE if in_background else own)
