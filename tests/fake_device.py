"""An accelerator's interface over the CPU: what CUDA records and replays as kernels, this one does as torch operations.

A graph holds the operations that ran while it was captured, with the very tensors that they read and wrote. Replaying
it runs them again and writes their results into the same memory, so that a graph sees what lies at its addresses and
nothing else: neither the arrays of the host nor what Python would decide anew. Reading a number from the device while
capturing fails, as it does on CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foreword.model.gpu.device import DeviceMemory

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
)
"""What makes a host wait for its device."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class RecordedGraph:
    """Operations on fixed memory."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._calls = calls

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, result in self._calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@dataclass
class FakeEvent:
    """Done when somebody has waited for it: nothing is ever early. Copies between host and device end then."""

    device: FakeDevice
    copies_in: list[tuple[Tensor, Tensor]]
    """Host memory, and what it must still hold."""
    copies_out: list[tuple[Tensor, Tensor]]
    """Host memory, and what it will hold."""
    done: bool = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.device.log.append("wait")
        self.done = True
        for host, content in self.copies_in:
            assert torch.equal(host, content), "the host has changed what the device was still to copy"
        for host, content in self.copies_out:
            host.copy_(content)


@dataclass
class FakeDevice:
    """Counts what it is asked."""

    total_bytes: int = 8 << 30
    """Of the memory that it claims to have."""
    taken_bytes: list[int] = field(default_factory=list)
    """What `memory` reports as reserved, one number per call; the last one stays."""
    cannot_capture: str | None = None
    num_copies_in: int = 0
    num_copies_out: int = 0
    num_captures: int = 0
    num_bytes_out: list[int] = field(default_factory=list)
    """Of each copy from the device to the host."""
    host_buffers: set[int] = field(default_factory=set)
    events: list[FakeEvent] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """"in", "out" and "wait", as they were asked for."""
    _copies_in: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _copies_out: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _keep: list[Tensor] = field(default_factory=list)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def host_buffer(self, num_bytes: int) -> Tensor:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self._keep.append(buffer)  # so that no other tensor gets its address
        self.host_buffers.add(buffer.untyped_storage().data_ptr())
        return buffer

    def copy(self, target: Tensor, source: Tensor) -> None:
        ours = [tensor.untyped_storage().data_ptr() in self.host_buffers for tensor in (target, source)]
        assert sum(ours) == 1, "a copy is between a host buffer and the device"
        self.num_copies_out += ours[0]
        self.num_copies_in += ours[1]
        self.log.append("out" if ours[0] else "in")
        if ours[0]:
            self.num_bytes_out.append(source.nbytes)
            waiting = (host for event in self.events if not event.done for host, _ in event.copies_out)
            assert not any(host.data_ptr() == target.data_ptr() for host in waiting), "a result is overwritten unread"
            self._copies_out.append((target, source.clone()))
            target.fill_(0x5A)  # whoever reads it too early shows
        else:
            self._copies_in.append((source, source.clone()))
            target.copy_(source)

    def mark(self) -> FakeEvent:
        self.events.append(FakeEvent(self, self._copies_in, self._copies_out))
        self._copies_in, self._copies_out = [], []
        return self.events[-1]

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        if self.cannot_capture:
            raise RuntimeError(self.cannot_capture)
        self.num_captures += 1
        work()
        with _Recorder() as recorder:
            work()
        return RecordedGraph(recorder.calls)

    def memory(self) -> DeviceMemory:
        taken = self.taken_bytes.pop(0) if len(self.taken_bytes) > 1 else (self.taken_bytes or [0])[0]
        return DeviceMemory(self.total_bytes, self.total_bytes - taken, taken, taken)

    def watch_peak(self) -> None:
        pass


def sizes_up_to(most: int, step: int) -> tuple[int, ...]:
    """Ascending sizes of graphs."""
    return tuple(itertools.takewhile(lambda size: size <= most, itertools.count(step, step)))
