"""A pass through a whole model without the model's own Python: embedding, all layers as one program, norm, head.

Knows the parts of a decoder; knows no model by name. A model runs this way only if, on random tokens, positions and
rows, its own code gives the exact bits of this formula:

    rows = embedding(tokens);  turns = rotary(rows, positions);  rows = layers(rows, turns);  logits = head(norm(rows))

transformers' code around the layers (unused masks, checks, a call for each layer) takes a millisecond of a step of
about twenty, and computes rows of the last layer that nobody needs. On a Zen 4 or 5 processor of 2 cores, a straight
pass takes 0.92 of the time for one request that decodes, 0.98 for sixteen, and 0.95 for the first token after 1024
(medians of interleaved pairs, docs/decisions/0020-straight-pass.md).

If somebody hooks or replaces a layer or a module outside the layers, or gives it another `forward`, steps run the
model's own code again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
)
from transformers import DynamicCache

from foreword.model.cpu.layer_program import LayerChain, LayerOperations
from foreword.model.foreign.attention import ForwardContext
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.trial import RandomInputs, attempt, same_bits
from foreword.model.fusion.fused_layer import FusedForward
from foreword.model.fusion.modules import FusedNorm
from foreword.model.fusion.neighbours import Neighbours
from foreword.model.fusion.packed import PackedLinear

Turns = tuple[Tensor, Tensor]
_TRIALS = ((5, (1, 4)), (2, (0, 1)))
"""For each trial, the number of rows, and the rows whose logits are compared."""


@dataclass(frozen=True, slots=True)
class StraightPass:
    """The parts of a model around its layers, and the layers' program."""

    embed: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor], Turns]
    norm: FusedNorm
    head: PackedLinear
    chain: LayerChain
    hooks: tuple[Mapping[int, Any], ...]
    """The hooks of modules outside layers and of layers, and the global ones."""
    found: tuple[tuple[Mapping[str, Any], str, Any], ...]
    """(where, name, value) of everything that must not change: children of modules outside layers, replacements of a
    class's `forward`, and the program of the layers."""

    @classmethod
    def find(cls, model: FlatModel, chain: LayerChain, vocab_size: int) -> StraightPass | None:
        """Find the parts of a model; None if it computes anything else than the formula."""
        found: StraightPass | None = None
        for seed, (num_rows, keep) in enumerate(_TRIALS):
            trial = _Trial(RandomInputs(seed), vocab_size, num_rows, keep)
            if not trial.run(model):
                return None
            found = cls._of(model.module, chain, trial) if found is None else found
            if found is None or not found._agrees(trial):
                return None
        assert found is not None
        assert found.head.compact is not None
        chain.end_with(found.norm.norm, found.head.compact)
        return found

    @classmethod
    def _of(cls, module: Any, chain: LayerChain, trial: _Trial) -> StraightPass | None:
        """The parts that the model used in a trial."""
        embed, head = module.get_input_embeddings(), module.get_output_embeddings()
        if not (len(trial.norms) == len(trial.rotaries) == 1 and trial.num_layers == len(chain.layers)):
            return None
        [norm], [rotary] = trial.norms, trial.rotaries
        if type(norm) is not FusedNorm or type(head) is not PackedLinear or head.compact is None:
            return None
        inside = {part for one in module.modules() if isinstance(one.forward, FusedForward) for part in one.modules()}
        outside = [one for one in module.modules() if one not in inside or isinstance(one.forward, FusedForward)]
        hooks = tuple(own for one in outside for own in (one._forward_hooks, one._forward_pre_hooks))
        hooks = (*hooks, _global_forward_hooks, _global_forward_pre_hooks)
        forwards = [(vars(one), "forward", vars(one).get("forward")) for one in outside]
        holders = [one for one in outside if one not in inside]
        children = [(one._modules, name, child) for one in holders for name, child in one._modules.items()]
        layer = next(one.forward for one in outside if isinstance(one.forward, FusedForward))
        kept = (*forwards, *children, (vars(layer), "chain", chain))  # `unchain_layers` takes the chain away
        return cls(embed.forward, rotary.forward, norm, head, chain, hooks, kept)

    def _agrees(self, trial: _Trial) -> bool:
        """Whether the formula has the model's inputs for the layers, and its logits for their rows."""

        def formula() -> tuple[object, ...]:
            assert trial.last is not None
            rows = self.embed(trial.tokens)
            logits = self.head.forward(self.norm.forward(trial.last[0])[trial.keep])
            return rows, logits, self.rotary(rows, trial.positions)

        found = attempt(formula, "the parts of the model take other arguments")
        return same_bits(found, (trial.first, trial.logits, trial.turns))

    def __call__(self, tokens: Tensor, positions: Tensor, keep: Tensor, context: ForwardContext) -> Tensor | None:
        """Logits [len(keep), vocab] of ascending, distinct rows; None if this step needs the model's code."""
        if any(self.hooks) or any(where.get(name) is not one for where, name, one in self.found):
            return None
        rows = self.embed(tokens)
        return self.chain.logits(rows, self.rotary(rows, positions), context, keep)


class _Trial(Neighbours):
    """Stands in for a step's context: layers return random rows, and the trial notes their inputs."""

    def __init__(self, inputs: RandomInputs, vocab_size: int, num_rows: int, keep: tuple[int, ...]) -> None:
        super().__init__()
        self._inputs = inputs
        self.tokens, self.positions = inputs.integers(vocab_size, 1, num_rows), inputs.integers(64, 1, num_rows)
        self.keep = torch.tensor(keep)
        self.logits: Tensor | None = None
        """Logits of the rows `keep`, after the model has run."""
        self._pairs: list[tuple[nn.Module, Tensor]] = []
        """Modules that returned a pair of tensors, each with the first of the pair."""
        self.norms: list[nn.Module] = []
        """Modules that took the last layer's rows."""
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        """The first layer's input and the last layer's result, [1, rows, width]."""
        self.turns: Turns | None = None
        self.num_layers = 0

    def run(self, model: FlatModel) -> bool:
        """Run the model's own code; returns whether it ran, which it does not if some layers are not fused."""
        with torch.inference_mode(), register_module_forward_hook(self.note):
            self.logits = attempt(
                lambda: model(self.tokens, self.positions, self.keep, self, DynamicCache()),
                "the model does not run without a step",
            )
        return self.logits is not None

    def observe(self, layer: LayerOperations | None, hidden_states: Tensor, turns: Turns) -> Tensor:
        """Note a layer's call; returns the layer's result."""
        del layer
        if self.first is None:
            self.first, self.turns = hidden_states, turns
        self.num_layers += 1
        self.last = self._inputs.rows(*hidden_states.shape, dtype=hidden_states.dtype)
        return self.last

    def note(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Note a module's input and output; runs after each module."""
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor):
            self._pairs.append((module, output[0]))
        if self.last is not None and any(argument is self.last for argument in arguments):
            self.norms.append(module)

    @property
    def rotaries(self) -> list[nn.Module]:
        """Modules that made the layers' cosines and sines."""
        return [module for module, cosines in self._pairs if self.turns is not None and cosines is self.turns[0]]
