"""The accelerator as the runner needs it, and CUDA as its one implementation.

Tests implement the same protocol with graphs that record and replay what torch computes on the CPU
(tests/fake_device.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory at one moment, in bytes."""

    total: int
    free: int
    """Bytes that no program has taken."""
    reserved: int
    """Bytes that this program has taken, in use or kept for reuse."""
    peak: int
    """The largest `reserved` since `watch_peak`."""


class Event(Protocol):
    """A point in the queue of the device's work."""

    def query(self) -> bool:
        """Whether the device has passed this point."""

    def synchronize(self) -> None:
        """Return when the device has passed this point of its queue."""


class Graph(Protocol):
    """Recorded work: the same operations on the same memory, without the host."""

    def replay(self) -> None:
        """Queue the work; returns at once."""


class Device(Protocol):
    """An accelerator that works through a queue while the host goes on."""

    @property
    def torch_device(self) -> torch.device:
        """The device of its tensors."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Host memory [num_bytes] uint8 that the device can copy from and to while the host goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between a `host_buffer` and the device. Until it is done, the host's side must not change."""

    def mark(self) -> Event:
        """Return an event that happens when all work queued so far has ended."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, then record it. `work` must neither read results nor depend on the host's memory.

        All graphs of a device share memory for intermediate results, so they run one at a time.
        Raises RuntimeError if the work cannot be recorded.
        """

    def memory(self) -> DeviceMemory:
        """Measure now, after all queued work is done."""

    def watch_peak(self) -> None:
        """Start to track the peak of `memory`, after returning memory that was kept for reuse."""


class CudaDevice:
    """One CUDA device; its current stream is the queue."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event  # type: ignore[no-any-return]

    def capture(self, work: Callable[[], None]) -> Graph:
        # The first run, on a separate stream, initialises libraries and compiles kernels.
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        torch.cuda.synchronize(self._device)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph

    def memory(self) -> DeviceMemory:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return DeviceMemory(total, free, reserved, torch.cuda.max_memory_reserved(self._device))

    def watch_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
