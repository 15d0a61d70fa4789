"""An optimizer that uses Muon for matrices and AdamW for all other parameters.

Muon (Keller Jordan et al., 2024) replaces the momentum of a weight matrix by a nearby matrix whose singular values are
all about 1. A few Newton-Schulz steps find this matrix. Matrices of one shape, or its transpose, share a batched
product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95


def orthogonalize(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """Pushes all singular values of each of n matrices, `[n, rows, columns]` with rows <= columns, towards 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class MuonWithAdamW:
    """Steps the matrices of the decoder layers by Muon, embeddings and norms by AdamW."""

    def __init__(self, model: nn.Module, weight_decay: float = 0.01) -> None:
        self.weight_decay = weight_decay
        named = list(model.named_parameters())
        self.matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        rest = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.adamw = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.98), weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, muon_rate: float, adamw_rate: float) -> None:
        """Apply the gradients, then forget them."""
        wide: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter, momentum in zip(self.matrices, self.momenta, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)
            update = update if update.shape[0] <= update.shape[1] else update.mT
            wide.setdefault(update.shape, []).append((parameter, update))
        for alike in wide.values():
            updates = orthogonalize(torch.stack([update for _, update in alike]))
            for (parameter, _), update in zip(alike, updates, strict=True):
                rows, columns = parameter.shape
                scale = max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - muon_rate * self.weight_decay)
                parameter.add_(update if rows <= columns else update.mT, alpha=-muon_rate * scale)
                parameter.grad = None
        for group in self.adamw.param_groups:
            group["lr"] = adamw_rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
