"""The share of a machine's processors that this process may use: its affinity, and the quota of its cgroups.

A system without these limits lets a process use the whole machine.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class Processors:
    """The processors that the system lets this process use."""

    installed: int
    allowed: int
    """Processors on which the system may run this process."""
    quota: float | None = None
    """Seconds of processor time per second of wall time, by the strictest of the process's cgroups; None: no limit."""

    @property
    def usable(self) -> int:
        """The number of threads that can compute at once. A quota of 1.5 processors gives two: it is rounded up."""
        return self.allowed if self.quota is None else min(self.allowed, max(1, math.ceil(self.quota)))

    def __str__(self) -> str:
        limits = [f"{self.allowed} of {self.installed} processors"]
        if self.quota is not None:
            limits.append(f"the cgroup's quota is {self.quota:.4g} processors")
        return "; ".join(limits)


def read_processors(root: Path = Path("/")) -> Processors:
    """What this process may use now. `root`: the folder in which /proc and the cgroups' folders lie."""
    installed = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    quotas = (quota for folder in cgroup_folders(root, "cpu") for quota in _quotas(folder))
    return Processors(installed, allowed, min(quotas, default=None))


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of all cgroups that this process is in, from its own up to the root, where `controller` has files."""
    with contextlib.suppress(OSError, ValueError):  # if files are not as Linux writes them, no cgroup is known
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (root / "proc/self/mountinfo").read_text().splitlines()]
        for where, how in mounts:
            (_, _, _, mounted, mount_point, *_), (kind, _, settings) = where.split(" "), how.split(" ", 2)
            for _, controllers, path in groups:
                is_first = kind == "cgroup" and controller in set(controllers.split(",")) & set(settings.split(","))
                if is_first or (kind == "cgroup2" and not controllers):
                    yield from _folders_above(root, PurePosixPath(path), mounted, mount_point)


def _folders_above(root: Path, path: PurePosixPath, mounted: str, mount_point: str) -> Iterator[Path]:
    """The folders of a cgroup and of those above it. `mounted`: the cgroup whose folder is `mount_point`."""
    inside = path.relative_to(mounted) if path.is_relative_to(mounted) else PurePosixPath(path.as_posix().lstrip("/"))
    top = root / mount_point.lstrip("/")
    if ".." in inside.parts:  # of a cgroup outside this namespace, only what is mounted can be seen
        inside = PurePosixPath()
    yield from (top / part for part in (inside, *inside.parents))


def _quotas(folder: Path) -> Iterator[float]:
    """The quota of a cgroup in processors, if it has one."""
    pairs: list[list[str]] = []
    with contextlib.suppress(OSError):
        pairs.append((folder / "cpu.max").read_text().split())  # "max" is no number: no limit
    with contextlib.suppress(OSError):
        pairs.append([(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")])  # -1: no limit
    with contextlib.suppress(ValueError):
        for quota, period in pairs:
            if float(quota) > 0 and float(period) > 0:
                yield float(quota) / float(period)
