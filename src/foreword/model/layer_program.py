"""A decoder layer as one program: threads run its ten operations without returning to Python in between.

Knows products, norms, heads and attention as operations, and the memory between them; knows no module. It exists for
layers whose products are all `TileProduct`s; `fused_layer.py` says which layers compute this formula.

A step of few rows is that short that handing ten operations to threads one by one takes a fifth of it: each time
Python, whose code and data the operation before has driven from the caches, and threads that wake.

    memory      written by                               read by
    wide        project, heads, attention; later gate    heads, attention, output; later down
    normed      norms                                    project, gate
    added       output; later down                       the sums after them
    total       the sum after attention                  the layer's last sum
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from foreword.model.kernels.cpu_attention import AttentionOperations, CpuAttention, CpuPlan
from foreword.model.kernels.reference import AttentionOptions
from foreword.model.kernels.team import Program
from foreword.model.rotary import RotaryKernel
from foreword.model.row_kernels import Norm, RowOperation
from foreword.model.tile_product import TileProduct

_ITEM_BYTES = 2
_LINE = 64


class Workspace:
    """Memory between operations, the same for all layers of a model. One thread at a time."""

    def __init__(self) -> None:
        self.normed_of: Tensor | None = None
        """The rows whose norm, the next layer's first, lies in `normed`."""
        self._wide = self._narrow = 0
        self._num_rows = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._addresses = 0, 0, 0, 0

    def widen(self, wide: int, narrow: int) -> None:
        """There is a layer with rows of so many elements."""
        self._wide, self._narrow, self._num_rows = max(self._wide, wide), max(self._narrow, narrow), 0

    def addresses(self, num_rows: int) -> tuple[int, int, int, int]:
        """Of `wide`, `normed`, `added` and `total` for so many rows."""
        if num_rows != self._num_rows:
            wide, narrow = (_in_lines(num_rows * width * _ITEM_BYTES) for width in (self._wide, self._narrow))
            if self._memory.numel() < wide + 3 * narrow:
                self._memory = torch.empty(wide + 3 * narrow, dtype=torch.uint8)
            first = self._memory.data_ptr()
            self._addresses = first, first + wide, first + wide + narrow, first + wide + 2 * narrow
            self._num_rows, self.normed_of = num_rows, None
        return self._addresses


class LayerProgram:
    """One layer, for rows of bfloat16."""

    def __init__(
        self,
        norms: tuple[Norm, Norm],
        products: tuple[TileProduct, TileProduct, TileProduct, TileProduct],
        rotary: RotaryKernel,
        options: AttentionOptions,
        workspace: Workspace,
    ) -> None:
        """`norms`: before attention and before the network; `products`: heads, output, gate and up, down."""
        self.first_norm = norms[0]
        self._project, self._output, self._gate, self._down = products
        self._rotary = rotary
        self._options = options
        self._space = workspace
        self._norm, self._norm_of_sum, self._next_norm = (RowOperation() for _ in range(3))
        self._norm.set_norm(norms[0])
        self._norm_of_sum.set_norm(norms[1])
        self.hand_to(self)  # the last layer's norm is nobody's
        self._attention = AttentionOperations()
        self._keys: Tensor | None = None
        shapes = rotary.shapes
        self._query_bytes = shapes.key_dim * _ITEM_BYTES, shapes.query_heads * shapes.key_dim * _ITEM_BYTES
        self._mixed_bytes = shapes.query_heads * shapes.value_dim * _ITEM_BYTES
        heads = self._project.width + shapes.query_heads * (shapes.key_dim + shapes.value_dim)
        workspace.widen(max(heads + _LINE, self._gate.width), self._output.width)
        self._program = Program(
            (
                self._norm,
                self._project.operation,
                rotary.operation,
                self._attention.items,
                self._attention.merges,
                self._output.operation,
                self._norm_of_sum,
                self._gate.operation,
                self._down.operation,
                self._next_norm,
            )
        )

    def hand_to(self, following: LayerProgram) -> None:
        """The layer's last sum is normalised for `following`, which is called next."""
        self._next_norm.set_norm(following.first_norm)

    def __call__(
        self,
        hidden_states: Tensor,
        turns: tuple[Tensor, Tensor],
        slots: Tensor,
        blocks: tuple[Tensor, Tensor],
        kernel: CpuAttention,
        plan: CpuPlan,
    ) -> Tensor:
        """[1, rows, width] bfloat16 to the same; the others are as `RotaryKernel` and `CpuAttention` have them."""
        space, x = self._space, hidden_states.contiguous()
        num_rows, rows = x.shape[1], x.data_ptr()
        result = torch.empty_like(x)
        wide, normed, added, total = space.addresses(num_rows)
        is_normed = space.normed_of is hidden_states
        self._norm.bind(rows, 0, 0, normed, 0 if is_normed else num_rows)
        self._project.bind(normed, num_rows, wide)
        queries = wide + _in_lines(num_rows * self._project.width * _ITEM_BYTES)
        turns, slots = (turns[0].contiguous(), turns[1].contiguous()), slots.contiguous()
        self._rotary.bind(wide, num_rows, turns, slots, blocks, queries)
        head_bytes, query_bytes = self._query_bytes
        mixed = queries + num_rows * query_bytes
        if self._keys is not blocks[0]:
            self._attention.set_layer(blocks, self._rotary.shapes.query_heads, self._options, kernel.bfloat16)
            self._keys = blocks[0]
        kernel.bind(self._attention, (queries, query_bytes, head_bytes), mixed, plan)
        padding = num_rows - plan.step.num_tokens
        if padding:
            ctypes.memset(mixed + plan.step.num_tokens * self._mixed_bytes, 0, padding * self._mixed_bytes)
        self._output.bind(mixed, num_rows, added)
        self._norm_of_sum.bind(rows, added, total, normed, num_rows)
        self._gate.bind(normed, num_rows, wide)
        self._down.bind(wide, num_rows, added)
        self._next_norm.bind(total, added, result.data_ptr(), normed, num_rows)
        self._program.run()
        space.normed_of = result
        return result


def _in_lines(num_bytes: int) -> int:
    """Rounded up to whole lines of a cache."""
    return -(-num_bytes // _LINE) * _LINE
