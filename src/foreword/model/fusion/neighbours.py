"""Finding the fused layers that follow each other, by running the model once without computing them.

Knows the tensors that pass between layers; knows no module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from foreword.model.cpu.layer_program import LayerOperations


class Neighbours(TorchFunctionMode):
    """Stands in for the context of a step in which layers compute nothing.

    It notes which layers get the previous layer's result and the same rotary embeddings, and which results are also
    used elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layers: list[LayerOperations | None] = []
        self._follows: list[bool] = []
        self._rows: list[Tensor] = []
        """The rows that the first layer got, and those that each layer returned."""
        self._turns: Tensor | None = None
        self._used: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        handed = {id(value) for value in tree_leaves((args, kwargs))}
        self._used.update(number for number, rows in enumerate(self._rows) if id(rows) in handed)
        return func(*args, **(kwargs or {}))

    def observe(self, layer: LayerOperations | None, hidden_states: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Note a layer's call; returns the layer's result."""
        if not self._rows:
            self._rows.append(hidden_states)
        self._follows.append(self._rows[-1] is hidden_states and self._turns is turns[0])
        self._layers.append(layer)
        self._turns = turns[0]
        self._rows.append(torch.empty_like(self._rows[0]))
        return self._rows[-1]

    def chains(self) -> list[list[LayerOperations]]:
        """The layers with operations that follow each other. Call it after the model has run."""
        found: list[list[LayerOperations]] = [[]]
        for number, layer in enumerate(self._layers):
            if not self._follows[number] or number in self._used or layer is None:
                found.append([])
            if layer is not None:
                found[-1].append(layer)
        return [chain for chain in found if chain]
