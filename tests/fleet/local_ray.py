"""A real local Ray for one test: begun anew if it does not start, and gone before the next one starts.

Ray's start is not what the tests are about. It can fail on a busy machine: a process that Ray forks has to start within
a fixed time, and one that died looks the same as one that is slow, because Ray only waits for a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psutil

NUM_STARTS = 3
START_S = "60"
"""Time that one start may take; Ray reads it from the environment."""
END_S = 60.0
"""Time in which the processes of a Ray that was shut down have to end by themselves."""

T = TypeVar("T")


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """A Ray of one machine, to which this process is connected."""
    import ray

    def start() -> None:
        ray.init(
            "local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            namespace="serve",
            _node_ip_address="127.0.0.1",
        )

    with _running(start, lambda _: None):
        yield


@contextmanager
def local_machines(*num_cpus: int) -> Iterator[tuple[Any, list[Any]]]:
    """A Ray of several pretended machines, the first of which is its head; yields Ray's cluster and the others."""
    import ray
    from ray.cluster_utils import Cluster

    def start() -> tuple[Any, list[Any]]:
        head = {"num_cpus": num_cpus[0], "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        others = [cluster.add_node(num_cpus=one) for one in num_cpus[1:]]
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        return cluster, others

    with _running(start, lambda started: started[0].shutdown()) as started:
        yield started


@contextmanager
def _running(start: Callable[[], T], stop: Callable[[T], None]) -> Iterator[T]:
    import ray

    from foreword.fleet.ray_serve import RAY_SETTINGS

    os.environ.update({**RAY_SETTINGS, "RAY_gcs_server_port_wait_time_s": START_S})
    before = descendants()
    for number in range(1, NUM_STARTS + 1):
        try:
            started = start()
            break
        except Exception:  # of any kind, Ray's own among them
            ray.shutdown()
            _end(descendants() - before)
            if number == NUM_STARTS:
                raise
    try:
        yield started
    finally:
        ours = descendants() - before
        ray.shutdown()
        stop(started)
        left = left_of(ours, END_S)
        _end(left)
        assert not left, "processes of a Ray that was shut down lived on"


def descendants(process_id: int | None = None) -> set[psutil.Process]:
    """The processes that a process (this one) has started, and those that they have started."""
    return set(psutil.Process(process_id).children(recursive=True))


def left_of(processes: set[psutil.Process], within_s: float) -> set[psutil.Process]:
    """Those that have not ended within a time. One that nobody buries has ended too."""
    deadline = time.monotonic() + within_s
    while (left := {one for one in processes if _is_running(one)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _end(processes: set[psutil.Process]) -> None:
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    left_of(processes, END_S)
