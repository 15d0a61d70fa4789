"""Models in transformers' modules: read by transformers, probed, and made fast where a trial shows equal bits."""

from __future__ import annotations

from foreword.config import ModelConfig
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.select import choose_kernel
from foreword.model.checkpoint.read import Checkpoint, read_checkpoint
from foreword.model.foreign.alibi import use_slopes
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.modules import fuse, pack_linears
from foreword.model.foreign.probe import probe_layers
from foreword.model.foreign.recurrent import RecurrentForward, cache_argument
from foreword.model.loader import LoadedModel, facts_of


def load_foreign_model(options: ModelConfig) -> LoadedModel:
    """A model in transformers' modules, made fast where a trial shows equal bits, though its family may be written."""
    return accelerated(load_plain(read_checkpoint(options), options))


def load_plain_model(options: ModelConfig) -> LoadedModel:
    """Read and probe a model. Its layers run transformers' own code, as they do on a GPU."""
    return load_plain(read_checkpoint(options), options)


def load_plain(checkpoint: Checkpoint, options: ModelConfig) -> LoadedModel:
    """Probe a model that was read."""
    module, device = checkpoint.module, checkpoint.device
    flat = FlatModel(module, cache_argument(module), device)
    use_slopes(module)
    found = probe_layers(flat, checkpoint.config)
    for layer, part in found.recurrent.items():
        part.forward = RecurrentForward(part, layer, found.states[layer])
    return LoadedModel(
        network=flat,
        config=checkpoint.config.to_dict(),
        layers=found.layers,
        states=found.states,
        kernel=choose_kernel(options.attention_kernel, device, KVFormat(checkpoint.dtype), found.options.values()),
        rotation=None,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        **facts_of(checkpoint, options),
    )


def accelerated(model: LoadedModel) -> LoadedModel:
    """Fuse modules while their weights are plain, and pack weights; what a trial refuses stays transformers' own."""
    fuse(model.flat.module)
    pack_linears(model.flat.module)
    return model
