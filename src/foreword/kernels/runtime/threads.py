"""Compiled functions that run in one thread or in all of torch's threads, one by one or as a program.

Torch's threads are OpenMP's. This module also sets their number, and how they wait and share processors with others.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
import os
import platform
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from foreword.batch import Int64Array
from foreword.config import has_thread_count, has_wait_policy
from foreword.config.processors import read_processors
from foreword.kernels.llvm import emit, simd
from foreword.kernels.runtime.compiled import Record, Worker, compiled, record, view, worker

PROGRAM = record(
    "operations",  # address of an array of OPERATION
    "num_operations",
    "team_size",  # address of the function that returns the number of threads; 0: use `num_threads`
    "num_threads",
    "give_way",  # address of the function that lets other threads run
    "system_call",  # address of the function that asks Linux to let a thread sleep or wake; 0: threads never sleep
    "counters",  # two counts: of operations that threads have ended, and of threads that sleep
)
OPERATION = record("worker", "arguments")
"""Addresses of a worker and of its arguments."""
WIRING = record("wires", "num_wires", "numbers", "counters")
WIRE = record("target", "offset")
"""The address of an argument, and the offset in bytes at which the array of numbers has the argument's number."""

Own = TypeVar("Own", bound="Operation")
COUNTERS = 32
"""The number of int64 counters of an operation; three are in use, each in its own cache line."""
PATIENCE = 256
"""The number of checks after which a waiting thread lets other threads run."""
SLEEPLESS = 16
"""The number of times that a waiting thread lets others run before it sleeps: about 0.1 ms. Most waits are shorter."""
SLEEPERS = 64
"""The offset in bytes, from the first counter, of the number of threads that sleep."""
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
"""Linux' number of the call that lets a thread sleep until a number in memory changes; 0: unknown."""
FUTEX_WAIT, FUTEX_WAKE = 128, 129
"""Operations of the FUTEX call, for the threads of this process alone."""


class Operation:
    """A worker and its arguments, one of which is called `counters`. One thread at a time may set and run it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.arguments: Record = np.zeros((), worker.record)
        self.address: int = self.arguments.ctypes.data
        """Address of the arguments."""
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(worker.address)
        self.count_in(np.zeros(COUNTERS, np.int64))

    def count_in(self, counters: Int64Array) -> None:
        """Use other counters [COUNTERS], which the worker's threads share and which begin at 0."""
        self._counters = counters
        self.arguments["counters"] = counters.ctypes.data

    def run(self, *, alone: bool = False) -> None:
        """Run once in each of torch's threads, or `alone` in the calling thread; return after all have returned."""
        self._counters[:] = 0
        if alone or torch.get_num_threads() == 1:
            self._call(self.address)
        else:
            _run_in_threads(self._call, self.worker.address, self.address)


class OfThread(threading.local, Generic[Own]):
    """Gives each thread an operation of its own, which is made when the thread first asks for it."""

    def __init__(self, make: Callable[[], Own]) -> None:
        self.operation = make()


class Program:
    """Operations that all threads run in order. An operation begins when all threads have ended the one before it.

    From one operation to the next, threads wait for each other for less than a microsecond; a new call from Python
    would take about thirty microseconds. A thread that waits longer sleeps, because the thread that it waits for may
    need its processor. An operation uses the
    counters of the last program that was made with it.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations
        self._table = np.array([(operation.worker.address, operation.address) for operation in operations], OPERATION)
        self._counters = np.zeros((len(operations), COUNTERS), np.int64)
        for operation, counters in zip(operations, self._counters, strict=True):
            operation.count_in(counters)
        self._whole = Operation(_run_program)
        a, openmp = self._whole.arguments, gnu_openmp()
        a["operations"], a["num_operations"] = self._table.ctypes.data, len(operations)
        a["team_size"] = 0 if openmp is None else address_of(openmp.omp_get_num_threads)
        a["give_way"] = address_of(ctypes.CDLL(None).sched_yield)
        a["system_call"] = address_of(ctypes.CDLL(None).syscall) if FUTEX else 0

    def run(self, number: int | None = None) -> None:
        """Run all operations, or the first `number`, with their present arguments."""
        a = self._whole.arguments
        a["num_threads"] = torch.get_num_threads()
        a["num_operations"] = len(self.operations) if number is None else number
        self._counters[:] = 0
        self._whole.run()


class Wires:
    """Copies numbers from one array to arguments of many operations, in one compiled call for all layers of a model."""

    def __init__(self, wires: Sequence[tuple[Operation, str, int]]) -> None:
        """Each of `wires`: an operation, the name of an argument, and the index of the number in the array."""
        self._operations = [operation for operation, _, _ in wires]
        places = [(owner.address + owner.worker.offset(argument), 8 * number) for owner, argument, number in wires]
        self._wires = np.array(places, WIRE)
        self._carry = Operation(_carry_numbers)
        self._carry.arguments["wires"] = self._wires.ctypes.data
        self._carry.arguments["num_wires"] = len(self._wires)

    def carry(self, numbers: Int64Array) -> None:
        """Set the arguments from `numbers`, an array without gaps."""
        self._carry.arguments["numbers"] = numbers.ctypes.data
        self._carry.run(alone=True)


# -------------------------------------------------------------------------------------- compiled


@emit.instructions("a", types.intp)
def _load_shared(builder: Any, address: Any) -> Any:
    """Read a 64-bit integer that threads change. The threads' earlier writes to memory are visible afterwards."""
    return builder.load_atomic(builder.inttoptr(address, emit.I64.as_pointer()), "acquire", 8)


@emit.instructions("aa")
def _call_worker(builder: Any, function: Any, arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [emit.I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments])


@emit.instructions("a", types.intp)
def _call_for_number(builder: Any, function: Any) -> Any:
    """Call a C function without arguments that returns an int."""
    kind = ir.FunctionType(emit.I32, [])
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), []), emit.I64)


@emit.instructions("aaaii", types.intp)
def _call_system(builder: Any, function: Any, call: Any, address: Any, what: Any, number: Any) -> Any:
    """Make a FUTEX call without a time limit.

    `what` is FUTEX_WAIT (sleep while the number at `address` is `number`) or FUTEX_WAKE (wake up to `number` threads).
    """
    kind = ir.FunctionType(emit.I64, [emit.I64] * 5)
    none = ir.Constant(emit.I64, 0)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), [call, address, what, number, none])


@emit.instructions("")
def _pause(builder: Any) -> None:
    """Tell the processor that this thread waits."""
    if platform.machine() in ("x86_64", "AMD64"):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])


_operation_at, _wire_at = view(OPERATION), view(WIRE)


@compiled
def _wait(a: Any, last: int) -> None:
    """Wait until threads have ended `last` operations, summed over all threads. First spin, then sleep."""
    turns, ended = 0, _load_shared(a.counters)
    while ended < last and (turns < SLEEPLESS * PATIENCE or a.system_call == 0):
        _pause()
        turns += 1
        if turns % PATIENCE == 0:
            _call_for_number(a.give_way)
        ended = _load_shared(a.counters)
    if ended < last:
        simd.fetch_add(a.counters + SLEEPERS, 1)  # before the count is read again, so that the last thread sees it
        ended = simd.fetch_add(a.counters, 0)
        while ended < last:
            _call_system(a.system_call, FUTEX, a.counters, FUTEX_WAIT, ended)  # returns at once if the count changed
            ended = _load_shared(a.counters)
        simd.fetch_add(a.counters + SLEEPERS, -1)


@worker(PROGRAM)
def _run_program(arguments: Any) -> None:
    """Run the operations of a program, in each of its threads."""
    a = carray(arguments, 1)[0]
    num_threads = _call_for_number(a.team_size) if a.team_size != 0 else a.num_threads
    for number in range(a.num_operations):
        operation = _operation_at(a.operations, number)
        _call_worker(operation.worker, operation.arguments)
        last = (number + 1) * num_threads
        if simd.fetch_add(a.counters, 1) + 1 < last:
            _wait(a, last)
        elif a.system_call != 0 and simd.fetch_add(a.counters + SLEEPERS, 0) > 0:
            _call_system(a.system_call, FUTEX, a.counters, FUTEX_WAKE, num_threads)


@worker(WIRING)
def _carry_numbers(arguments: Any) -> None:
    """Copy numbers to arguments."""
    a = carray(arguments, 1)[0]
    for number in range(a.num_wires):
        wire = _wire_at(a.wires, number)
        simd.store_int(wire.target, simd.load_int(a.numbers + wire.offset))


# -------------------------------------------------------------------------------------- threads


def _run_in_threads(call: Callable[[int], None], worker: int, arguments: int) -> None:
    """Run a worker once in each of torch's threads.

    If torch brings GNU's OpenMP, OpenMP's own threads run the worker. A second pool would compete with these threads,
    since they spin for a while when they wait for work. Otherwise plain threads run the worker, and are woken for each
    call.
    """
    num_threads, openmp = torch.get_num_threads(), gnu_openmp()
    if openmp is not None:
        openmp.GOMP_parallel(worker, arguments, num_threads, 0)
        return
    gate = threading.Barrier(num_threads)  # threads wait for each other: all begin, or no thread does

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
        for future in waiting:
            future.result()


_POOL = threading.Lock()
"""Held while a program runs in the pool: threads of two programs in the pool would wait for each other."""


@functools.cache
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)


logger = logging.getLogger(__name__)

TURN_NS = 300_000
"""Nanoseconds after which another program may have a thread's processor; Linux chooses 1.4 ms or more."""
MOST_IDLE = 64
"""With more processors, no team of idle threads is started, because containers limit the number of threads."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""Linux' sched_attr: size, policy, flags, nice, priority, runtime (here: the time slice), deadline, period."""
_GET_AND_SET = {"x86_64": (315, 314), "aarch64": (275, 274)}.get(platform.machine() if sys.platform == "linux" else "")
"""Linux' numbers of the calls sched_getattr and sched_setattr."""


def prepare_threads(num_threads: int | None) -> None:
    """Set the number of threads for numerical code, let these threads sleep while they wait, and log the number.

    None: OMP_NUM_THREADS or MKL_NUM_THREADS if one is set. Otherwise the number of processors that the affinity allows,
    at most the cgroup's quota.
    """
    processors = read_processors()
    if num_threads is None and processors.quota is not None and not has_thread_count():
        num_threads = min(torch.get_num_threads(), processors.usable)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if not has_wait_policy() and not _rest():
        logger.warning(
            "torch was imported before foreword, so its threads spin while they wait, which makes answers many times "
            "slower beside other programs; set OMP_WAIT_POLICY=PASSIVE, or import foreword before torch"
        )
    take_short_turns()
    logger.info("%d threads compute; this process may use %s", torch.get_num_threads(), processors)


@functools.cache
def _rest() -> bool:
    """Let the threads of an OpenMP that is already loaded sleep while they wait; return whether that is possible.

    GNU's OpenMP reads only once how long threads spin before they sleep: 300,000 turns, many milliseconds. If there are
    more threads than processors, threads spin for only 100 turns. So this function starts a team with one thread more
    than there are processors, and the team sleeps forever.
    """
    openmp = gnu_openmp()
    if openmp is None or openmp.omp_get_num_procs() > MOST_IDLE:
        return False  # a system that gives fewer threads would end the process
    begun, never = threading.Event(), threading.Event()

    def hold() -> None:
        openmp.GOMP_parallel(address_of(ctypes.CDLL(None).getpid), None, openmp.omp_get_num_procs() + 1, 0)
        begun.set()
        never.wait()  # the team belongs to this thread, and ends with it

    threading.Thread(target=hold, name="foreword-idle-team", daemon=True).start()
    begun.wait()
    return True


def take_short_turns() -> None:
    """Ask Linux (6.12 and newer) for short time slices, for this process's threads and those that they will start.

    Threads that compute together wait for each other hundreds of times in a step. If other programs run too, they often
    wait for a thread that is not running. With the usual time slices of 1.4 to 3 ms, such waits are most of a step.
    Short slices give no larger share of a processor: a thread that has slept gets its share sooner, and loses the
    processor sooner.
    """
    if _GET_AND_SET is None:
        return
    get, set_ = _GET_AND_SET
    call = ctypes.CDLL(None).syscall
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    with suppress(OSError):
        for thread in map(int, os.listdir("/proc/self/task")):
            if call(get, thread, attributes, _ATTRIBUTES.size, 0):
                continue  # it has ended
            size, policy, flags, nice, priority, _, *times = _ATTRIBUTES.unpack(attributes.raw)
            if policy in (os.SCHED_OTHER, os.SCHED_BATCH):
                call(set_, thread, _ATTRIBUTES.pack(size, policy, flags, nice, priority, TURN_NS, *times), 0)


@functools.cache
def gnu_openmp() -> ctypes.CDLL | None:
    """The copy of GNU's OpenMP that torch has loaded; None if torch has another OpenMP."""
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*")):
        try:
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
            _ = library.omp_get_num_threads, library.omp_get_num_procs
        except (OSError, AttributeError):
            continue
        return library
    return None


def address_of(function: Any) -> int:
    """Address of a C function's machine code."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
