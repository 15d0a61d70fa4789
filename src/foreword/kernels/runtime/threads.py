"""Compiled functions, run by one thread or by all of torch's together, one alone or several in turn.

Knows addresses and threads; knows nothing of what is computed.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import platform
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils

from foreword.kernels.cpu.layout import source_digest
from foreword.kernels.llvm import simd
from foreword.kernels.step_plan import Int64Array

native_worker = cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")
"""Compiles `worker(arguments)`, what each thread runs, given an array of int64; once per machine.

A worker mentions `source_digest()`, so that it is compiled anew when another file that takes part in it has changed.
"""
(TABLE, NUM_OPERATIONS, ARRIVED, TEAM_SIZE, NUM_THREADS, GIVE_WAY, NUM_ARGUMENTS) = range(7)
"""int64 each. TABLE: address of each worker and of its arguments; ARRIVED: address of a counter;
TEAM_SIZE: of the function that says how many threads there are, 0: NUM_THREADS; GIVE_WAY: of the one that lets others
run."""


COUNTERS = 32
"""int64 of an operation: three in lines of their own."""
PATIENCE = 256
"""How many times a thread looks whether it may go on before it lets others run."""


class Operation:
    """A worker and its arguments. One thread at a time may set and run it."""

    def __init__(self, worker: Any, num_arguments: int, counters_at: int) -> None:
        """`worker`: what `native_worker` has made; `counters_at`: where its arguments have its counters' address."""
        self._worker = worker  # keeps the machine code
        self.arguments = np.zeros(num_arguments, np.int64)
        self.address: int = self.arguments.ctypes.data
        """Of the arguments."""
        self.worker_address: int = worker.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.worker_address)
        self._counters_at = counters_at
        self.count_in(np.zeros(COUNTERS, np.int64))

    def count_in(self, counters: Int64Array) -> None:
        """Take other counters [COUNTERS]: what the worker's threads share, 0 when they begin."""
        self._counters = counters
        self.arguments[self._counters_at] = counters.ctypes.data

    def run(self, *, alone: bool = False) -> None:
        """Once in each of torch's threads, or in the calling one `alone`; returns when all have returned."""
        self._counters[:] = 0
        if alone or torch.get_num_threads() == 1:
            self._call(self.address)
        else:
            _run_in_threads(self._call, self.worker_address, self.address)


class Program:
    """Operations that threads run one after the other: none begins before the one before has ended in all threads.

    To wait for each other takes threads less than a microsecond, to be called anew from Python some thirty. An
    operation counts in the program that took it last.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self._table = np.array([(one.worker_address, one.address) for one in operations], np.int64)
        self._counters = np.zeros((len(operations), COUNTERS), np.int64)
        for operation, counters in zip(operations, self._counters, strict=True):
            operation.count_in(counters)
        self._whole = Operation(_compile_program(), NUM_ARGUMENTS, ARRIVED)
        a, openmp = self._whole.arguments, _gnu_openmp()
        a[TABLE], a[NUM_OPERATIONS] = self._table.ctypes.data, len(operations)
        a[TEAM_SIZE] = 0 if openmp is None else _address_of(openmp.omp_get_num_threads)
        a[GIVE_WAY] = _address_of(ctypes.CDLL(None).sched_yield)

    def run(self, number: int | None = None) -> None:
        """Run all operations, or the first `number` of them, with their present arguments."""
        a = self._whole.arguments
        a[NUM_THREADS], a[NUM_OPERATIONS] = torch.get_num_threads(), len(self.operations) if number is None else number
        self._counters[:] = 0
        self._whole.run()


class Wires:
    """Numbers of one array that many operations take; Python would need as long for each layer as this for all."""

    def __init__(self, wires: Sequence[tuple[Operation, int, int]]) -> None:
        """`wires`: an operation, one of its arguments, and which number it takes."""
        self._operations = [operation for operation, _, _ in wires]
        self._ends = np.array([(one.address + 8 * argument, 8 * number) for one, argument, number in wires], np.int64)
        self._carry = Operation(_compile_wires(), 4, 3)

    def carry(self, numbers: Int64Array) -> None:
        """Set the arguments, from an array without gaps."""
        self._carry.arguments[:3] = self._ends.ctypes.data, len(self._ends), numbers.ctypes.data
        self._carry.run(alone=True)


# -------------------------------------------------------------------------------------- compiled


@simd._instructions("a", types.intp)
def _load_shared(builder: Any, address: Any) -> Any:
    """A 64-bit integer that threads change, and what they wrote to memory before."""
    return builder.load_atomic(builder.inttoptr(address, simd.I64.as_pointer()), "acquire", 8)


@simd._instructions("aa")
def _call_worker(builder: Any, function: Any, arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [simd.I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments])


@simd._instructions("a", types.intp)
def _call_for_number(builder: Any, function: Any) -> Any:
    """What a C function without arguments returns, an int."""
    kind = ir.FunctionType(simd.I32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), simd.I64)


@simd._instructions("")
def _pause(builder: Any) -> None:
    """Tell the processor that this thread waits."""
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


@functools.cache
def _compile_program() -> Any:
    """What each thread of a program runs. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        num_threads = _call_for_number(a[TEAM_SIZE]) if a[TEAM_SIZE] != 0 else a[NUM_THREADS]
        for number in range(a[NUM_OPERATIONS]):
            entry = a[TABLE] + 16 * number
            _call_worker(simd.load_int(entry), simd.load_int(entry + 8))
            simd.fetch_add(a[ARRIVED], 1)
            turns = 0
            while _load_shared(a[ARRIVED]) < (number + 1) * num_threads:
                _pause()
                turns += 1
                if turns % PATIENCE == 0:
                    _call_for_number(a[GIVE_WAY])

    return worker


@functools.cache
def _compile_wires() -> Any:
    """Copies numbers to arguments. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker
    def worker(arguments: Any) -> None:
        a = carray(arguments, 4)
        if digest == 0:
            return
        for wire in range(a[1]):
            end = a[0] + 16 * wire
            simd.store_int(simd.load_int(end), simd.load_int(a[2] + simd.load_int(end + 8)))

    return worker


# -------------------------------------------------------------------------------------- threads


def _run_in_threads(call: Callable[[int], None], worker: int, arguments: int) -> None:
    """A worker, once in each of torch's threads.

    torch's own threads are used where torch brings GNU's OpenMP: a second pool beside it would compete with it,
    since threads that wait for work spin for a while. Elsewhere plain threads, woken for each call.
    """
    num_threads, openmp = torch.get_num_threads(), _gnu_openmp()
    if openmp is not None:
        openmp.GOMP_parallel(worker, arguments, num_threads, 0)
        return
    gate = threading.Barrier(num_threads)  # workers wait for each other: all begin, or none

    def run() -> None:
        gate.wait()
        call(arguments)

    with _POOL:
        waiting: list[Future[None]] = []
        try:
            while len(waiting) < num_threads:
                waiting.append(_pool(num_threads).submit(run))
        except BaseException:  # an interrupt, or a thread that could not be started
            gate.abort()
            raise
        for one in waiting:
            one.result()


_POOL = threading.Lock()
"""Threads of two programs that share a pool would wait for each other."""


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


@functools.cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """GNU OpenMP, the copy that torch has loaded; None if torch has another OpenMP."""
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*")):
        try:
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            _ = library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        return library
    return None


def _address_of(function: Any) -> int:
    """Of a C function's machine code."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
