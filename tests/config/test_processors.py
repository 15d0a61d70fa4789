"""What a process may use of a machine's processors, from files as Linux writes them and from a real cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.config.processors import Processors, read_processors

V2 = "35 24 0:30 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "36 24 0:31 {mounted} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"
MEMORY = "37 24 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("mounted", "cgroup", "folders", "quota"),
    [
        ("/", "/", {"": "150000 100000"}, 1.5),
        ("/", "/", {"": "max 100000"}, None),
        ("/", "/", {}, None),  # the root of a machine has no such file
        ("/", "/user/shell", {"user/shell": "max 100000", "user": "50000 100000"}, 0.5),
        ("/", "/pod/box", {"pod": "300000 100000", "pod/box": "200000 50000", "": "max 100000"}, 3.0),
        ("/docker/1", "/docker/1", {"": "100000 100000"}, 1.0),  # the host's names, of which one part is mounted
        ("/docker/1", "/docker/1/inner", {"inner": "70000 100000", "": "100000 100000"}, 0.7),
        ("/", "/../../other", {"": "100000 100000"}, 1.0),  # moved out of its namespace
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_strictest_quota_of_all_cgroups_above_counts(
    tmp_path: Path, version: int, mounted: str, cgroup: str, folders: dict[str, str], quota: float | None
) -> None:
    mounts, own, files = [MEMORY], [f"4:memory:{cgroup}"], {}
    if version == 2:
        mounts.append(V2.format(mounted=mounted))
        own.append(f"0::{cgroup}")
        files = {f"sys/fs/cgroup/{folder}/cpu.max": text + "\n" for folder, text in folders.items()}
    else:
        mounts.append(V1.format(mounted=mounted))
        own += [f"1:cpu,cpuacct:{cgroup}", "0::/"]
        for folder, text in folders.items():
            limit, period = text.replace("max", "-1").split()
            files[f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_quota_us"] = limit + "\n"
            files[f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_period_us"] = period + "\n"
    files |= {"proc/self/mountinfo": "\n".join(mounts), "proc/self/cgroup": "\n".join(own)}
    assert read_processors(write(tmp_path, files)).quota == quota


@pytest.mark.parametrize("text", ["", "nonsense", "1:cpu", "a b - cgroup2", "::\n0::/"])
def test_files_that_nobody_understands_are_no_limit(tmp_path: Path, text: str) -> None:
    files = {"proc/self/mountinfo": text, "proc/self/cgroup": text}
    assert read_processors(write(tmp_path, files)).quota is None


@pytest.mark.parametrize(("quota", "usable"), [(None, 4), (0.3, 1), (1.0, 1), (1.5, 2), (3.0, 3), (64.0, 4)])
def test_a_part_of_a_processor_counts_as_one(quota: float | None, usable: int) -> None:
    assert Processors(8, 4, quota).usable == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_the_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert read_processors().allowed == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("quota_us", [100_000, 150_000])
def test_a_real_cgroup_limits_the_process_that_is_moved_into_it(quota_us: int) -> None:
    folder = Path("/sys/fs/cgroup/cpu") / f"foreword-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    script = "import os, sys; from pathlib import Path; from foreword.config.processors import read_processors; \
        Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid())); print(read_processors().quota)"
    try:
        found = subprocess.run([sys.executable, "-c", script, folder], check=True, capture_output=True, text=True)
    finally:
        folder.rmdir()
    assert float(found.stdout) == quota_us / 100_000
