"""Chooses an attention kernel, and loads only this kernel. Also has the protocol of all kernels."""

from __future__ import annotations

import importlib.util
import logging
import platform
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from foreword.batch import Batch, IntArray
from foreword.config import KernelName
from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVBlocks, KVFormat
from foreword.kernels.reference import AttentionOptions, Tile, TilePlan, paged_attention, plan_decoding_tile, plan_tiles

logger = logging.getLogger(__name__)


class AttentionKernel(Protocol):
    """Paged attention. A step is planned once. Each layer that uses the step's block tables attends with this plan."""

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> Any:
        """Plan a step; the plan is valid for this step only."""

    def attend(self, query: Tensor, blocks: KVBlocks, plan: Any, options: AttentionOptions) -> Tensor:
        """Causal attention of a flattened batch over paged KV, as `reference.paged_attention` says."""

    def why_not(self, kv_format: KVFormat, options: AttentionOptions) -> str | None:
        """Why the kernel cannot attend with these options over blocks of this format; None if it can.

        The answer is the rest of a sentence that begins with "the kernel". No other code knows a kernel's limits.
        """

    def explain(self) -> str:
        """Describe, in a text for people, what the kernel did in the steps so far."""


class ReferenceAttention:
    """`reference.py` as a kernel: plain torch, any device."""

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> list[Tile]:
        tiles = plan_tiles(batch, scrap_block, block_size)
        return tiles.at(torch.from_numpy(tiles.data).to(device))

    def lay_out(self, batch: Batch, scrap_block: int, block_size: int) -> TilePlan:
        return plan_tiles(batch, scrap_block, block_size)

    def lay_out_decoding(
        self, batch: Batch, scrap_block: int, block_size: int, *, num_rows: int, max_tokens: int
    ) -> TilePlan:
        """See `DeviceAttention`; every step costs as much as `max_tokens` tokens."""
        return plan_decoding_tile(batch, scrap_block, block_size, num_rows=num_rows, max_tokens=max_tokens)

    def attend(self, query: Tensor, blocks: KVBlocks, plan: list[Tile], options: AttentionOptions) -> Tensor:
        return paged_attention(query, blocks, plan, options)

    def why_not(self, kv_format: KVFormat, options: AttentionOptions) -> str | None:
        """This kernel supports every option and every format."""
        return None

    def explain(self) -> str:
        """Return a text for people. The text never changes, because this kernel makes no choices."""
        return "attention in plain torch: nothing is shared"


def make_kernel(name: KernelName, device: torch.device) -> AttentionKernel:
    """Make the kernel called `name`; "auto": a compiled kernel, if one runs here. Raises ConfigError."""
    if name == "reference":
        return ReferenceAttention()
    checks = {"cpu": _why_not_cpu, "triton": _why_not_triton}
    if name == "auto":
        chosen: KernelName = "triton" if device.type == "cuda" else "cpu"
        problem = checks[chosen](device)
        if problem is not None:
            if device.type in ("cpu", "cuda"):
                logger.warning("attention runs in plain torch, several times slower: %s", problem)
            return ReferenceAttention()
        name = chosen
    problem = checks[name](device)
    if problem is not None:
        raise ConfigError(f"attention_kernel={name!r} cannot run here: {problem}; use 'auto' or 'reference'")
    if name == "triton":
        from foreword.kernels.triton.attention import TritonAttention

        return TritonAttention()
    from foreword.kernels.cpu.attention import CpuAttention

    return CpuAttention()


def choose_kernel(
    name: KernelName, device: torch.device, kv_format: KVFormat, layers: Iterable[AttentionOptions]
) -> AttentionKernel:
    """The kernel called `name`, for a model's layers. "auto" takes plain torch if the compiled kernel refuses a layer.

    With any other `name`, raises ConfigError if the kernel refuses a layer.
    """
    kernel = make_kernel(name, device)
    problem = next((reason for layer in layers if (reason := kernel.why_not(kv_format, layer))), None)
    if problem is None:
        return kernel
    if name != "auto":
        raise ConfigError(f"attention_kernel={name!r} {problem}, or leave the choice to attention_kernel='auto'")
    logger.warning("attention runs in plain torch, several times slower: the compiled kernel %s", problem)
    return ReferenceAttention()


def writes_with_triton(device: torch.device) -> bool:
    """Whether KV on a device is written and copied by Triton's kernels."""
    return device.type == "cuda" and _why_not_triton(device) is None


def _why_not_cpu(device: torch.device) -> str | None:
    """Why the compiled CPU kernel cannot run here; None if it can."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if platform.machine().lower() in ("x86_64", "amd64"):
        import llvmlite.binding as llvm

        if not llvm.get_host_cpu_features().get("fma"):
            return "the processor has no fused multiply-add"
    return None


def _why_not_triton(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run here; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'foreword[gpu]')"
    import triton

    if device.type == "cpu" and triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the model is on {device}"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        # Other GPUs may use different registers in prefill and decoding, and sum a row in different orders.
        return f"equal bits were verified on NVIDIA's Hopper only, and this is {torch.cuda.get_device_name(device)}"
    return None


class HostPlan(Protocol):
    """A plan before its array is on the device."""

    @property
    def data(self) -> IntArray:
        """[n] int32, contiguous."""

    @property
    def most(self) -> int:
        """The longest `data` of all plans that can replace this one."""

    def at(self, metadata: Tensor) -> Any:
        """The plan for `data` that is, or will be, at the beginning of `metadata` [most] int32.

        `metadata` is contiguous, at a multiple of 16 bytes.
        """


@runtime_checkable
class DeviceAttention(Protocol):
    """More methods of an `AttentionKernel`: its plans can be copied with other data, and be used in CUDA graphs."""

    def lay_out(self, batch: Batch, scrap_block: int, block_size: int) -> HostPlan:
        """The plan that `plan` makes, before it is on the device."""

    def lay_out_decoding(
        self, batch: Batch, scrap_block: int, block_size: int, *, num_rows: int, max_tokens: int
    ) -> HostPlan:
        """`lay_out` for a batch of at most `num_rows` single tokens, each after fewer than `max_tokens` other tokens.

        Plans with equal `num_rows`, `max_tokens` and `block_size` have equal `most`. If their data is at the same
        address, attention runs the same device operations for all of them. So a graph that was recorded with one plan
        computes another plan after the data has been replaced. Results have the same bits as with a plan of `lay_out`.
        Rows after the batch's rows are padding; their results mean nothing.
        """
