"""Checkpoints with random weights. Their answers mean nothing, but take as long as those of real checkpoints.

There is no tokenizer, so such a model takes token ids.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.errors import ConfigError

BIAS_STD = 0.02
ROPE_THETA = 1e6


@dataclass(frozen=True, slots=True)
class RandomModelShape:
    """Sizes of a Qwen2 decoder with tied embeddings."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    """Tokens of the longest sequence, prompt and answer."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of a random model is too small; use at least 1")
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise ConfigError(
                f"hidden_size={self.hidden_size} does not split into num_heads={self.num_heads} of an even size; "
                "choose a multiple of twice the number of heads"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; choose one that is"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_linear_parameters(self) -> int:
        """Parameters of all layers' matrices, without the output head: every token is multiplied with them."""
        key_value = self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * key_value
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_parameters(self) -> int:
        """Parameters of the layers' matrices and of the embedding (also the output head), without norms and biases."""
        return self.num_linear_parameters + self.vocab_size * self.hidden_size


QWEN2_0_5B = RandomModelShape(24, 896, 14, 2, 4864, 32_000, 32_768)
"""Qwen2-0.5B with a vocabulary of 32,000: 387M parameters."""

DEMO_SHAPE = RandomModelShape(12, 768, 12, 2, 2048, 32_000, 32_768)
"""98M parameters: prefill takes seconds on two CPU cores, and a demo still ends soon."""


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """The precision that this processor multiplies fast: bfloat16 with instructions for it, else float32.

    On a core with AVX2 alone (Zen 3) torch multiplies 68 GFLOP/s in float32 and 10 in bfloat16.
    """
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def save_random_model(
    folder: Path,
    shape: RandomModelShape,
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    seed: int = 0,
) -> None:
    """Write a Qwen2 checkpoint of this shape (config.json, model.safetensors) into `folder`; make the folder if needed.

    Equal arguments give equal weights. Matrices are normal with variance 1 / inputs, so activations stay around 1
    in every layer. Attention scores have a standard deviation of about 1, so a token depends on its whole context.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = dict(_weights(shape, getattr(torch, dtype), generator))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype), indent=2) + "\n", encoding="utf-8")


def _weights(shape: RandomModelShape, dtype: torch.dtype, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Qwen2 checkpoint with their names."""

    def normal(*size: int, std: float | None = None) -> Tensor:
        std = 1.0 / math.sqrt(size[-1]) if std is None else std
        return torch.empty(size, dtype=dtype).normal_(0.0, std, generator=generator)

    hidden, inner, key_value = shape.hidden_size, shape.intermediate_size, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", normal(shape.vocab_size, hidden)
    yield "model.norm.weight", torch.ones(hidden, dtype=dtype)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=dtype)
        for name, size in (("q_proj", hidden), ("k_proj", key_value), ("v_proj", key_value)):
            yield f"{prefix}.self_attn.{name}.weight", normal(size, hidden)
            yield f"{prefix}.self_attn.{name}.bias", normal(size, std=BIAS_STD)
        yield f"{prefix}.self_attn.o_proj.weight", normal(hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", normal(inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", normal(hidden, inner)


def _config(shape: RandomModelShape, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": dtype,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
