"""The one owner of compiled code: the decorators that numba compiles with, records in memory, and the cache on disk.

There are four kinds of compiled functions:

    compiled          part of a kernel, compiled once for all its callers
    inlined           part of a kernel with one caller, compiled into the caller, so that numba optimises it only once
    cached()          called from Python; its machine code is kept on disk
    worker(RECORD)    called by address with a record of arguments; its machine code is kept on disk

numba keeps machine code beside a source file and compares the date of that file alone. Here the key also has a digest
of all files that a kernel can inline, so editing any of them compiles the function again. Where neither the package nor
the home directory can be written, each process compiles for itself.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import from_dtype, njit, types
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys
from numba.extending import intrinsic

from foreword.kernels.llvm.tiles import has_tiles

logger = logging.getLogger(__name__)

Record = npt.NDArray[np.void]
"""One record, as an array without dimensions."""

compiled = njit(error_model="numpy")
inlined = njit(error_model="numpy", inline="always")


def cached(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator like `numba.njit(**options)` whose machine code is kept on disk, if it can be."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        dispatcher._cache = _cache_of(function)
        return dispatcher

    return decorate


class Worker:
    """A C function that takes the address of a record. It is compiled when `address` is first read."""

    def __init__(self, function: Callable[..., None], record: np.dtype[np.void], signature: Any) -> None:
        self._function, self.record, self._signature = function, record, signature

    @functools.cached_property
    def function(self) -> Any:
        """The compiled function, which owns the machine code."""
        result: Any = CFunc(self._function, self._signature, locals={}, options={"error_model": "numpy"})
        result._cache = _cache_of(self._function)
        result.compile()
        return result

    @functools.cached_property
    def address(self) -> int:
        """Address of the machine code."""
        return int(self.function.address)

    def offset(self, argument: str) -> int:
        """The bytes from the record's address to the field `argument`."""
        assert self.record.fields is not None
        return self.record.fields[argument][1]


def worker(record: np.dtype[np.void], num_integers: int = 0) -> Callable[[Callable[..., None]], Worker]:
    """A decorator for `function(arguments, *integers)`, with `num_integers` integers after the record.

    `arguments` points to the record: `carray(arguments, 1)[0]` is the record itself.
    """
    signature: Any = (types.CPointer(from_dtype(record)), *[types.intp] * num_integers), types.void

    return lambda function: Worker(function, record, signature)


def view(record: np.dtype[np.void]) -> Any:
    """Make a numba function `at(address, index)`, which returns record number `index` of an array at `address`."""
    kind = from_dtype(record)

    @intrinsic
    def at(_context: Any, _address: Any, _index: Any) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            address, index = arguments
            offset = builder.mul(index, index.type(record.itemsize))
            return builder.inttoptr(builder.add(address, offset), context.get_value_type(kind))

        return kind(types.intp, types.intp), codegen

    return at


def record(*integers: str, **others: type[np.generic]) -> np.dtype[np.void]:
    """A record: 64-bit integers (addresses, counts, sizes in bytes), and then fields of other types by name."""
    fields = [(name, np.int64) for name in integers]
    return np.dtype([*fields, *others.items()], align=True)


# ------------------------------------------------------------------------------------------ on disk


class _Cache(FunctionCache):
    """numba's cache of one function, with the digest in its key. A file that cannot be read or written is no error."""

    def _index_key(self, *arguments: Any) -> Any:
        return (*super()._index_key(*arguments), source_digest())

    def load_overload(self, signature: Any, context: Any) -> Any:
        """Load kept code without the registries of types and functions, which numba fills again when it compiles."""
        try:
            rtsys.initialize(context)  # the symbols that kept code refers to
            return self._load_overload(signature, context)
        except Exception as error:  # unpickling a damaged file raises anything
            logger.info("compiling %s again, since its kept code cannot be read: %r", self._name, error)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, *arguments: Any) -> None:
        with suppress(OSError):
            super().save_overload(*arguments)


def _cache_of(function: Callable[..., Any]) -> _Cache | NullCache:
    try:
        return _Cache(function)
    except RuntimeError:  # numba found no place that it can write to
        _warn_once()
        return NullCache()


@functools.cache
def _warn_once() -> None:
    logger.warning(
        "compiled kernels cannot be kept, since neither the package's folder nor the home directory can be written; "
        "each start compiles them again, for about a minute; let NUMBA_CACHE_DIR name a folder that can be written"
    )


@functools.cache
def source_digest() -> str:
    """A text that changes with each file that a kernel can inline, and with the result of `has_tiles`.

    Triton's files do not count, because Triton compiles them itself.
    """
    kernels = Path(__file__).parents[1]
    digest = hashlib.sha256(bytes([has_tiles()]))
    for path in sorted(kernels.rglob("*.py")):
        if "triton" not in path.relative_to(kernels).parts:
            digest.update(path.read_bytes())
    return digest.hexdigest()
