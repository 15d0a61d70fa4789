"""The arrays of a step on their way to the device: they arrive whole, in one copy where one can hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fake_device import FakeDevice
from foreword.model.gpu.runner import StepBuffer

DTYPES = (np.int32, np.int64, np.float32, np.bool_)


def some_arrays(rng: np.random.Generator, num_bytes: int) -> list[npt.NDArray[Any]]:
    """Arrays of every type and of odd sizes, one of them empty, that fill about so many bytes."""
    arrays: list[npt.NDArray[Any]] = [np.empty((2, 0), np.int32)]
    while sum(array.nbytes for array in arrays) < num_bytes:
        shape = tuple(rng.integers(1, 9, int(rng.integers(1, 3))))
        arrays.append(rng.integers(0, 2**20, shape).astype(DTYPES[len(arrays) % len(DTYPES)]))
    return arrays


def step(buffer: StepBuffer, device: FakeDevice, arrays: list[npt.NDArray[Any]]) -> int:
    """Bring the arrays to the device and compare; the number of copies that this took."""
    before = device.num_copies_in
    buffer.begin()
    tensors = [buffer.put(array) for array in arrays]
    buffer.upload()
    device.mark().synchronize()
    for tensor, array in zip(tensors, arrays, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    return device.num_copies_in - before


@pytest.mark.parametrize("seed", range(5))
def test_a_step_that_outgrows_the_buffer_takes_more_copies_and_the_next_again_one(seed: int) -> None:
    rng, device = np.random.default_rng(seed), FakeDevice()
    buffer = StepBuffer(device, 1024)
    assert step(buffer, device, some_arrays(rng, 500)) == 1
    assert step(buffer, device, some_arrays(rng, 5000)) > 1
    for num_bytes in (3000, 100, 3500):
        assert step(buffer, device, some_arrays(rng, num_bytes)) == 1


def test_an_array_larger_than_all_of_the_buffer_arrives() -> None:
    device = FakeDevice()
    assert step(StepBuffer(device, 64), device, [np.arange(7), np.arange(10_000), np.arange(3)]) > 1


def test_a_step_without_arrays_takes_no_copy() -> None:
    device = FakeDevice()
    assert step(StepBuffer(device), device, []) == 0
