"""Matrix products for Triton's interpreter in which a row does not depend on the rows beside it.

The interpreter multiplies with numpy, whose BLAS gives a row other bits for other numbers of rows on some processors.
A GPU's instructions do not, and the kernels' tests are about the kernels, so here each element is a sum in one order.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray
from triton.runtime import interpreter

Floats = NDArray[np.float32]


@numba.njit("float32[:, ::1](float32[:, ::1], float32[:, ::1], float32[:, ::1])")
def add_product(left: Floats, right: Floats, total: Floats) -> Floats:
    """total + left x right, added along the inner dimension; without fastmath LLVM neither fuses nor reorders."""
    result = np.zeros_like(total)
    for row in range(left.shape[0]):
        for inner in range(left.shape[1]):
            for column in range(right.shape[1]):
                result[row, column] += left[row, inner] * right[inner, column]
    return result + total


def dot(self: Any, left: Any, right: Any, total: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
    operands = (np.ascontiguousarray(handle.data, np.float32) for handle in (left, right, total))
    return interpreter.TensorHandle(add_product(*operands), total.dtype.scalar)


def use_fixed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
