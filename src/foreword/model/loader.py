"""Loading any Hugging Face causal language model with foreword's attention.

Knows checkpoints, configs and module trees; knows no architecture by name: what a model needs is read
from its config and found out by running it once. What cannot be served is refused here, with the layer
and the reason.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from foreword.config import Dtype, ModelConfig
from foreword.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.select import AttentionKernel, make_kernel
from foreword.model.attention import ATTENTION_NAME, PROBE_NAME, ForwardContext, LayoutProbe
from foreword.model.cpu.layer_program import BrokenChainError, LayerChain
from foreword.model.experts import EXPERTS_NAME
from foreword.model.fusion.layers import chain_layers, fuse_layers, unchain_layers
from foreword.model.fusion.modules import ProductPart, fuse
from foreword.model.fusion.packed import PackedLinear, pack_linears
from foreword.model.fusion.straight_pass import StraightPass
from foreword.model.layout import CacheLayout, LayerLayout, LayoutOptions, StateLayout, plan_layout
from foreword.model.quantization import expand_quantized, give_one_type, refuse_gguf
from foreword.model.recurrent import RecurrentForward, StateProbe, StepCache, cache_argument
from foreword.model.weights_progress import weights_progress

logger = logging.getLogger(__name__)

REFUSED_LAYER_TYPES: Mapping[str, str] = {
    "indexed_attention": "it chooses positions with an indexer, whose keys have no place in the cache",
}
"""What is known not to run, and why; any other unknown type is refused because nothing is known about it."""
SUPPORTED_LAYER_TYPES = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "moe",
    "mlp",
)
SUPPORTED = (
    "decoder-only language models of transformers whose layers are full, sliding-window or chunked attention (llama, "
    "qwen2, qwen3, qwen3_moe, mistral, phi3, olmo2, granite, gemma2, gemma3, cohere2, gpt_oss, smollm3, llama4, ...), "
    "recurrent, or both (mamba2, qwen3_next, falcon_h1, granitemoehybrid, bamba, lfm2, ...)"
)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and the facts about it that the engine needs."""

    module: PreTrainedModel
    config: PretrainedConfig
    layers: dict[int, LayerLayout]
    """Attention layers."""
    states: dict[int, StateLayout]
    """Recurrent layers; some are attention layers too."""
    cache_argument: str | None
    """The name under which the model takes its cache; None if it takes none."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_positions: int
    """Longest sequence that the model may be given."""
    eos_token_ids: frozenset[int]
    kernel: AttentionKernel
    straight: list[StraightPass] = field(default_factory=list)
    """The way through the model without its own code, if there is one."""
    exact: bool = True
    """Whether a GPU computes in fixed shapes, so that a row's bits do not depend on the others; a CPU always does."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        keep: Tensor,
        context: ForwardContext | LayoutProbe,
        cache: StepCache | DynamicCache,
    ) -> Tensor:
        """Logits [len(keep), vocab] of the rows `keep` of a flattened batch, [1, tokens] each."""
        arguments = {
            "input_ids": token_ids,
            "position_ids": positions,
            "use_cache": False,
            "logits_to_keep": keep,
            "forward_context": context,
            **({} if self.cache_argument is None else {self.cache_argument: cache}),
        }
        try:
            output = self.module(**arguments)
        except BrokenChainError:  # somebody has changed the model since it was loaded
            self.straight.clear()
            unchain_layers(self.module)
            output = self.module(**arguments)  # what was written to blocks is written again
        logits: Tensor = output.logits[0]
        return logits

    def run_straight(
        self, token_ids: Tensor, positions: Tensor, keep: Tensor, context: ForwardContext
    ) -> Tensor | None:
        """As a call, without the model's own code; rows are ascending, each once. None if this step needs that code."""
        return self.straight[0](token_ids, positions, keep, context) if self.straight else None

    def run_two_tokens(self, context: Any, cache: Any) -> None:
        """Run the model on a batch that means nothing, with what stands in for the context of a step."""
        positions = torch.arange(2, device=self.device)[None]
        with torch.inference_mode():
            self(torch.zeros_like(positions), positions, positions[0, :1], context, cache)

    @property
    def kv_format(self) -> KVFormat:
        """Keys and values are stored in the type that layers compute in."""
        return KVFormat(self.dtype)

    def plan_layout(self, options: LayoutOptions) -> CacheLayout:
        """How this model's layers share blocks."""
        return plan_layout(self.layers, self.states, self.kv_format, options)

    def activation_widths(self) -> list[int]:
        """Last sizes of the activations that pass through elementwise functions."""
        own = {  # of recurrent layers, which run in cells of fixed lengths
            m for layer in self.module.modules() if isinstance(layer.forward, RecurrentForward) for m in layer.modules()
        }
        kinds = (nn.Linear, PackedLinear, ProductPart)
        layers = [m for m in self.module.modules() if isinstance(m, kinds) and m not in own]
        linear = {n for layer in layers for n in (layer.in_features, layer.out_features)}
        experts = {n for name, p in self.module.named_parameters() if p.dim() == 3 for n in p.shape[1:]}
        heads = {n for layer in self.layers.values() for n in (layer.key_dim, layer.value_dim)}
        return sorted(linear - {self.vocab_size} | experts | heads)


def load_model(options: ModelConfig, *, num_threads: int | None = None) -> LoadedModel:
    """Load a checkpoint from a folder or the hub. Raises ModelLoadError or UnsupportedModelError.

    `num_threads` for the CPU's numerical code; None leaves torch's choice.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    device = _device(options.device)
    config = _load_config(options)
    is_quantized = expand_quantized(config, options)
    text_config = config.get_text_config()
    _refuse_unsupported(config, text_config, options)
    dtype = _dtype(options, text_config, device)
    module = _load_weights(options, config, dtype).to(device).eval()
    if is_quantized:
        give_one_type(module, dtype)
    if dtype == torch.float16:  # whatever the config says: the file's tensors may be of another type
        _refuse_overflow(module, options)
    model = LoadedModel(
        module=module,
        config=text_config,
        layers={},
        states={},
        cache_argument=cache_argument(module),
        dtype=dtype,
        device=device,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        max_positions=_max_positions(text_config),
        eos_token_ids=_eos_token_ids(module, text_config),
        kernel=_kernel(options, device, dtype),
        exact=options.exact,
    )
    _probe_layers(model)  # of the plain modules: a probe copies some of them, and packed weights cannot be copied
    if device.type == "cpu":
        fuse(module)
        pack_linears(module)
        fuse_layers(module, model.layers)
        if model.states:
            unchain_layers(module)
        else:
            chains = chain_layers(module, lambda context: model.run_two_tokens(context, DynamicCache()))
            model.straight.extend(_straight_pass(model, chains))
    return model


def _straight_pass(model: LoadedModel, chains: list[LayerChain]) -> Iterator[StraightPass]:
    """The one there is, or none."""

    def run(context: Any, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        return model(token_ids, positions, keep, context, DynamicCache())

    if len(chains) == 1:
        with torch.inference_mode():
            found = StraightPass.find(model.module, chains[0], run, model.vocab_size)
        if found is not None:
            yield found


def _load_config(options: ModelConfig) -> PretrainedConfig:
    name = options.model
    refuse_gguf(name)
    if (os.sep in name or name.startswith((".", "~"))) and not os.path.isdir(name) and name.count("/") != 1:
        raise ModelLoadError(f"model folder {name!r} does not exist; give a folder with config.json or a hub id")
    if os.path.isdir(name) and not os.path.isfile(os.path.join(name, "config.json")):
        raise ModelLoadError(f"model folder {name!r} has no config.json; is it a Hugging Face checkpoint?")
    if os.path.isdir(name) and options.revision is not None:
        raise ConfigError(f"revision={options.revision!r} is of a repository on the hub, and {name!r} is a folder")
    try:
        return AutoConfig.from_pretrained(
            name, revision=options.revision or "main", trust_remote_code=options.trust_remote_code
        )
    except ValueError as error:
        if "does not recognize this architecture" in str(error) or "model_type" in str(error):
            raise UnsupportedModelError(
                f"model {name!r} has an architecture that transformers does not know ({_first_line(error)}); "
                f"supported are {SUPPORTED}"
            ) from error
        raise ModelLoadError(f"the config of model {name!r} cannot be read: {_first_line(error)}") from error
    except OSError as error:
        raise ModelLoadError(
            f"model {name!r} is neither a local folder nor a hub id that can be reached: {_first_line(error)}"
        ) from error


def _refuse_unsupported(config: PretrainedConfig, text: PretrainedConfig, options: ModelConfig) -> None:
    kind = getattr(config, "model_type", "?")
    for layer, layer_type in enumerate(getattr(text, "layer_types", None) or []):
        if layer_type not in SUPPORTED_LAYER_TYPES:
            reason = REFUSED_LAYER_TYPES.get(layer_type, f"it runs {', '.join(SUPPORTED_LAYER_TYPES)}")
            raise UnsupportedModelError(
                f"model {options.model!r} ({kind}): layer {layer} is of type {layer_type!r}, which this version cannot "
                f"run: {reason}. Supported are {SUPPORTED}"
            )
    _refuse_media(config, options)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model {options.model!r} ({kind}) is an encoder-decoder; supported are {SUPPORTED}"
        )


def _refuse_media(config: PretrainedConfig, options: ModelConfig) -> None:
    """Raises UnsupportedModelError for models of images or sound that have no class for text alone."""
    parts = " ".join(getattr(config, "sub_configs", {}))
    media = [medium for part, medium in (("vision", "images"), ("audio", "sound")) if part in parts]
    kind = f"model {options.model!r} ({getattr(config, 'model_type', '?')})"
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if media and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UnsupportedModelError(
            f"{kind} takes {' and '.join(media)} beside text, and transformers has no class that loads its text part "
            f"alone; choose a text-only checkpoint of the family. Supported are {SUPPORTED}"
        )
    if media:
        logger.warning("%s takes %s beside text; only text is served", kind, " and ".join(media))


def _load_weights(options: ModelConfig, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    module: PreTrainedModel
    try:
        with weights_progress(options.model):
            module, report = AutoModelForCausalLM.from_pretrained(
                options.model,
                config=config,
                revision=options.revision or "main",
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                experts_implementation=EXPERTS_NAME if _has_experts(config) else None,
                trust_remote_code=options.trust_remote_code,
                output_loading_info=True,
            )
    except (SafetensorError, EOFError) as error:
        raise ModelLoadError(
            f"the weights of model {options.model!r} are damaged or truncated ({_first_line(error)}); "
            "download them anew"
        ) from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"model {options.model!r} ({getattr(config, 'model_type', '?')}) cannot run with foreword's attention: "
            f"{_first_line(error)}; supported are {SUPPORTED}"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(
            f"the weights of model {options.model!r} cannot be loaded: {_first_line(error)}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:  # transformers has filled them with random numbers
        raise ModelLoadError(
            f"the weights of model {options.model!r} lack {len(missing)} of those that its config.json asks for "
            f"(first: {missing[0]!r}); download it anew, or correct config.json"
        )
    return module


def _has_experts(config: PretrainedConfig) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _probe_layers(model: LoadedModel) -> None:
    """Run two tokens through the model to see what each layer remembers, and with which shapes."""
    probe = LayoutProbe()
    kind = getattr(model.config, "model_type", "?")
    model.module.set_attn_implementation(PROBE_NAME)
    states = StateProbe.attach(model.module, model.module.config)
    try:
        model.run_two_tokens(probe, states.cache)
    except Exception as error:
        raise UnsupportedModelError(
            f"architecture {kind!r} does not accept a flattened batch ({type(error).__name__}: {_first_line(error)}); "
            f"supported are {SUPPORTED}"
        ) from error
    finally:
        states.detach()
        model.module.set_attn_implementation(ATTENTION_NAME)
    layouts = states.layouts()
    probe.problems += _problems(model, probe, layouts) + states.problems()
    if probe.problems:
        raise UnsupportedModelError(
            f"architecture {kind!r} cannot be served: {'; '.join(probe.problems[:3])}. Supported are {SUPPORTED}"
        )
    model.layers.update(sorted(probe.layers.items()))
    model.states.update(sorted(layouts.items()))
    for layer, module in states.modules.items():
        RecurrentForward.install(module, layer, layouts[layer])


def _problems(model: LoadedModel, probe: LayoutProbe, states: Mapping[int, StateLayout]) -> list[str]:
    """What the probes saw and the config does not say, or the other way round."""
    problems = []
    types = list(getattr(model.config, "layer_types", None) or [None] * model.config.num_hidden_layers)
    for layer, layer_type in enumerate(types):
        seen, state = probe.layers.get(layer), states.get(layer)
        kind = f"layer {layer}" + (f" ({layer_type})" if layer_type else "")
        if layer_type in ("moe", "mlp"):
            continue
        if seen is None and state is None:
            problems.append(
                f"{kind} keeps something else than keys and values, or a state in transformers' cache (it never asked "
                "for attention)"
            )
        elif layer_type in ("linear_attention", "conv", "hybrid", "hybrid_sliding") and state is None:
            problems.append(f"{kind} keeps no state in transformers' cache")
        elif seen is not None and layer_type == "chunked_attention" and seen.local_chunk is None:
            problems.append(f"{kind} does not mask its chunks")
        elif seen is not None and seen.local_chunk is not None and layer_type != "chunked_attention":
            problems.append(f"{kind} masks chunks of {seen.local_chunk}, which its type does not say")
    return problems


def _refuse_overflow(module: PreTrainedModel, options: ModelConfig) -> None:
    """Raises ConfigError if a weight is infinite as float16."""
    for name, weight in module.named_parameters():
        if weight.isinf().any():
            raise ConfigError(
                f"dtype='float16' cannot hold the weight {name!r} of model {options.model!r}: numbers beyond 65504 "
                "become infinite; use 'bfloat16' or 'float32'"
            )


def _checkpoint_dtype(text: PretrainedConfig) -> torch.dtype:
    """What the config says; float32 if it says nothing or something that is not offered."""
    said = str(getattr(text, "dtype", None)).removeprefix("torch.")
    offered: torch.dtype = getattr(torch, said if said in get_args(Dtype) and said != "auto" else "float32")
    return offered


def _dtype(options: ModelConfig, text: PretrainedConfig, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        asked: torch.dtype = getattr(torch, options.dtype)
        return asked
    found = _checkpoint_dtype(text)
    return torch.float32 if found == torch.float16 and device.type == "cpu" else found


def _kernel(options: ModelConfig, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """The kernel that is asked for; the CPU's compiled one takes no float16."""
    if device.type != "cpu" or "cpu" in KVFormat(dtype).kernels or options.attention_kernel in ("triton", "reference"):
        return make_kernel(options.attention_kernel, device)
    if options.attention_kernel == "cpu":
        raise ConfigError("attention_kernel='cpu' takes no dtype='float16'; use 'reference', 'bfloat16' or 'float32'")
    logger.warning("float16 on a CPU: attention runs in plain torch and no layer is packed; float32 is faster")
    return make_kernel("reference", device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is unknown: {_first_line(error)}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device here; use 'cpu'")
    return device


def _max_positions(text: PretrainedConfig) -> int:
    """The model's longest sequence.

    Rotary embeddings that change with the length of the sequence would change the KV of a prefix after
    the fact; such models are kept to the length below which they do not.
    """
    longest = int(getattr(text, "max_position_embeddings", None) or 2**20)
    parameters = getattr(text, "rope_parameters", None) or {}
    flat = parameters if "rope_type" in parameters else next(iter(parameters.values()), {})
    if isinstance(flat, dict) and flat.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        original = int(flat.get("original_max_position_embeddings") or longest)
        if original < longest:
            logger.warning(
                "%s rotary embeddings change beyond %d tokens; max_model_len is limited to that",
                flat["rope_type"],
                original,
            )
        return min(original, longest)
    return longest


def _eos_token_ids(module: PreTrainedModel, text: PretrainedConfig) -> frozenset[int]:
    generation: Any = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(text, "eos_token_id", None)
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
