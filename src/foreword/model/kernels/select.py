"""Which attention kernel runs, and what every kernel is asked.

Knows the kernels by name; loads only the one that is chosen.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
from typing import Any, Protocol

import torch
from torch import Tensor

from foreword.batch import Batch
from foreword.config import KernelName
from foreword.errors import ConfigError
from foreword.model.kernels.reference import AttentionOptions, Tile, paged_attention, plan_tiles

logger = logging.getLogger(__name__)


class AttentionKernel(Protocol):
    """Paged attention. A step is planned once and then attended by every layer that uses its block tables."""

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> Any:
        """What to do in a step; valid for this step only."""
        ...

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: Any, options: AttentionOptions
    ) -> Tensor:
        """Causal attention of a flattened batch over paged KV, as `reference.paged_attention` says."""
        ...

    def explain(self) -> str:
        """For a person: what the kernel made of the steps so far."""
        ...


class ReferenceAttention:
    """`reference.py` as a kernel: plain torch, any device."""

    def plan(self, batch: Batch, scrap_block: int, block_size: int, device: torch.device) -> list[Tile]:
        """Tiles of queries."""
        return plan_tiles(batch, scrap_block, block_size, device)

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, plan: list[Tile], options: AttentionOptions
    ) -> Tensor:
        """See `reference.paged_attention`."""
        return paged_attention(query, key_blocks, value_blocks, plan, options)

    def explain(self) -> str:
        """It has no choices to explain."""
        return "attention in plain torch: nothing is shared"


def make_kernel(name: KernelName, device: torch.device) -> AttentionKernel:
    """The kernel called `name`; "auto" takes the compiled one wherever it runs. Raises ConfigError."""
    problem = _why_not_compiled(device)
    if name == "cpu" and problem is not None:
        raise ConfigError(f"attention_kernel='cpu' cannot run here: {problem}; use 'auto' or 'reference'")
    if name == "reference" or problem is not None:
        if name == "auto" and device.type == "cpu":
            logger.warning("attention runs in plain torch, several times slower: %s", problem)
        return ReferenceAttention()
    from foreword.model.kernels.cpu_attention import CpuAttention

    return CpuAttention()


def _why_not_compiled(device: torch.device) -> str | None:
    """What keeps the compiled CPU kernel from running, None if nothing does."""
    if device.type != "cpu":
        return f"the model is on {device}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if platform.machine().lower() in ("x86_64", "amd64"):
        import llvmlite.binding as llvm

        if not llvm.get_host_cpu_features().get("fma"):
            return "the processor has no fused multiply-add"
    return None
