"""Loading any Hugging Face causal language model: as a written decoder, or in transformers' modules.

Knows the order of the acts and the facts that the engine needs about a model; knows no architecture by name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from foreword.config import ModelConfig
from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.select import AttentionKernel, choose_kernel
from foreword.model.checkpoint.read import Checkpoint, read_checkpoint
from foreword.model.decoder.decoder import Decoder
from foreword.model.decoder.families import UnwrittenError, find_spec
from foreword.model.decoder.network import experts_apart
from foreword.model.deviation import Beginning, LinkDeviations
from foreword.model.foreign.alibi import use_slopes
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.modules import fuse
from foreword.model.foreign.packed import pack_linears
from foreword.model.foreign.probe import probe_layers
from foreword.model.foreign.recurrent import RecurrentForward, StateRun, StepCache, cache_argument
from foreword.model.layout import CacheLayout, LayerLayout, LayoutOptions, StateLayout, plan_layout
from foreword.model.rotation import KeyRotation, check_linkable, refuse_links
from foreword.model.step import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the facts about it that the engine needs."""

    network: Decoder | FlatModel
    """What computes: a written decoder, or a model of transformers."""
    device: torch.device
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
    rotation: KeyRotation | None
    """How cached keys are moved to other positions; None: nobody asked."""
    exact: bool
    """Whether a GPU computes in fixed shapes, so that a row's bits depend on no other row; on a CPU they never do."""

    def forward(self, step: Step, runs: dict[int, list[StateRun]], offsets: Tensor) -> Tensor:
        """Write the step's KV; return logits [num_kept, vocab].

        `runs`: recurrent group -> its runs; `offsets` [rows]: positions minus rows.
        """
        if isinstance(self.network, Decoder):
            return self.network(step)
        cache = StepCache(step.storage, runs, offsets)
        return self.network(step.token_ids[None], step.positions[None], step.keep, step, cache)[: step.num_kept]

    @property
    def decoder(self) -> Decoder:
        """The written decoder; only for models that are one."""
        assert isinstance(self.network, Decoder), "a model of transformers"
        return self.network

    @property
    def flat(self) -> FlatModel:
        """The model of transformers; only for models that run in its modules."""
        assert isinstance(self.network, FlatModel), "a written decoder"
        return self.network

    @property
    def code(self) -> dict[str, str]:
        """Whose code computes: a written family, or a class of transformers."""
        return {"family": self.network.spec.family} if isinstance(self.network, Decoder) else self.network.code

    @property
    def kv_format(self) -> KVFormat:
        """The format of stored keys and values: the type that layers compute in."""
        return KVFormat(self.dtype)

    @property
    def is_packed(self) -> bool:
        """Whether a row of every product has the same bits however many rows there are."""
        return self.network.is_packed

    def parts(self) -> Counter[str]:
        """The number of products in each format of weights."""
        return self.network.parts()

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
        beginning = Beginning(self.decoder) if len(self.layers) > 1 else None
        return LinkDeviations(beginning, self.rotation, self.vocab_size, max_model_len, sink_token_ids)

    def activation_widths(self) -> list[int]:
        """The last dimensions of the activations that pass through elementwise functions."""
        if isinstance(self.network, Decoder):
            return self.network.activation_widths
        heads = {n for layer in self.layers.values() for n in (layer.key_dim, layer.value_dim)}
        return sorted(self.network.widths() - {self.vocab_size} | heads)


def load_model(options: ModelConfig) -> LoadedModel:
    """Load a checkpoint from a folder or the hub. Raises ConfigError, ModelLoadError or UnsupportedModelError."""
    checkpoint = read_checkpoint(options)
    if checkpoint.device.type != "cpu":
        if options.allow_links:
            raise ConfigError(f"allow_links=True needs a CPU, and the model is on {checkpoint.device}; leave it out")
        return _load_plain(checkpoint, options)
    try:
        return _load_written(checkpoint, options)
    except UnwrittenError as reason:
        if options.allow_links:
            refuse_links(f"nobody has written down {reason}, so how its keys turn is unknown")
        logger.info("the model runs in transformers' modules: nobody has written down %s", reason)
    return _accelerated(_load_plain(checkpoint, options))


def load_foreign_model(options: ModelConfig) -> LoadedModel:
    """A model in transformers' modules, made fast where a trial shows equal bits, though its family may be written."""
    return _accelerated(_load_plain(read_checkpoint(options), options))


def load_plain_model(options: ModelConfig) -> LoadedModel:
    """Read and probe a model. Its layers run transformers' own code, as they do on a GPU."""
    return _load_plain(read_checkpoint(options), options)


def _load_written(checkpoint: Checkpoint, options: ModelConfig) -> LoadedModel:
    """Run a model of a written family by its spec. Raises UnwrittenError if it is none."""
    module = checkpoint.module
    named = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
    weights = experts_apart(named, checkpoint.config.model_type)
    if len({tensor.dtype for tensor in weights.values()}) > 1:
        raise UnwrittenError("weights of several types")
    values = checkpoint.config.to_dict()
    if type(module).__module__.startswith("transformers."):
        values.pop("auto_map", None)  # names code of the checkpoint's own, which does not run
    spec = find_spec(values, weights)
    head, embedding = weights.get("lm_head.weight"), weights["model.embed_tokens.weight"]
    if spec.tied and head is not None and head.data_ptr() != embedding.data_ptr():
        spec = replace(
            spec, tied=False
        )  # transformers ties no weights that differ in the file, whatever the config says
    for part in module.modules():
        part._parameters.clear()  # each weight is freed when it has been packed
    if spec.tied:
        weights.pop("lm_head.weight", None)
    decoder = Decoder(spec, weights)
    return LoadedModel(
        network=decoder,
        layers=decoder.layouts,
        states={},
        kernel=choose_kernel(options.attention_kernel, checkpoint.device, KVFormat(checkpoint.dtype), decoder.options),
        rotation=KeyRotation.of(spec, decoder.rotaries) if options.allow_links else None,
        vocab_size=spec.vocab_size,
        **_facts(checkpoint, options),
    )


def _load_plain(checkpoint: Checkpoint, options: ModelConfig) -> LoadedModel:
    module, device = checkpoint.module, checkpoint.device
    flat = FlatModel(module, cache_argument(module), device)
    use_slopes(module)
    found = probe_layers(flat, checkpoint.config)
    for layer, part in found.recurrent.items():
        part.forward = RecurrentForward(part, layer, found.states[layer])
    return LoadedModel(
        network=flat,
        layers=found.layers,
        states=found.states,
        kernel=choose_kernel(options.attention_kernel, device, KVFormat(checkpoint.dtype), found.options.values()),
        rotation=None,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        **_facts(checkpoint, options),
    )


def _facts(checkpoint: Checkpoint, options: ModelConfig) -> dict[str, Any]:
    """The facts that do not hang on who computes."""
    return {
        "device": checkpoint.device,
        "config": checkpoint.config,
        "dtype": checkpoint.dtype,
        "max_positions": checkpoint.max_positions,
        "eos_token_ids": checkpoint.eos_token_ids,
        "exact": options.exact,
    }


def _accelerated(model: LoadedModel) -> LoadedModel:
    """Fuse modules while their weights are plain, and pack weights; what a trial refuses stays transformers' own."""
    fuse(model.flat.module)
    pack_linears(model.flat.module)
    return model
