"""float16 from the option to the token: answers beside transformers' own, types, and what is refused.

That a hit has the bits of a miss is shown in test_exactness.py, the GPU's kernels in kernels/test_triton_attention.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.config import ModelConfig
from foreword.errors import ConfigError
from foreword.kernels.select import ReferenceAttention
from foreword.model.layout import LayoutOptions
from foreword.model.loader import load_model
from tiny_models import TinyModels, build_engine, complete, greedy, longest_hit, random_tokens

FAMILIES = ["llama", "gemma2", "gpt_oss", "qwen3_moe", "mamba2", "falcon_h1"]
"""Plain, softcap and windows, sinks and experts, experts, recurrent, both."""
TOLERANCE = 2**-7
"""Logits are around 1; float16 keeps 11 bits, and the oracle rounds attention's scores and weights, we do not."""
NUM_TOKENS = 8


def copy_of(folder: Path, target: Path, **config: object) -> Path:
    """A checkpoint with other entries in its config."""
    shutil.copytree(folder, target)
    known = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**known, **config}))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_is_one_of_the_likeliest_that_transformers_finds(tiny_models: TinyModels, family: str) -> None:
    """And cold and warm answers are the same ones."""
    model, oracle = tiny_models.loaded(family, "float16"), tiny_models.oracle(family, torch.float16)
    rng = np.random.default_rng(1)
    shared = random_tokens(rng, 50)
    prompts = [random_tokens(rng, 1), random_tokens(rng, 33), shared, shared[:40]]
    engine = build_engine(model, num_blocks=256, block_size=4, max_num_batched_tokens=37)
    cold = complete(engine, prompts, greedy(NUM_TOKENS), name="cold")
    warm = complete(engine, prompts, greedy(NUM_TOKENS), name="warm")
    for prompt, first, second in zip(prompts, cold, warm, strict=True):
        answer = first.outputs[0].token_ids
        assert second.outputs[0].token_ids == answer
        assert second.num_cached_tokens == longest_hit(engine, len(prompt), len(prompt))
        logits = oracle.logits(prompt + answer)[len(prompt) - 1 : -1].float()
        lost = logits.amax(-1) - logits[range(NUM_TOKENS), answer]
        assert lost.max() <= TOLERANCE * logits.abs().max(), (prompt, answer, lost)


def test_weights_kv_and_logits_are_float16(tiny_models: TinyModels) -> None:
    half, whole = (tiny_models.loaded("llama", dtype) for dtype in ("float16", "float32"))
    assert half.decoder.parts()["plain"] == len(half.layers) * 4 + 1
    assert half.decoder.dtype == torch.float16
    sizes = [model.plan_layout(LayoutOptions(16)).bytes_per_block for model in (half, whole)]
    assert 2 * sizes[0] == sizes[1]


def test_auto_widens_a_float16_checkpoint_on_cpu_where_that_is_faster(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Without losing a bit; other devices take it as it is."""
    from foreword.model.checkpoint.facts import choose_dtype

    folder = copy_of(tiny_models.folder("llama"), tmp_path / "half", dtype="float16")
    options = ModelConfig(str(folder))
    model = load_model(options)
    assert model.dtype == torch.float32
    assert choose_dtype(options, "float16", torch.device("cpu")) == torch.float32
    assert choose_dtype(options, "float16", torch.device("cuda")) == torch.float16


@pytest.mark.parametrize("said", ["bfloat16", "float16"])
def test_a_weight_beyond_float16_is_refused_by_its_name(tiny_models: TinyModels, tmp_path: Path, said: str) -> None:
    """Whatever type its config says that the file has."""
    folder = copy_of(tiny_models.folder("llama"), tmp_path / "large", dtype=said)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = 7e4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"dtype='float16' cannot hold the weight '{name}'.*use 'bfloat16'"):
        load_model(ModelConfig(str(folder), dtype="float16"))
    load_model(ModelConfig(str(folder), dtype="bfloat16"))


def test_attention_on_cpu_is_plain_torch_and_says_so(tiny_models: TinyModels, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tiny_models.folder("llama"))
    model = load_model(ModelConfig(folder, dtype="float16"))
    assert isinstance(model.kernel, ReferenceAttention)
    assert "several times slower: the compiled kernel takes no dtype='float16'; use 'float32'" in caplog.text
    with pytest.raises(ConfigError, match="attention_kernel='cpu' takes no dtype='float16'"):
        load_model(ModelConfig(folder, dtype="float16", attention_kernel="cpu"))
