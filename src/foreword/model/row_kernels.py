"""Small operations on rows, compiled by numba: RMS norms, and the gate of a feed-forward network.

Knows rows of numbers as memory addresses; knows nothing of modules or models. As in `kernels/simd.py`, whose
building blocks these are, every operation and its order is spelt out: a row's bits depend on nothing but the row.
torch needs seven operations for such a norm and two for the gate, each with its own pass over memory, its own
hand-over to the threads, and for silu in bfloat16 about 2 ns per element.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, types
from torch import Tensor

from foreword.model.kernels import simd
from foreword.model.kernels.cpu_attention import Team
from foreword.model.kernels.cpu_layout import source_digest
from foreword.model.kernels.simd import I16S, I32S, LANES, LOG2_E

ALONE_ELEMENTS = 1 << 17
"""Work on fewer elements is done by the calling thread: waking the others takes longer."""
UNIT_ELEMENTS = 1 << 14
"""What a thread takes at a time."""
(X, Y, WEIGHT, TARGET, NUM_ROWS, WIDTH, X_BYTES, EPSILON, FORM, UNIT_ROWS, COUNTER, NUM_ARGUMENTS) = range(12)
"""int64 each: addresses, and sizes in elements; X_BYTES between rows of X, and of Y."""
ROUND_NORM, ADD_ONE, BFLOAT16 = 1, 2, 4
"""Bits of FORM: what is done with the normalised row before it is scaled, and the type of all numbers."""


def _load(builder: Any, address: Any, index: Any, to_bf16: bool) -> Any:
    at = builder.add(address, builder.mul(index, simd._int(2 if to_bf16 else 4)))
    return simd._widened(builder, simd._load(builder, at, 0, I16S)) if to_bf16 else simd._load(builder, at)


def _rounded(builder: Any, vector: Any) -> Any:
    """float32 as the bits of the nearest bfloat16, ties to even; what is not a number stays that."""
    bits = builder.bitcast(vector, I32S)

    def const(value: int) -> ir.Constant:
        return ir.Constant(I32S, [value] * LANES)

    odd = builder.and_(builder.lshr(bits, const(16)), const(1))
    nearest = builder.lshr(builder.add(bits, builder.add(odd, const(0x7FFF))), const(16))
    nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(nan, const(0x7FC0), nearest), I16S)


def _store(builder: Any, value: Any, address: Any, index: Any, to_bf16: bool) -> None:
    at = builder.add(address, builder.mul(index, simd._int(2 if to_bf16 else 4)))
    simd._store(builder, _rounded(builder, value) if to_bf16 else value, at)


def _norm(bf16: bool) -> Any:
    @simd._instructions("aaaifi")
    def norm(builder: Any, x: Any, weight: Any, target: Any, width: Any, epsilon: Any, form: Any) -> None:
        """One row divided by the root of its mean square and scaled by `weight`; `width` is whole vectors."""

        def square(index: Any, total: Any) -> list[Any]:
            value = _load(builder, x, index, bf16)
            return [simd._fma(builder, value, value, total)]

        (total,) = simd._loop(builder, simd._int(0), width, LANES, [simd._const(0.0)], square)
        total = simd._reduce(builder, total, builder.fadd)
        mean = builder.fdiv(total, simd._splat(builder, builder.sitofp(width, simd.F32)))
        root = simd._call(builder, "llvm.sqrt.v16f32", builder.fadd(mean, simd._splat(builder, epsilon)))
        factor = builder.fdiv(simd._const(1.0), root)
        rounds = builder.icmp_signed("!=", builder.and_(form, simd._int(ROUND_NORM)), simd._int(0))
        adds = builder.icmp_signed("!=", builder.and_(form, simd._int(ADD_ONE)), simd._int(0))
        offset = builder.select(adds, simd._const(1.0), simd._const(0.0))

        def scale(index: Any) -> list[Any]:
            value = builder.fmul(_load(builder, x, index, bf16), factor)
            if bf16:
                value = builder.select(rounds, simd._widened(builder, _rounded(builder, value)), value)
            scales = builder.fadd(_load(builder, weight, index, bf16), offset)
            _store(builder, builder.fmul(value, scales), target, index, bf16)
            return []

        simd._loop(builder, simd._int(0), width, LANES, [], scale)

    return norm


def _gate(bf16: bool) -> Any:
    @simd._instructions("aaai")
    def gate(builder: Any, x: Any, y: Any, target: Any, width: Any) -> None:
        """silu(x) * y of one row; silu is rounded as if it were written to memory, `width` is whole vectors."""

        def body(index: Any) -> list[Any]:
            value = _load(builder, x, index, bf16)
            size = simd._call(builder, "llvm.fabs.v16f32", value)
            tail = simd._exp2(builder, builder.fmul(size, simd._const(-LOG2_E)))  # exp(-|x|)
            share = builder.fdiv(simd._const(1.0), builder.fadd(simd._const(1.0), tail))
            negative = builder.fcmp_ordered("<", value, simd._const(0.0))
            share = builder.select(negative, builder.fmul(tail, share), share)
            silu = builder.fmul(value, share)
            if bf16:
                silu = simd._widened(builder, _rounded(builder, silu))
            _store(builder, builder.fmul(silu, _load(builder, y, index, bf16)), target, index, bf16)
            return []

        simd._loop(builder, simd._int(0), width, LANES, [], body)

    return gate


_norm_bf16, _norm_f32, _gate_bf16, _gate_f32 = _norm(True), _norm(False), _gate(True), _gate(False)


@functools.cache
def _compile_worker() -> Any:
    """What each thread of a team runs: units of rows until none are left. Compiled once per machine and kept."""
    digest = source_digest()

    @cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")  # type: ignore[untyped-decorator]
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        size = 2 if a[FORM] & BFLOAT16 else 4
        epsilon = simd.load_float(a[EPSILON])
        while True:
            first = simd.fetch_add(a[COUNTER], a[UNIT_ROWS])
            if first >= a[NUM_ROWS]:
                return
            for row in range(first, min(first + a[UNIT_ROWS], a[NUM_ROWS])):
                x, target = a[X] + row * a[X_BYTES], a[TARGET] + row * a[WIDTH] * size
                if a[Y]:
                    y = a[Y] + row * a[X_BYTES]
                    if size == 2:
                        _gate_bf16(x, y, target, a[WIDTH])
                    else:
                        _gate_f32(x, y, target, a[WIDTH])
                elif size == 2:
                    _norm_bf16(x, a[WEIGHT], target, a[WIDTH], epsilon, a[FORM])
                else:
                    _norm_f32(x, a[WEIGHT], target, a[WIDTH], epsilon, a[FORM])

    return worker


class RowKernels:
    """The operations on tensors. One thread at a time."""

    def __init__(self) -> None:
        self._worker = _compile_worker()
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._worker.address)
        self._team = Team()
        self._arguments = np.zeros(NUM_ARGUMENTS + 2, np.int64)  # the last two: the counter and epsilon
        self._epsilon = self._arguments[-1:].view(np.float32)
        address = self._arguments.ctypes.data
        self._arguments[COUNTER] = address + 8 * NUM_ARGUMENTS
        self._arguments[EPSILON] = address + 8 * (NUM_ARGUMENTS + 1)
        self._address = address

    @staticmethod
    def can_take(width: int, dtype: torch.dtype) -> bool:
        """Whether rows of this width and type are whole vectors of a known type."""
        return width % LANES == 0 and dtype in (torch.bfloat16, torch.float32)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float, form: int) -> Tensor:
        """Norm over the last size of `x` [..., width], scaled by `weight` [width]; `form`: ROUND_NORM, ADD_ONE."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._epsilon[0] = epsilon
        self._run((x.data_ptr(), 0, weight.data_ptr(), output.data_ptr()), output, x.shape[-1], form)
        return output

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(g) * u of `gate_up` [..., 2 * width], whose rows are g and u end to end; [..., width]."""
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], width)
        up = gate_up.data_ptr() + width * gate_up.element_size()
        self._run((gate_up.data_ptr(), up, 0, output.data_ptr()), output, 2 * width, 0)
        return output

    def _run(self, addresses: tuple[int, int, int, int], output: Tensor, x_width: int, form: int) -> None:
        width, size = output.shape[-1], output.element_size()
        a = self._arguments
        a[: TARGET + 1] = addresses
        a[NUM_ROWS], a[WIDTH], a[X_BYTES] = output.numel() // width, width, x_width * size
        a[FORM], a[UNIT_ROWS] = form | (BFLOAT16 if size == 2 else 0), max(1, UNIT_ELEMENTS // width)
        a[NUM_ARGUMENTS] = 0  # the counter
        if output.numel() <= ALONE_ELEMENTS:
            self._call(self._address)
        else:
            self._team.run(self._worker.address, self._address)
