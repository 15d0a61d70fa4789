"""Loading any Hugging Face causal language model: in foreword's own decoder, or in transformers' modules."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from foreword.config import Dtype, ModelConfig
from foreword.errors import ConfigError, ForewordError, ModelLoadError, UnsupportedModelError
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.select import AttentionKernel, choose_kernel
from foreword.model.adapters.loaded import LoadedAdapters
from foreword.model.checkpoint.gguf.unfold import gguf_files
from foreword.model.checkpoint.picture_models import refuse_other_form
from foreword.model.checkpoint.stored import StoredModel, check_shapes, quantized_as, read_stored
from foreword.model.checkpoint.tensors import IN_FLOAT32, UnreadableError, check_complete
from foreword.model.cpu.coded_product import INTEGERS, CodedRows, Weight
from foreword.model.decoder.decoder import Decoder
from foreword.model.decoder.families import UnwrittenError, find_spec
from foreword.model.decoder.linear import plain_weights
from foreword.model.decoder.network import experts_apart
from foreword.model.deviation import Beginning, LinkDeviations
from foreword.model.embeds import EmbedsReader
from foreword.model.layout import CacheLayout, LayerLayout, LayoutOptions, StateLayout, plan_layout
from foreword.model.rotation import KeyRotation, check_linkable, refuse_links
from foreword.model.spec import DecoderSpec
from foreword.model.step import Step
from foreword.model.vision.encoded import EncodedPictures, RowsOfPictures
from foreword.model.vision.families import load_vision

if TYPE_CHECKING:
    from foreword.model.checkpoint.read import Checkpoint
    from foreword.model.foreign.flat_model import FlatModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the facts about it that the engine needs."""

    network: Decoder | FlatModel
    """foreword's own decoder, or a model of transformers."""
    device: torch.device
    config: Mapping[str, Any]
    """The facts that determine the results: a decoder's spec, or the fields of transformers' config."""
    layers: dict[int, LayerLayout]
    """Attention layers."""
    states: dict[int, StateLayout]
    """Recurrent layers; some are attention layers too."""
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    """The length of the longest sequence that the model accepts."""
    eos_token_ids: frozenset[int]
    kv_format: KVFormat
    """The format in which keys and values are stored."""
    kernel: AttentionKernel
    rotation: KeyRotation | None
    """The way to move cached keys to other positions; None: nobody asked for links."""
    exact: bool
    """Whether a GPU computes in fixed shapes, so that a row's bits depend on no other row. On a CPU, bits never depend
    on other rows.
    """
    pictures: EncodedPictures | None = None
    """The encoder of pictures; None if the model takes no pictures."""
    lacks_pillow: bool = False
    """Whether the model would take pictures if Pillow were installed."""

    def forward(self, step: Step) -> Tensor:
        """Write the step's KV; return logits [num_kept, vocab], or only the logits of the step's `columns`."""
        if isinstance(self.network, Decoder):
            return self.network(step)
        logits = self.network.compute(step)
        return logits if step.columns is None else logits[:, step.columns]

    @property
    def decoder(self) -> Decoder:
        """foreword's own decoder; only for models of a family that `decoder/families.py` has."""
        assert isinstance(self.network, Decoder), "a model of transformers"
        return self.network

    @property
    def flat(self) -> FlatModel:
        """The model of transformers; only for models that run in its modules."""
        assert not isinstance(self.network, Decoder), "a written decoder"
        return self.network

    @property
    def hidden_size(self) -> int | None:
        """Width of the rows that the head gets from the last norm; None if it is unknown."""
        return (
            self.network.spec.hidden_size if isinstance(self.network, Decoder) and self.device.type == "cpu" else None
        )

    @property
    def code(self) -> dict[str, str]:
        """The code that computes the model: a family of foreword's decoder, or a class of transformers."""
        return {"family": self.network.spec.family} if isinstance(self.network, Decoder) else self.network.code

    @property
    def is_packed(self) -> bool:
        """Whether a row of every matrix product has the same bits, however many rows there are."""
        return self.network.is_packed

    @property
    def routes_in_float32(self) -> bool:
        """Whether the router that chooses experts multiplies in float32, whatever the model's dtype."""
        experts = self.network.spec.experts if isinstance(self.network, Decoder) else None
        return experts is not None and experts.routes_in_float32

    def parts(self) -> Counter[str]:
        """The number of matrix products in each format of weights."""
        return self.network.parts()

    def plan_layout(self, options: LayoutOptions) -> CacheLayout:
        """Plan how this model's layers share blocks."""
        return plan_layout(self.layers, self.states, self.kv_format, options)

    def can_link(self, layout: CacheLayout) -> bool:
        """Whether tokens may be moved between blocks of this layout; False if nobody asked for links.

        Raises UnsupportedModelError if somebody asked for links and the layout does not allow them.
        """
        if self.rotation is not None:
            check_linkable(layout)
        return self.rotation is not None

    def deviations(self, max_model_len: int, sink_token_ids: Sequence[int]) -> LinkDeviations | None:
        """Return an object that measures the deviation of linked tokens; None if nobody asked for links.

        `max_model_len`: tokens of the longest prompt and its answer; `sink_token_ids`: the tokens before every prompt.
        """
        if self.rotation is None:
            return None
        beginning = Beginning(self.decoder) if len(self.layers) > 1 else None
        return LinkDeviations(beginning, self.rotation, self.vocab_size, max_model_len, sink_token_ids)

    def adapters(self, options: ModelConfig) -> LoadedAdapters | None:
        """The table of adapters; None without `enable_lora`. Raises ConfigError for a model that takes no adapters."""
        if not options.enable_lora:
            return None
        if not isinstance(self.network, Decoder):
            raise ConfigError(
                "enable_lora=True needs a model of a written family on a CPU, and this one runs in transformers' "
                "modules; leave it out, and merge the adapter into the weights"
            )
        if self.network.spec.latent is not None:
            raise ConfigError("enable_lora=True, and models with latent KV take no adapters yet; leave it out")
        if self.pictures is not None or self.lacks_pillow:
            raise ConfigError("enable_lora=True, and models with pictures take no adapters yet; leave it out")
        return LoadedAdapters(self.network.spec, options.max_loras, options.max_lora_rank)

    def embeds_reader(self, options: ModelConfig, max_rows: int, block_size: int) -> EmbedsReader | None:
        """A reader of prompt embeddings; None if not enabled. Raises ConfigError if the model takes no embeddings."""
        if not options.enable_prompt_embeds:
            return None
        if self.hidden_size is None or self.pictures is not None or self.lacks_pillow:
            raise ConfigError(
                "enable_prompt_embeds=True needs a decoder of a written family on a CPU that takes no pictures; leave "
                "it out"
            )
        return EmbedsReader(self.dtype, self.hidden_size, max_rows, block_size)

    def activation_widths(self) -> list[int]:
        """The widths (last dimensions) of the activations that pass through elementwise functions."""
        if isinstance(self.network, Decoder):
            return self.network.activation_widths
        heads = {n for layer in self.layers.values() for n in (layer.key_dim, layer.value_dim)}
        return sorted(self.network.widths() - {self.vocab_size} | heads)


def _read_written(options: ModelConfig) -> tuple[StoredModel, DecoderSpec]:
    """Read a model that foreword's decoder computes. Raises UnreadableError or UnwrittenError for other models."""
    stored = read_stored(options)
    spec = _spec_of(stored)
    check_shapes(spec, stored.weights)
    return stored, spec


def why_not_written(folder: Path, dtype: Dtype = "auto") -> str | None:
    """Return why a folder's model runs in transformers' modules on a CPU. Reads headers only.

    None: the model runs in foreword's own decoder, or nowhere. Raises ModelLoadError if weights are missing, because
    the reason is unknown then.
    """
    check_complete(folder)
    try:
        _read_written(ModelConfig(str(folder), dtype=dtype))
    except (UnreadableError, UnwrittenError) as reason:
        return str(reason)
    except ForewordError:  # the model runs nowhere
        return None
    return None


def load_model(options: ModelConfig) -> LoadedModel:
    """Load a checkpoint from a folder or the hub. Raises ConfigError, ModelLoadError or UnsupportedModelError."""
    try:
        stored, spec = _read_written(options)
    except (UnreadableError, UnwrittenError) as reason:
        refuse_other_form(Path(options.model), reason)
        if gguf_files(Path(options.model)):
            raise UnsupportedModelError(
                f"the GGUF file of model {options.model!r} cannot run: {reason}; use its safetensors checkpoint"
            ) from reason
        method = quantized_as(Path(options.model))
        if method is not None:
            raise UnsupportedModelError(
                f"the weights of model {options.model!r} are quantized as {method!r}, which foreword reads for its "
                f"written families on a CPU; it does not run because of {reason}: choose another checkpoint"
            ) from reason
        return _load_with_transformers(options, reason)
    vision = None
    if stored.vision is not None:
        vision = load_vision(stored.vision, stored.dtype, spec, max_tokens=options.max_picture_tokens)
    model = _written(spec, stored.weights, stored, options, stored.values.get("quantization_config"))
    if vision is None:
        return replace(model, lacks_pillow=stored.vision is not None)
    rows = RowsOfPictures((1 + vision.num_added) * spec.hidden_size, stored.dtype)
    return replace(model, pictures=EncodedPictures(vision, rows, options.picture_cache_bytes))


def _has_tied_head(weights: Mapping[str, Weight]) -> bool:
    """Whether the head in a file equals the embedding's table. Raises OSError."""
    table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    if isinstance(table, CodedRows) and isinstance(head, CodedRows):
        return table.equals(head)
    return torch.equal(*plain_weights([table, head]))


def _spec_of(stored: StoredModel) -> DecoderSpec:
    try:
        return find_spec(stored.values, stored.weights)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # a field that makes no sense
        raise UnreadableError(f"a config that contradicts itself ({error})") from error


def load_foreign_model(options: ModelConfig) -> LoadedModel:
    """Load any model in transformers' modules, even one for foreword's decoder; fuse modules if bits stay equal."""
    from foreword.model.checkpoint.read import read_checkpoint

    return _accelerated(load_plain(read_checkpoint(options), options))


def _load_with_transformers(options: ModelConfig, reason: Exception) -> LoadedModel:
    """Have transformers read a checkpoint. `reason`: why foreword does not read it."""
    from foreword.model.checkpoint.read import read_checkpoint

    if options.weight_arithmetic == "int8":
        _refuse_integers(options, f"transformers reads it, because of {reason}")
    try:
        checkpoint = read_checkpoint(options)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; foreword does not read it by itself, because of {reason}") from error
    if checkpoint.device.type != "cpu":
        if options.allow_links:
            raise ConfigError(f"allow_links=True needs a CPU, and the model is on {checkpoint.device}; leave it out")
        return load_plain(checkpoint, options)
    try:
        model = _load_written(checkpoint, options)
        logger.info("transformers reads the model's files, because of %s", reason)
        return model
    except UnwrittenError as unknown:
        if options.allow_links:
            refuse_links(f"foreword's decoder does not know {unknown}, so how the keys turn is unknown")
        logger.info("the model runs in transformers' modules: foreword's decoder does not know %s", unknown)
    return _accelerated(load_plain(checkpoint, options))


def load_plain(checkpoint: Checkpoint, options: ModelConfig) -> LoadedModel:
    """Probe a model that transformers has read. Its layers run transformers' own code, as all layers do on a GPU."""
    from foreword.model.foreign.alibi import use_slopes
    from foreword.model.foreign.flat_model import FlatModel
    from foreword.model.foreign.probe import probe_layers
    from foreword.model.foreign.recurrent import RecurrentForward, cache_argument

    module, device = checkpoint.module, checkpoint.device
    flat = FlatModel(module, cache_argument(module), device)
    use_slopes(module)
    remembered, kv_format = probe_layers(flat, checkpoint.config), _kv_format_of(checkpoint, options)
    for layer, part in remembered.recurrent.items():
        part.forward = RecurrentForward(part, layer, remembered.states[layer])
    return LoadedModel(
        network=flat,
        config=checkpoint.config.to_dict(),
        layers=remembered.layers,
        states=remembered.states,
        kernel=choose_kernel(options.attention_kernel, device, kv_format, remembered.options.values()),
        kv_format=kv_format,
        rotation=None,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        **_facts_of(checkpoint, options),
    )


def _accelerated(model: LoadedModel) -> LoadedModel:
    """Fuse modules while their weights are plain, then pack weights. Modules that fail a trial stay as they are."""
    from foreword.model.foreign.modules import fuse, pack_linears

    fuse(model.flat.module)
    pack_linears(model.flat.module)
    return model


def _load_written(checkpoint: Checkpoint, options: ModelConfig) -> LoadedModel:
    """Make a decoder from a model that transformers has read. Raises UnwrittenError if no spec describes the model."""
    module = checkpoint.module
    detached = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
    tensors = experts_apart(detached, checkpoint.config.model_type)
    if len({tensor.dtype for name, tensor in tensors.items() if not name.endswith(IN_FLOAT32)}) > 1:
        raise UnwrittenError("weights of several types")
    values = checkpoint.config.to_dict()
    if type(module).__module__.startswith("transformers."):
        values.pop("auto_map", None)  # it names the checkpoint's own code, which does not run
    spec = find_spec(values, tensors)
    head, embedding = tensors.get("lm_head.weight"), tensors["model.embed_tokens.weight"]
    if spec.tied and head is not None and head.data_ptr() != embedding.data_ptr():
        spec = replace(spec, tied=False)  # transformers ties no weights that differ in the file, whatever configs say
    for part in module.modules():
        part._parameters.clear()  # each weight is freed when it has been packed
    weights: dict[str, Weight] = {**tensors}
    del tensors, detached, head, embedding
    return _written(spec, weights, checkpoint, options)


def _written(
    spec: DecoderSpec,
    weights: MutableMapping[str, Weight],
    read: StoredModel | Checkpoint,
    options: ModelConfig,
    quantized: object = None,
) -> LoadedModel:
    """Build the decoder of a spec. Its weights are removed from the mapping.

    `quantized`: the config's entry about quantized weights; the model's KV depends on it.
    """
    kv_format = _kv_format_of(read, options, latent=spec.latent is not None)
    try:
        if spec.tied and "lm_head.weight" in weights:
            spec = replace(spec, tied=_has_tied_head(weights))
        if spec.tied:
            weights.pop("lm_head.weight", None)
        decoder = Decoder(spec, weights)
    except OSError as error:  # codes are read when they are packed
        raise ModelLoadError(f"the weights of model {options.model!r} cannot be read: {error}; start again") from error
    except UnreadableError as error:
        raise UnsupportedModelError(f"the weights of model {options.model!r} are not read: {error}") from error
    facts = {} if quantized is None else {"quantization_config": quantized}
    if options.weight_arithmetic == "int8":
        facts["weight_arithmetic"] = "int8"
        _report_integers(decoder.parts(), options)
    return LoadedModel(
        network=decoder,
        config={**asdict(spec), **facts},
        layers=decoder.layouts,
        states={},
        kernel=choose_kernel(options.attention_kernel, read.device, kv_format, decoder.options),
        kv_format=kv_format,
        rotation=KeyRotation.of(spec, decoder.rotaries) if options.allow_links else None,
        vocab_size=spec.vocab_size,
        **_facts_of(read, options),
    )


def _report_integers(parts: Counter[str], options: ModelConfig) -> None:
    """Log which formats are multiplied in integers, and which exactly. Raises ConfigError if none is in integers."""
    formats = list(dict.fromkeys(name for part in parts if part != "in one program" for name in part.split(", ")))
    integers = [name.removesuffix(INTEGERS) for name in formats if name.endswith(INTEGERS)]
    others = [name for name in formats if not name.endswith(INTEGERS)]
    if not integers:
        _refuse_integers(options, f"its weights are {', '.join(others)}")
    exact = f"; exactly: {', '.join(others)}" if others else ""
    logger.info("weights multiplied in integers: %s%s", ", ".join(integers), exact)


def _refuse_integers(options: ModelConfig, reason: str) -> NoReturn:
    """Raise ConfigError: the model cannot run in integers. The error says which models can."""
    raise ConfigError(
        f"weight_arithmetic='int8' needs weights in codes of whole numbers (GGUF, GPTQ, AWQ, MXFP4), a written "
        f"family, and a CPU with AVX2; model {options.model!r} has no such products: {reason}; leave it out"
    )


def _kv_format_of(read: StoredModel | Checkpoint, options: ModelConfig, *, latent: bool = False) -> KVFormat:
    """The format of keys and values: the type that layers compute in, unless the options name another.

    Raises ConfigError if latent KV would be stored in int8.
    """
    if options.kv_cache_dtype != "int8":
        return KVFormat(read.dtype, latent)
    if latent:
        raise ConfigError(
            f"kv_cache_dtype='int8' has one scale for a row, and the KV of model {options.model!r} is latent: parts of "
            "a row differ in size; leave it out, as latent KV is small already"
        )
    return KVFormat(torch.int8)


def _facts_of(read: StoredModel | Checkpoint, options: ModelConfig) -> dict[str, Any]:
    """Return the fields of `LoadedModel` that do not depend on the code that runs the checkpoint."""
    names = ("device", "dtype", "max_positions", "eos_token_ids")
    return {"exact": options.exact, **{name: getattr(read, name) for name in names}}
