"""Tables of rotary embeddings are those of transformers, bit for bit, also beyond the original context."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from foreword.model.decoder.families import FAMILIES, Fields
from foreword.model.decoder.rotary import Rotary

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 8191, 8192, 20_000, 32_767, 131_071])
PAIRS = 48
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "part of a head": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    # Llama 3.1 and 3.2; Qwen2.5-1M's settings; with numbers that models override
    "llama 3.1": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama 3.2": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with its own numbers": {
        "rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.7,
    },
}  # fmt: skip
SHORT = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + 0.01 * n for n in range(PAIRS)], "long_factor": [1.0 + n for n in range(PAIRS)],
    },
}  # fmt: skip
"""Settings that change beyond the original context, to which such models are limited."""


def config_of(name: str) -> Any:
    """Of phi3 for settings that only phi3 has, else of llama."""
    options = {"hidden_size": 4 * 2 * PAIRS, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    family, longest = "phi3" if name in ("part of a head", "longrope") else "llama", 131_072
    settings = {**SETTINGS, **SHORT}[name]
    return AutoConfig.for_model(family, max_position_embeddings=longest, rope_parameters=settings, **options)


def rotary_of(config: Any) -> list[Rotary]:
    return [Rotary(own, CPU) for own in FAMILIES[config.model_type](Fields(config.to_dict())).rotaries]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*SETTINGS, *SHORT])
def test_tables_have_the_bits_of_transformers(name: str, dtype: torch.dtype) -> None:
    config = config_of(name)
    plain = Phi3RotaryEmbedding(config) if config.model_type == "phi3" else LlamaRotaryEmbedding(config)
    positions = POSITIONS if name in SETTINGS else POSITIONS[POSITIONS < 4096]
    expected = plain(torch.empty(0, dtype=dtype), positions[None])
    [rotary] = rotary_of(config)
    for own, other in zip(rotary.turns(positions, dtype), expected, strict=True):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)
    assert rotary.spec.turned == expected[0].shape[-1]


def test_settings_differ_where_they_should() -> None:
    """Equal tables of all kinds would let a wrong kind pass."""
    tables = [rotary_of(config_of(name))[0].turns(POSITIONS[-1:], torch.float32)[0] for name in SETTINGS]
    assert len({tuple(table.flatten().tolist()) for table in tables}) == len(tables)


def test_layers_with_windows_turn_by_angles_of_their_own() -> None:
    """As Gemma 3 from 4B on: only layers without windows stretch positions."""
    said = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma3_text", head_dim=64, num_hidden_layers=2, layer_types=types, rope_parameters=said
    )
    plain, x = Gemma3RotaryEmbedding(config), torch.empty(0)
    spec = FAMILIES["gemma3_text"](Fields(config.to_dict()))
    rotaries = rotary_of(config)
    for kind, layer in zip(types, spec.layers, strict=True):
        assert layer.rotary is not None
        expected = plain(x, POSITIONS[None], kind)
        assert all(map(torch.equal, rotaries[layer.rotary].turns(POSITIONS, torch.float32), expected))


@pytest.mark.parametrize("family", ["cohere2", "olmo2"])
def test_heads_of_bfloat16_are_turned_as_transformers_turns_them(family: str) -> None:
    """One of them rounds its tables first, the other does not."""
    config = AutoConfig.for_model(family, hidden_size=128, num_attention_heads=4, num_key_value_heads=4)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    embedding = getattr(module, f"{family.capitalize()}RotaryEmbedding")(config)
    heads = torch.randn(1, 4, len(POSITIONS), 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, _ = module.apply_rotary_pos_emb(heads, heads, *embedding(heads, POSITIONS[None]))
    [rotary] = rotary_of(config)
    turned = rotary.turn(heads[0].transpose(0, 1), rotary.turns(POSITIONS, torch.bfloat16))
    assert torch.equal(turned.transpose(0, 1)[None], expected)
