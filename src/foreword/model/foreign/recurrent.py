"""Recurrent layers: each request runs alone, from its saved state, in cells of a fixed grid.

In a flattened batch, one request's state would enter the next request. So a recurrent module gets another `forward`,
which calls the original once per cell, with a cache that holds only this request's state.

Cells end at multiples of the group's block size, where the state can be saved, and at the end of the prompt. A
generated token is its own cell, even if a preempted request computes it again. So a request always has the same
cells, whether its beginning was a hit or not, and however its steps were cut:

    a state can be saved after            0       64      128     192
    prompt of 150 tokens, 4 generated     |-cell--|-cell--|-c|||||
    the same after a hit of 64                    |-cell--|-c|||||
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from foreword.model.foreign.trial import ROUNDING, RandomInputs, relative_error
from foreword.model.layout import StateLayout
from foreword.model.step import StateRun, Step
from foreword.model.storage import KVStorage

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names under which transformers' models and layers take their cache: the first since 5.24, the others before."""


class StepCache(Cache):  # type: ignore[misc]
    """The cache that a model gets: attention's KV passes through unchanged, and recurrent layers find their
    `StateRun`s.

    A layer may ask for the number of earlier tokens, and count positions from there. It gets a tensor with the right
    number for every token.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(layers=[])
        self.storage, self.runs, self.offsets = step.storage, step.runs, step.offsets

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return 0 if layer_idx is None else self.offsets

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class OneLayerCache(Cache):  # type: ignore[misc]
    """One request's state in one recurrent layer, as transformers' layers expect it."""

    def __init__(self, layer: int, state: LinearAttentionLayer) -> None:
        super().__init__(layers=[])
        self._layer = layer
        self.layers = {layer: state}

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        has_state = self.layers[self._layer].has_previous_state
        return all(has_state.values()) if state_idx is None else has_state[state_idx]

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return 0


class RecurrentForward:
    """Stands in for one recurrent module's `forward`."""

    def __init__(self, module: nn.Module, layer: int, layout: StateLayout) -> None:
        self._original: Callable[..., Tensor] = module.forward
        self._signature = inspect.signature(module.forward)
        self._input = next(iter(self._signature.parameters))
        self._layer = layer
        self._layout = layout
        self._module: Any = module
        self._scan_tokens: int | None = getattr(module, "chunk_size", None)
        """The length of the pieces of the module's parallel scan, which pads sequences to a multiple of it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run each request's cells; without a StepCache, call the module's own code."""
        call = self._signature.bind(*args, **kwargs)
        name = next((n for n in CACHE_ARGUMENTS if isinstance(call.arguments.get(n), StepCache)), None)
        if name is None:
            return self._original(*args, **kwargs)
        step: StepCache = call.arguments[name]
        hidden: Tensor = call.arguments[self._input]
        group_id = step.storage.state_group_of[self._layer]
        grid = step.storage.block_sizes[group_id]
        if self._scan_tokens is not None:
            self._module.chunk_size = min(self._scan_tokens, grid)
        result: Tensor | None = None
        for run in step.runs[group_id]:
            state = self._load(step.storage, run)
            call.arguments[name] = OneLayerCache(self._layer, state)
            for start, end in run.cells(grid):
                rows = slice(run.first_row + start - run.start, run.first_row + end - run.start)
                # A copy, because matrix products may round differently at another alignment.
                call.arguments[self._input] = hidden[:, rows].clone()
                output = self._original(*call.args, **call.kwargs)
                if result is None:
                    result = output.new_zeros(1, hidden.shape[1], *output.shape[2:])
                result[:, rows] = output
            step.storage.save_state(self._layer, run.write_block, self._tensors(state))
        assert result is not None, "a step without requests"
        return result

    def _load(self, storage: KVStorage, run: StateRun) -> LinearAttentionLayer:
        layout = self._layout
        state = LinearAttentionLayer(number_of_states=1 + max(number for _, number in layout.names))
        if run.read_block is None:
            return state
        for (kind, number), tensor in zip(layout.names, storage.load_state(self._layer, run.read_block), strict=True):
            if kind == "conv":
                state.conv_states[number] = tensor
                state.conv_kernel_size[number] = tensor.shape[-1]
                state.is_conv_states_initialized[number] = True
            else:
                state.recurrent_states[number] = tensor
                state.is_recurrent_states_initialized[number] = True
            state.has_previous_state[number] = True
        return state

    def _tensors(self, state: LinearAttentionLayer) -> list[Tensor]:
        return [
            (state.conv_states if kind == "conv" else state.recurrent_states)[number]
            for kind, number in self._layout.names
        ]


@dataclass(slots=True)
class StateProbe:
    """Finds the modules that keep a state: a model runs once with transformers' own cache."""

    cache: DynamicCache
    modules: dict[int, nn.Module] = field(default_factory=dict)
    """Recurrent layer -> the innermost module that changed its state."""
    calls: dict[int, inspect.BoundArguments] = field(default_factory=dict)
    """Recurrent layer -> its module's arguments."""
    _handles: list[Any] = field(default_factory=list)

    @classmethod
    def attach(cls, model: nn.Module, config: PretrainedConfig) -> StateProbe:
        """Watch a model's modules until `detach`."""
        probe = cls(DynamicCache(config=config))
        for module in model.modules():
            if cache_argument(module) is not None and isinstance(getattr(module, "layer_idx", None), int):
                probe._handles.append(module.register_forward_hook(probe._after, with_kwargs=True))
        return probe

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _after(self, module: nn.Module, args: Any, kwargs: Any, _: Any) -> None:
        """Record the module that wrote a layer's state: the first module that returns after the write."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        if layer < len(self.cache.layers) and layer not in self.modules:
            state = self.cache.layers[layer]
            if isinstance(state, LinearAttentionCacheLayerMixin) and any(state.has_previous_state.values()):
                self.modules[layer] = module
                self.calls[layer] = inspect.signature(module.forward).bind(*args, **kwargs)

    def problems(self) -> list[str]:
        """List the modules that do not continue from a saved state as they would within a whole sequence.

        Some modules of transformers use their state for single tokens only, and start from an empty state if there are
        several tokens.
        """
        problems = []
        checked: set[type[nn.Module]] = set()
        for layer, module in self.modules.items():
            if type(module) in checked:
                continue
            checked.add(type(module))
            difference = _continuation_error(module, layer, self.calls[layer])
            if not difference <= ROUNDING:
                problems.append(
                    f"layer {layer} ({type(module).__name__}) does not continue from a saved state: with it, results "
                    f"differ by {difference:.0%} from those of the whole sequence"
                )
        return problems

    def layouts(self) -> dict[int, StateLayout]:
        """The state of each recurrent layer."""
        layouts = {}
        for layer in self.modules:
            state = self.cache.layers[layer]
            tensors = [("conv", n, t) for n, t in state.conv_states.items() if t is not None]
            tensors += [("recurrent", n, t) for n, t in state.recurrent_states.items() if t is not None]
            layouts[layer] = StateLayout(
                tuple((kind, number) for kind, number, _ in tensors),
                tuple(tuple(tensor.shape[1:]) for *_, tensor in tensors),
                tuple(tensor.dtype for *_, tensor in tensors),
            )
        return layouts


def _continuation_error(module: nn.Module, layer: int, call: inspect.BoundArguments) -> float:
    """Measure in float32 how far the results of a sequence in pieces are from the results of the whole."""
    exact = copy.deepcopy(module).float()
    name = next(n for n in CACHE_ARGUMENTS if n in call.arguments)
    source = next(iter(call.signature.parameters))
    rows: Tensor = call.arguments[source]
    hidden = RandomInputs().rows(1, 9, rows.shape[-1]).to(rows.device)

    def run(pieces: list[int]) -> Tensor:
        state = LinearAttentionLayer(number_of_states=8)
        outputs = []
        for piece in torch.split(hidden, pieces, dim=1):
            arguments = {**call.arguments, source: piece, name: OneLayerCache(layer, state)}
            bound = inspect.BoundArguments(call.signature, arguments)
            outputs.append(exact(*bound.args, **bound.kwargs))
        return torch.cat(outputs, 1)

    with torch.inference_mode():
        return relative_error(run([4, 3, 1, 1]), expected=run([9]))


def cache_argument(module: nn.Module) -> str | None:
    """The name under which a module's `forward` takes its cache; None if it takes no cache."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)
