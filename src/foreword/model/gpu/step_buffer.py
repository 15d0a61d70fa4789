"""The arrays of a step, packed on the host and copied to the device at once.

`put` returns a tensor before the copy, so a planner can use it immediately:

    put(array) -> tensor    put(array) -> tensor    ...    upload()      from here on the tensors hold the arrays
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.model.gpu.device import Device

ALIGNMENT = 16
"""Bytes; kernels read several numbers at once."""
FIRST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Part:
    """Host memory, as a tensor and as an array, and device memory."""

    host: Tensor
    bytes: npt.NDArray[np.uint8]
    device: Tensor


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class StepBuffer:
    """Host memory and its twin on the device. Tensors from `put` are valid until the next `begin`.

    Host memory must not change while it is copied: call `begin` only when the device is done with the previous step.
    """

    def __init__(self, device: Device, num_bytes: int = FIRST_BYTES) -> None:
        self._device = device
        self.num_uploads = 0
        """The number of copies from host to device so far."""
        self._parts: list[_Part] = []
        """More than one only in a step that needs more than any step before."""
        self._used: list[int] = []
        self._grow(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the current step so far."""
        return sum(self._used)

    def begin(self) -> None:
        """Start a new step."""
        if len(self._parts) > 1:  # one part that is large enough for such a step
            total = sum(len(part.bytes) for part in self._parts)
            self._parts.clear()
            self._used.clear()
            self._grow(total)
        self._used[0] = 0

    def put(self, array: npt.NDArray[Any]) -> Tensor:
        """Pack an array; returns a tensor on the device that holds it after `upload`."""
        dtype = _torch_dtype(array.dtype)
        if not array.size:
            return torch.empty(array.shape, dtype=dtype, device=self._device.torch_device)
        if self._used[-1] + array.nbytes > len(self._parts[-1].bytes):
            self._grow(max(array.nbytes, 2 * len(self._parts[-1].bytes)))
        part, start = self._parts[-1], self._used[-1]
        end = start + array.nbytes
        np.copyto(part.bytes[start:end].view(array.dtype).reshape(array.shape), array)
        self._used[-1] = -(-end // ALIGNMENT) * ALIGNMENT
        return part.device[start:end].view(dtype).view(array.shape)

    def upload(self) -> None:
        """Queue the copy of everything that was packed."""
        for part, used in zip(self._parts, self._used, strict=True):
            if used:
                self._device.copy(part.device[:used], part.host[:used])
                self.num_uploads += 1

    def _grow(self, num_bytes: int) -> None:
        num_bytes = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        host = self._device.host_buffer(num_bytes)
        self._parts.append(_Part(host, host.numpy(), device))
        self._used.append(0)
