"""Loading any Hugging Face causal language model with foreword's attention, in three acts: read, probe, accelerate.

Knows the order of the acts and the facts that the engine needs about a model; knows no architecture by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from foreword.config import ModelConfig
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.select import AttentionKernel, choose_kernel
from foreword.model.beginning import ModelBeginning
from foreword.model.checkpoint.read import read_checkpoint
from foreword.model.cpu.layer_program import BrokenChainError
from foreword.model.deviation import LinkDeviations
from foreword.model.foreign.alibi import use_slopes
from foreword.model.foreign.attention import ForwardContext
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.probe import probe_layers
from foreword.model.foreign.recurrent import RecurrentForward, cache_argument
from foreword.model.fusion.accelerate import accelerate
from foreword.model.fusion.chains import unchain_layers
from foreword.model.fusion.modules import ProductPart
from foreword.model.fusion.packed import PackedLinear
from foreword.model.fusion.straight_pass import StraightPass
from foreword.model.layout import CacheLayout, LayerLayout, LayoutOptions, StateLayout, plan_layout
from foreword.model.rotation import KeyRotation, check_linkable, find_rotation


@dataclass(frozen=True, slots=True)
class LoadedModel(FlatModel):
    """A model ready to run, and the facts about it that the engine needs."""

    config: PretrainedConfig
    layers: dict[int, LayerLayout]
    """Attention layers."""
    states: dict[int, StateLayout]
    """Recurrent layers; some are attention layers too."""
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    """The length of the longest sequence that the model accepts."""
    eos_token_ids: frozenset[int]
    kernel: AttentionKernel
    straight: StraightPass | None
    """A pass that skips the model's own code, if there is one."""
    rotation: KeyRotation | None
    """How cached keys are moved to other positions; None: nobody asked."""
    beginning: ModelBeginning | None
    """What tells which linked tokens deviate; None: nobody asked, or it has fewer than two attention layers."""
    exact: bool
    """Whether a GPU computes in fixed shapes, so that a row's bits depend on no other row; on a CPU they never do."""

    def __call__(self, token_ids: Tensor, positions: Tensor, keep: Tensor, context: Any, cache: Any) -> Tensor:
        """As `FlatModel`. If somebody has changed the model after loading, its layers run one by one from now on."""
        try:
            return FlatModel.__call__(self, token_ids, positions, keep, context, cache)
        except BrokenChainError:
            unchain_layers(self.module)
            # This overwrites what the broken pass wrote to blocks.
            return FlatModel.__call__(self, token_ids, positions, keep, context, cache)

    def run_straight(
        self, token_ids: Tensor, positions: Tensor, keep: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """Compute a call's logits without the model's own code; None if this step needs that code.

        The rows `keep` are ascending and distinct.
        """
        return None if self.straight is None else self.straight(token_ids, positions, keep, context)

    @property
    def kv_format(self) -> KVFormat:
        """The format of stored keys and values: the type that layers compute in."""
        return KVFormat(self.dtype)

    def plan_layout(self, options: LayoutOptions) -> CacheLayout:
        """Plan how this model's layers share blocks."""
        return plan_layout(self.layers, self.states, self.kv_format, options)

    def can_link(self, layout: CacheLayout) -> bool:
        """Whether tokens may be moved between blocks of this layout; False if nobody asked.

        Raises UnsupportedModelError if they were to be and cannot.
        """
        if self.rotation is not None:
            check_linkable(layout)
        return self.rotation is not None

    def deviations(self, max_model_len: int, sink_token_ids: Sequence[int]) -> LinkDeviations | None:
        """What measures how linked tokens deviate; None if nobody asked for links.

        `max_model_len`: tokens of the longest prompt and its answer; `sink_token_ids`: those before every prompt.
        """
        if self.rotation is None:
            return None
        return LinkDeviations(self.beginning, self.rotation, self.vocab_size, max_model_len, sink_token_ids)

    def activation_widths(self) -> list[int]:
        """The last dimensions of the activations that pass through elementwise functions."""
        own = {  # recurrent layers run in cells of fixed lengths
            m for layer in self.module.modules() if isinstance(layer.forward, RecurrentForward) for m in layer.modules()
        }
        kinds = (nn.Linear, PackedLinear, ProductPart)
        layers = [m for m in self.module.modules() if isinstance(m, kinds) and m not in own]
        linear = {n for layer in layers for n in (layer.in_features, layer.out_features)}
        experts = {n for name, p in self.module.named_parameters() if p.dim() == 3 for n in p.shape[1:]}
        heads = {n for layer in self.layers.values() for n in (layer.key_dim, layer.value_dim)}
        return sorted(linear - {self.vocab_size} | experts | heads)


def load_model(options: ModelConfig) -> LoadedModel:
    """Load a checkpoint from a folder or the hub. Raises ConfigError, ModelLoadError or UnsupportedModelError."""
    plain = load_plain_model(options)
    if plain.device.type != "cpu":
        return plain
    flat = FlatModel(plain.module, plain.cache_argument, plain.device)
    return replace(plain, straight=accelerate(flat, plain.layers, bool(plain.states), plain.vocab_size))


def load_plain_model(options: ModelConfig) -> LoadedModel:
    """Read and probe a model. Its layers run transformers' own code, as they do on a GPU."""
    checkpoint = read_checkpoint(options)
    module, device = checkpoint.module, checkpoint.device
    flat = FlatModel(module, cache_argument(module), device)
    use_slopes(module)
    found = probe_layers(flat, checkpoint.config)
    kv_format = KVFormat(checkpoint.dtype)
    kernel = choose_kernel(options.attention_kernel, device, kv_format, found.options.values())
    for layer, part in found.recurrent.items():
        part.forward = RecurrentForward(part, layer, found.states[layer])
    return LoadedModel(
        module=module,
        cache_argument=flat.cache_argument,
        device=device,
        config=checkpoint.config,
        layers=found.layers,
        states=found.states,
        dtype=checkpoint.dtype,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        max_positions=checkpoint.max_positions,
        eos_token_ids=checkpoint.eos_token_ids,
        kernel=kernel,
        straight=None,
        rotation=find_rotation(flat, found, checkpoint.max_positions) if options.allow_links else None,
        beginning=ModelBeginning.of(flat, found.layers) if options.allow_links else None,
        exact=options.exact,
    )
