"""A pass through a whole model without the model's own Python: embedding, all layers as one program, norm, head.

Knows what a decoder is made of; knows no model by name. What transformers' code does around the layers (masks that
nobody needs, checks, a call for each layer) takes a millisecond, and a step of few rows is some twenty. A model is
run this way only if, on random tokens, positions and rows, its own code gives the exact bits of this formula:

    rows = embedding(tokens);  turns = rotary(rows, positions);  rows = layers(rows, turns);  logits = head(norm(rows))

As soon as somebody hooks one of these modules or a layer, to watch it or to change what it gives, puts another in its
place or gives it another `forward`, steps are the model's own again.
"""

from __future__ import annotations

import logging
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

from foreword.model.attention import ForwardContext
from foreword.model.cpu.layer_program import LayerChain, LayerOperations
from foreword.model.fusion.layers import FusedForward
from foreword.model.fusion.modules import FusedNorm
from foreword.model.fusion.neighbours import Neighbours
from foreword.model.fusion.packed import PackedLinear

logger = logging.getLogger(__name__)

Turns = tuple[Tensor, Tensor]
_TRIALS = ((5, (1, 4)), (2, (0, 1)))
"""How many rows, and whose logits."""


@dataclass(frozen=True, slots=True)
class StraightPass:
    """What there is beside the layers."""

    embed: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor], Turns]
    norm: FusedNorm
    head: PackedLinear
    chain: LayerChain
    hooks: tuple[Mapping[int, Any], ...]
    """Of all modules but those inside layers, and those of every module."""
    found: tuple[tuple[Mapping[str, Any], str, Any], ...]
    """Children of modules outside layers, and what stands in place of a class's `forward`: where, its name, itself."""

    @classmethod
    def find(cls, module: nn.Module, chain: LayerChain, run: Callable[..., Tensor], vocab: int) -> StraightPass | None:
        """None if the model does anything else. `run(context, tokens, positions, keep)` returns the model's logits."""
        found: StraightPass | None = None
        for seed, (num_rows, keep) in enumerate(_TRIALS):
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(vocab, (1, num_rows), generator=generator)
            positions = torch.randint(64, (1, num_rows), generator=generator)
            trial = _Trial(generator)
            try:
                with register_module_forward_hook(trial.note):
                    expected = run(trial, tokens, positions, torch.tensor(keep))
            except Exception:
                logger.debug("the model does not run without a step, as where some layers are its own", exc_info=True)
                return None
            found = cls._of(module, chain, trial) if found is None else found
            if found is None or not found._agrees(trial, tokens, positions, torch.tensor(keep), expected):
                return None
        assert found is not None
        assert found.head.compact is not None
        chain.end_with(found.norm.norm, found.head.compact)
        return found

    @classmethod
    def _of(cls, module: Any, chain: LayerChain, trial: _Trial) -> StraightPass | None:
        """The parts that the model has used."""
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
        return cls(embed.forward, rotary.forward, norm, head, chain, hooks, (*forwards, *children))

    def _agrees(self, trial: _Trial, tokens: Tensor, positions: Tensor, keep: Tensor, expected: Tensor) -> bool:
        """Whether the formula gives what the model has given to its layers and made of what they returned."""
        assert trial.first is not None
        assert trial.last is not None
        assert trial.turns is not None
        try:
            rows = self.embed(tokens)
            logits = self.head.forward(self.norm.forward(trial.last[0])[keep])
            turns = self.rotary(rows, positions)
            pairs = [(rows, trial.first), (logits, expected), *zip(turns, trial.turns, strict=True)]
        except Exception:
            logger.debug("the parts of the model want to be called in another way", exc_info=True)
            return False
        return all(one.dtype == two.dtype and torch.equal(one, two) for one, two in pairs)

    def __call__(self, tokens: Tensor, positions: Tensor, keep: Tensor, context: ForwardContext) -> Tensor | None:
        """Logits [len(keep), vocab] of rows in ascending order, each once; None if this step needs the model's code."""
        if any(self.hooks) or any(where.get(name) is not one for where, name, one in self.found):
            return None
        rows = self.embed(tokens)
        return self.chain.logits(rows, self.rotary(rows, positions), context, keep)


class _Trial(Neighbours):
    """Stands in for the context of a step: layers return random rows, and what is handed to them is noted."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self._pairs: list[tuple[nn.Module, Tensor]] = []
        """Modules that returned a pair of tensors, and the first of each."""
        self.norms: list[nn.Module] = []
        """What was given the last layer's rows."""
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        """What the first layer was given, and what the last has returned, [1, rows, width]."""
        self.turns: Turns | None = None
        self.num_layers = 0

    def observe(self, layer: LayerOperations | None, hidden_states: Tensor, turns: Turns) -> Tensor:
        """What the layer is to return."""
        del layer
        if self.first is None:
            self.first, self.turns = hidden_states, turns
        self.num_layers += 1
        self.last = torch.randn(hidden_states.shape, generator=self._generator).to(hidden_states.dtype)
        return self.last

    def note(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """A module has run."""
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor):
            self._pairs.append((module, output[0]))
        if self.last is not None and any(argument is self.last for argument in arguments):
            self.norms.append(module)

    @property
    def rotaries(self) -> list[nn.Module]:
        """What has made the layers' cosines and sines."""
        return [module for module, cosines in self._pairs if self.turns is not None and cosines is self.turns[0]]
