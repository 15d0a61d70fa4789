"""A model over KV in codes: what it computes, and how far that is from KV in the model's own type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from foreword.config import ModelConfig
from foreword.kernels.kv_format import decode, encode
from foreword.kernels.select import ReferenceAttention
from foreword.model.checkpoint.read import read_checkpoint
from foreword.model.kv_quality import both_formats, quality, tokens_a_gigabyte
from foreword.model.loader import load_model, load_plain
from foreword.text import Tokenizer
from real_models import real_model
from tiny_models import TinyModels, random_tokens

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_model_over_codes_is_the_model_over_what_is_read_of_them(tiny_models: TinyModels) -> None:
    """Plain attention over float32 that was coded and decoded before it was written has the same bits."""
    options = ModelConfig(str(tiny_models.folder("qwen2")), dtype="float32")
    plain = load_plain(read_checkpoint(options), options)
    pools = both_formats(replace(plain, kernel=ReferenceAttention()), 300)
    own, coded = pools.values()
    write = own.storage.write

    def write_decoded(layer: int, slots: torch.Tensor, *rows: torch.Tensor) -> None:
        write(layer, slots, *(decode(*encode(part)) for part in rows))

    own.storage.write = write_decoded  # type: ignore[method-assign, assignment]
    batch = own.batch([0], [random_tokens(np.random.default_rng(0), 300)])
    assert torch.equal(own.logits(batch, range(300)), coded.logits(batch, range(300)))


@pytest.mark.slow
def test_a_real_model_keeps_its_distributions() -> None:
    """In float32; docs/decisions/0056-kv-in-eight-bits.md has the figure of bfloat16."""
    folder, docs = real_model("smollm2"), Path(__file__).resolve().parents[2] / "docs"
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    paths = sorted(docs.glob("guides/*.md"))[:10]
    texts = [tokenizer.encode(path.read_text())[:256].tolist() for path in paths]
    model = load_model(ModelConfig(str(folder), dtype="float32"))
    found = quality(model, texts)
    assert (found.num_texts, found.num_tokens) == (10, 2560)
    assert 0 < found.mean_divergence <= 0.002
    sizes = tokens_a_gigabyte(model)
    assert sizes["int8"] >= 1.9 * sizes["own"]
