"""Compiled functions, run by one thread or by all of torch's together.

Knows addresses and threads; knows nothing of what is computed.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from numba import cfunc, types

native_worker = cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")
"""Compiles `worker(arguments)`, what each thread runs, given an array of int64; once per machine.

A worker mentions `source_digest()`, so that it is compiled anew when another file that takes part in it has changed.
"""


class Team:
    """Runs a worker. One thread at a time may ask.

    torch's own threads are used where torch brings GNU's OpenMP: a second pool beside it would compete with it,
    since threads that wait for work spin for a while. Elsewhere plain threads, woken for each call.
    """

    def __init__(self, worker: Any) -> None:
        """`worker`: what `native_worker` has made."""
        self._worker = worker  # keeps the machine code
        self._address: int = worker.address
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)
        self._parallel = _gnu_parallel()
        self._pool: ThreadPoolExecutor | None = None

    def run_alone(self, arguments: int) -> None:
        """In the calling thread."""
        self._call(arguments)

    def run(self, arguments: int) -> None:
        """Once in each of torch's threads; returns when all have returned."""
        num_threads = torch.get_num_threads()
        if num_threads == 1:
            self._call(arguments)
        elif self._parallel is not None:
            self._parallel(self._address, arguments, num_threads, 0)
        else:
            self._pool = self._pool or ThreadPoolExecutor(num_threads)
            waiting = [self._pool.submit(self._call, arguments) for _ in range(num_threads - 1)]
            self._call(arguments)
            for one in waiting:
                one.result()


@functools.cache
def _gnu_parallel() -> ctypes._NamedFuncPointer | None:
    """GNU OpenMP's entry point in the copy that torch has loaded; None if torch has another OpenMP."""
    for path in glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*")):
        try:
            function = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None
