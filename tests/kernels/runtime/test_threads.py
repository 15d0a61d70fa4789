"""Operations run one after the other in several threads, and each waits for the one before."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from numba import carray
from torch import Tensor

from foreword.kernels.runtime import threads as team
from foreword.kernels.runtime.compiled import record, worker
from foreword.kernels.runtime.threads import Program
from foreword.model.cpu.row_functions import Norm, RowOperation
from lanes import slow

WIDTH, NUM_ROWS, NUM_OPERATIONS = 64, 300, 40


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def running_sums(num_operations: int = NUM_OPERATIONS) -> tuple[Program, list[Tensor], Tensor]:
    """A program in which row n of a tensor is the one before plus 1, in the sum of a norm of a sum."""
    ones = torch.ones(NUM_ROWS, WIDTH)
    rows = [torch.zeros(NUM_ROWS, WIDTH) for _ in range(num_operations + 1)]
    norms = torch.empty(NUM_ROWS, WIDTH)
    norm = Norm(torch.ones(WIDTH), 1e-6, 0)
    operations = []
    for before, after in itertools.pairwise(rows):
        operation = RowOperation()
        operation.set_norm(norm)
        operation.bind(before.data_ptr(), ones.data_ptr(), after.data_ptr(), norms.data_ptr(), NUM_ROWS)
        operations.append(operation)
    operations[0].kept = (ones, norm, norms)  # type: ignore[attr-defined]
    return Program(operations), rows, ones


@pytest.mark.usefixtures("num_threads")
def test_no_operation_begins_before_the_one_before_has_ended() -> None:
    program, rows, _ = running_sums()
    for _ in range(20):
        for tensor in rows[1:]:
            tensor.fill_(torch.nan)
        program.run()
        assert [int(tensor.sum()) for tensor in rows] == [n * NUM_ROWS * WIDTH for n in range(len(rows))]


def test_threads_without_openmp_do_the_same_work(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    monkeypatch.setattr(team, "gnu_openmp", lambda: None)
    program, rows, _ = running_sums()
    program.run()
    assert num_threads
    assert (rows[-1] == NUM_OPERATIONS).all()


def test_an_interrupt_before_all_threads_have_begun_leaves_none_waiting(
    monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(team, "gnu_openmp", lambda: None)
    program, rows, _ = running_sums()
    submit, calls = ThreadPoolExecutor.submit, iter(range(100))

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == num_threads - 1:
            raise KeyboardInterrupt
        return submit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", interrupted)
        if num_threads > 1:
            with pytest.raises(KeyboardInterrupt):
                program.run()
    program.run()
    assert (rows[-1] == NUM_OPERATIONS).all()


def test_an_operation_runs_alone_too_and_counts_in_the_program_that_took_it_last() -> None:
    program, rows, _ = running_sums(3)
    again = Program(program.operations)
    for run in (again.run, program.operations[2].run, again.run):
        rows[-1].zero_()
        run()
        assert (rows[-1] == 3).all()


FEWER = """
import torch
from numba import carray
torch.set_num_threads(4)
import sys
import time
sys.path[:0] = {path!r}
from kernels.runtime.test_threads import running_sums
program, rows, _ = running_sums()
program.run()
assert (rows[-1] == 40).all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["OMP_THREAD_LIMIT=3", *slow("OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true")])
def test_threads_that_the_system_does_not_give_are_not_waited_for(setting: str) -> None:
    script = FEWER.replace("{path!r}", repr(sys.path))
    subprocess.run(["env", setting, sys.executable, "-c", script], check=True, timeout=120)


def test_a_thread_that_waits_long_sleeps() -> None:
    before, late, asleep = torch.get_num_threads(), itertools.count(), []

    def num_sleepers() -> int:
        return int(program._whole._counters[team.SLEEPERS // 8])

    def rest() -> int:
        if next(late) % 2:
            time.sleep(0.02)
            asleep.append(num_sleepers())
        return 0

    c_rest = ctypes.CFUNCTYPE(ctypes.c_int)(rest)

    @worker(record("rest", "counters"))
    def one_rests(arguments: Any) -> None:
        team._call_for_number(carray(arguments, 1)[0].rest)

    operations = [team.Operation(one_rests) for _ in range(20)]
    for operation in operations:
        operation.arguments["rest"] = team.address_of(c_rest)
    program = Program(operations)
    torch.set_num_threads(2)
    try:
        program.run()
    finally:
        torch.set_num_threads(before)
    assert len(asleep) == len(operations)
    assert max(asleep) == (1 if team.FUTEX else 0)
    assert num_sleepers() == 0
