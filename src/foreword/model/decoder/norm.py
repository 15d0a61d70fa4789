"""Norms of rows: one compiled pass where it takes them, else plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from foreword.kernels.llvm.norms import ADD_ONE, ROUND_NORM
from foreword.model.cpu.row_functions import Norm, RowKernels
from foreword.model.spec import NormSpec

_FORMS = {"rounded": ROUND_NORM, "in float32": 0, "one more": ADD_ONE}


class RowNorm:
    """Rows [..., width] to the same shape and type. A row's bits do not depend on other rows."""

    def __init__(self, weight: Tensor, spec: NormSpec, kernels: RowKernels) -> None:
        self.weight, self._spec, self._kernels = weight.detach(), spec, kernels
        takes = not spec.centred and weight.device.type == "cpu" and kernels.can_take(len(weight), weight.dtype)
        self.norm = Norm(self.weight, spec.epsilon, _FORMS[spec.scales]) if takes else None
        """The compiled norm, if there is one."""

    def __call__(self, rows: Tensor) -> Tensor:
        if self.norm is not None:
            return self._kernels.rms_norm(rows, self.norm)
        wide = rows.float()
        if self._spec.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._spec.epsilon)
        if self._spec.scales == "rounded":
            return self.weight * normed.to(rows.dtype)
        scales = self.weight.float() + 1.0 if self._spec.scales == "one more" else self.weight.float()
        return (scales * normed).to(rows.dtype)

    def of_sum(self, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return x + scale * y, both rounded to their type, and the norm of the sum."""
        if self.norm is not None:
            return self._kernels.add_norm(x, y, self.norm, scale)
        total = x + (y if scale == 1.0 else y * scale)
        return total, self(total)
