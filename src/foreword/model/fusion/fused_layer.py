"""A decoder layer's `forward` as a formula of a dozen operations instead of about forty.

    x = x + output(attention(turn(project(norm(x)))))
    x = x + network(norm(x))

Knows a layer's parts and the context of a step; knows no model by name. `layers.py` says which layers compute this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from foreword.kernels.reference import AttentionOptions
from foreword.model.cpu.layer_program import LayerChain
from foreword.model.cpu.rotary import RotaryKernel
from foreword.model.foreign.attention import ForwardContext
from foreword.model.fusion.layer_parts import LayerParts
from foreword.model.fusion.modules import FusedGate
from foreword.model.fusion.neighbours import Neighbours


class FusedForward:
    """Replaces a layer's `forward`.

    Its last sum and the next layer's first norm are one pass over the rows, and the norm is passed to the next layer.
    A layer that gets other rows than these computes its norm itself.
    """

    def __init__(
        self,
        parts: LayerParts,
        rotary: RotaryKernel,
        options: AttentionOptions,
        plain: Callable[..., Any],
    ) -> None:
        self.layer: int = parts.attention.layer_idx  # type: ignore[assignment]
        self.following: FusedForward | None = None
        """The next layer, if it is fused."""
        self._parts = parts
        self.operations = parts.operations(rotary, options)
        """None if another library computes the products."""
        self.chain: LayerChain | None = None
        """The program that runs this layer without Python, if it has operations."""
        self._rotary = rotary
        self._options = options
        self._plain = plain
        self._handed: tuple[Tensor, Tensor] | None = None
        """The rows that the previous layer returned, and their norm."""
        # `forward` is called directly: a module's own call costs as much as handing a small product to threads.
        self._project, self._output = parts.project.forward, parts.output.forward
        network = parts.network.forward
        flat = type(parts.network) is FusedGate
        self._network: Callable[[Tensor], Tensor] = network if flat else lambda rows: network(rows[None])[0]
        """[rows, width] -> [rows, width]"""

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        forward_context: ForwardContext,
        **others: Any,
    ) -> Tensor:
        """Compute the layer, [1, rows, width] -> [1, rows, width]. A served layer needs none of the `others`."""
        if isinstance(forward_context, Neighbours):
            return forward_context.observe(self.operations, hidden_states, position_embeddings)
        if self.chain is not None and self.operations is not None:
            result = self.chain.forward(self.operations, hidden_states, position_embeddings, forward_context)
            if result is not None:
                self._handed = None
                return result
        storage = forward_context.storage
        blocks = storage.keys[self.layer], storage.values[self.layer]
        if not (blocks[0].is_contiguous() and blocks[1].is_contiguous()):
            output: Tensor = self._plain(
                hidden_states, position_embeddings=position_embeddings, forward_context=forward_context, **others
            )
            return output
        step = forward_context.steps[storage.group_of[self.layer]]
        first, second = self._parts.norms
        x, (handed, self._handed) = hidden_states[0], (self._handed, None)
        normed = handed[1] if handed is not None and handed[0] is hidden_states else first.forward(x)
        queries = self._rotary(self._project(normed), position_embeddings, step.slots, blocks)
        mixed = step.kernel.attend(queries, *blocks, step.plan, self._options)
        total, normed = second.of_sum(x, self._output(mixed.flatten(1)))
        added = self._network(normed)
        if self.following is None:
            return (total + added)[None]
        total, normed = self.following._parts.norms[0].of_sum(total, added)
        output = total[None]
        self.following._handed = output, normed
        return output
