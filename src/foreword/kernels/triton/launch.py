"""How Triton kernels are launched."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' device the current one, since Triton launches kernels there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
