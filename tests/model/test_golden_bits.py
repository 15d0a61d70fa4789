"""The bits of kernels, committed: whoever changes them has to raise `ARITHMETIC_VERSION`.

    floats, widened    sums in an order that the kernel spells out, in fused multiply-adds: the same on every processor
                       that has these, however wide its vectors are
    pairs, tiles       only where the processor has them
    reference          torch's own products and exponentials: one digest for each kind of processor and torch

Inputs come from raw bits of PCG64, whose stream numpy promises to keep; its distributions are not promised.
A digest that nobody has committed yet is a skip that shows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from foreword.kernels.cpu.attention import CpuAttention, fastest_mode
from foreword.kernels.cpu.layout import FLOATS, PAIRS, TILES, WIDENED
from foreword.kernels.llvm.emit import HAS_BF16_DOT
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.select import AttentionKernel, ReferenceAttention
from foreword.model.identity import ARITHMETIC_VERSION
from paged_case import Case, Shape

SPANS = [(0, 300), (511, 512), (40, 41), (200, 300), (3, 20)]
OPTIONS = {
    "plain": AttentionOptions(0.125),
    "window and cap": AttentionOptions(0.125, sliding_window=100, softcap=5.0),
}
REFERENCE = f"reference on {llvm.get_host_cpu_name()} with torch {torch.__version__.partition('+')[0]}"
GOLDEN: Mapping[int, Mapping[str, str]] = {
    1: {
        "floats": "969c6f1804a76490ac62d0519e514f9c13475a55fb51d1c13ab3875cb16da37d",
        "widened": "3fda870be399190561f57eb2475b83eca864a61e151b5fb3a45f3e6e7a43bb43",
        "reference on znver3 with torch 2.13.0": (
            "5f14240be6bdd647ea65c7c12ae3247685543c66f4d667b23bf906438520fab9"
            "b0986d0faf317d53055e631e179776d8c33fe9d54bb9257eeffed32e9464913e"
        ),
    },
}
"""Version of the arithmetic -> what computes -> digest."""


class RawBits(np.random.Generator):
    """Numbers made of raw bits alone, equal with every version of numpy and every library below it."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(17))

    def standard_normal(self, size: Any = None, *_: Any, **__: Any) -> Any:
        """Multiples of 2**-12 from -4 to 4, which float32 holds."""
        raw = self.bit_generator.random_raw(int(np.prod(size)))
        return ((raw >> 49).astype(np.float64) * 2.0**-12 - 4.0).reshape(size)

    def permutation(self, x: Any, axis: int = 0) -> Any:
        return np.argsort(self.bit_generator.random_raw(int(x)), kind="stable")

    def integers(self, low: Any, high: Any = None, size: Any = None, *_: Any, **__: Any) -> Any:
        raw = self.bit_generator.random_raw(int(np.prod(size)))
        return (low + (raw >> 33).astype(np.int64) % (high - low)).reshape(size)


def digest(kernel: AttentionKernel, dtype: torch.dtype) -> str:
    """Of what a kernel makes of both options' cases."""
    found = hashlib.sha256()
    for options in OPTIONS.values():
        case = Case(Shape(6, 2, 64, 64, 16, dtype), SPANS, RawBits())
        found.update(case.run(kernel, options).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def found_by(name: str) -> str:
    if name == REFERENCE:
        return digest(ReferenceAttention(), torch.float32) + digest(ReferenceAttention(), torch.bfloat16)
    mode = {"floats": FLOATS, "widened": WIDENED, "pairs": PAIRS, "tiles": TILES}[name]
    if mode == FLOATS:
        return digest(CpuAttention(), torch.float32)
    return digest(CpuAttention(bfloat16=mode), torch.bfloat16)


@pytest.mark.parametrize("name", ["floats", "widened", "pairs", "tiles", REFERENCE])
def test_kernels_have_the_bits_of_their_version(name: str) -> None:
    if name == "pairs" and not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    if name == "tiles" and fastest_mode() != TILES:
        pytest.skip("this processor has no tiles")
    assert ARITHMETIC_VERSION in GOLDEN, "commit the digests of the new ARITHMETIC_VERSION here"
    golden, found = GOLDEN[ARITHMETIC_VERSION].get(name), found_by(name)
    if golden is None:
        pytest.skip(f"no digest of {name!r} is committed yet; it is {found}")
    assert found == golden, (
        f"the bits of {name!r} have changed: raise ARITHMETIC_VERSION in foreword/model/identity.py, so that caches of "
        f"the old bits are not read, and commit {found} for the new version"
    )


def test_the_digest_sees_one_bit() -> None:
    class OneBitOff(ReferenceAttention):
        def attend(self, *arguments: Any) -> torch.Tensor:
            output = super().attend(*arguments)
            output.view(torch.int32)[7, 1, 3] ^= 1
            return output

    assert digest(OneBitOff(), torch.float32) != digest(ReferenceAttention(), torch.float32)
