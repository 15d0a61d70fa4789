"""Attention with linear biases (ALiBi, arXiv 2108.12409) in models that compute their scores themselves.

These modules neither call `AttentionInterface` nor get the model's keyword arguments. So they get another `forward`,
which asks the interface for attention with slopes. A module is replaced only if, on random rows, it computes this
formula:

    query, key, value = clip(project(rows));    output(softmax(scale * query @ key + bias) @ value) + residual
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foreword.model.foreign.attention import foreword_attention
from foreword.model.foreign.trial import NUM_ROWS, ROUNDING, RandomInputs, attempt, relative_error, settings

BIASED_NAME = "foreword_biased"
"""attn_implementation of a model whose attention was replaced. It has a mask function, because some of these models
convert their mask even if nobody reads it."""
_BIASES = ("alibi", "position_bias")
"""Names under which attention modules take the bias of their scores, [heads, 1, positions]."""
_SCALES = ("inv_norm_factor", "softmax_scale")
"""Names under which attention modules keep the factor of their scores."""
_INPUT_SIZES = (1.0, 1e3)
"""Standard deviations of random rows; with the larger one, rows reach the limit that clips queries, keys and values."""


def use_slopes(model: PreTrainedModel) -> None:
    """Let attention modules that bias scores by distance call transformers' `AttentionInterface`, with their slopes."""
    num_heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(num_heads, int):
        return
    call = _Call(model)
    formulas: dict[Any, BiasFormula | None] = {}
    for module in list(model.modules()):
        candidates = BiasFormula.candidates(module, num_heads)
        if not candidates:
            continue
        make = type(module), settings(module), candidates
        if make not in formulas:
            formulas[make] = next((formula for formula in candidates if formula.is_computed_by(module)), None)
        formula = formulas[make]
        if formula is not None:
            module.forward = BiasedForward(module, formula, call)
    if any(formulas.values()):
        model.register_forward_pre_hook(call.note, with_kwargs=True)
        model.set_attn_implementation = call.use  # transformers' method finds no interface in the model's source
        call.use(BIASED_NAME)


class _Call:
    """The attention function and the context of a model's running call."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config = model.config
        self.attend: Any = None
        self.context: Any = None

    def use(self, name: str) -> None:
        """Set the attention function by its name."""
        self._config._attn_implementation = name
        self.attend = ALL_ATTENTION_FUNCTIONS[name]

    def note(self, model: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Record the context that a call of the model has. Runs before each call."""
        self.context = options.get("forward_context")


@dataclass(frozen=True, slots=True)
class BiasFormula:
    """The formula of an attention module, and the names of its parts."""

    project: str
    """The linear layer that makes queries, keys and values."""
    output: str
    """The linear layer that mixes the heads' results."""
    bias: str
    """The argument that holds the bias."""
    num_heads: int
    heads_first: bool
    """Whether a projected row is [heads, 3, dim]; else it is [3, heads, dim]."""
    scale: float
    clip: float | None

    @classmethod
    def candidates(cls, module: nn.Module, num_heads: int) -> tuple[BiasFormula, ...]:
        """Formulas that fit the names and sizes of a module's parts."""
        if not isinstance(getattr(module, "layer_idx", None), int):
            return ()
        parameters = inspect.signature(module.forward).parameters
        bias = next((name for name in _BIASES if name in parameters), None)
        linears = [(name, child) for name, child in module.named_children() if type(child) is nn.Linear]
        if bias is None or len(linears) != 2:
            return ()
        (project, first), (output, second) = linears
        width = second.in_features
        if first.out_features != 3 * width or width % num_heads:
            return ()
        scales = [value for name in _SCALES if isinstance(value := getattr(module, name, None), float)]
        scale, clip = (*scales, (width // num_heads) ** -0.5)[0], getattr(module, "clip_qkv", None) or None
        return tuple(cls(project, output, bias, num_heads, order, scale, clip) for order in (True, False))

    def split(self, module: nn.Module, rows: Tensor) -> tuple[Tensor, ...]:
        """Make queries, keys and values, each [1, heads, tokens, dim], from rows [1, tokens, width]."""
        projected: Tensor = getattr(module, self.project)(rows)
        if self.clip is not None:
            projected = projected.clamp(-self.clip, self.clip)
        sizes = (self.num_heads, 3, -1) if self.heads_first else (3, self.num_heads, -1)
        parts = projected.view(*projected.shape[:2], *sizes).unbind(3 if self.heads_first else 2)
        return tuple(part.transpose(1, 2) for part in parts)

    def join(self, module: nn.Module, mixed: Tensor, residual: Tensor | None) -> Tensor:
        """Make the module's output from mixed values [1, tokens, heads, dim]."""
        output: Tensor = getattr(module, self.output)(mixed.flatten(2))
        return output if residual is None else output + residual

    def is_computed_by(self, module: nn.Module) -> bool:
        """Whether module and formula give the same results, up to the rounding of float32."""
        exact = copy.deepcopy(module).float()
        with torch.inference_mode():
            trials = (partial(self._error, exact, size) for size in _INPUT_SIZES)
            errors = [attempt(trial, "an attention module with a bias takes other arguments") for trial in trials]
        return all(error is not None and error <= ROUNDING for error in errors)

    def _error(self, module: Any, size: float) -> float:
        """The relative difference between module and formula on random rows; `size`: their standard deviation."""
        linear, inputs = getattr(module, self.project), RandomInputs()
        device = linear.weight.device
        rows, residual = (inputs.rows(1, NUM_ROWS, linear.in_features).to(device) for _ in range(2))
        slopes = inputs.rows(self.num_heads, 1, 1).abs().to(device)
        bias = slopes * torch.arange(1 - NUM_ROWS, 1, device=device)
        arguments = {"hidden_states": rows * size, self.bias: bias, "attention_mask": None}
        if "residual" in inspect.signature(module.forward).parameters:
            arguments["residual"] = residual
        query, key, value = self.split(module, rows * size)
        mixed = (query @ key.mT * self.scale + bias).softmax(-1) @ value
        expected = self.join(module, mixed.transpose(1, 2), arguments.get("residual"))
        return relative_error(module.forward(**arguments)[0], expected)


class BiasedForward:
    """Stands in for the `forward` of one attention module."""

    def __init__(self, module: nn.Module, formula: BiasFormula, call: _Call) -> None:
        self._signature = inspect.signature(module.forward)
        self._module: Any = module
        self._formula = formula
        self._call = call
        self._slopes: Tensor | None = None
        """[heads], known after the first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take the module's arguments; return its output and None in place of attention weights."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        module, formula = self._module, self._formula
        if self._slopes is None:
            self._slopes = _slopes(arguments[formula.bias])
        query, key, value = formula.split(module, arguments["hidden_states"])
        mixed, _ = self._call.attend(
            module,
            query,
            key,
            value,
            arguments.get("attention_mask"),
            scaling=formula.scale,
            alibi_slopes=self._slopes,
            forward_context=self._call.context,
        )
        return formula.join(module, mixed, arguments.get("residual")), None


def _slopes(bias: Tensor) -> Tensor:
    """Slopes [heads] of a bias [heads, 1, positions]. Raises TypeError if the bias is not linear."""
    lines = bias[:, 0].float()
    slopes = lines[:, -1] - lines[:, -2]
    line = lines[:, -1:] + slopes[:, None] * torch.arange(1 - lines.shape[1], 1, device=bias.device)
    if not torch.allclose(lines, line, rtol=1e-2):
        raise TypeError("the bias of attention scores is not linear in the position")
    return slopes


AttentionInterface.register(BIASED_NAME, foreword_attention)
# Models get this mask because they convert masks; `foreword_attention` does not read it.
AttentionMaskInterface.register(BIASED_NAME, lambda **_: torch.ones(1, 1, 1, 1, dtype=torch.bool))
