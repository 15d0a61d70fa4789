"""Models whose own code biases scores by distance: which modules are replaced, and how near their logits are.

That their tokens are transformers' is shown in test_oracle.py, that hits have the bits of misses in test_exactness.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from foreword.batch import Batch
from foreword.config import ModelConfig
from foreword.errors import ConfigError, UnsupportedModelError
from foreword.kernels.select import ReferenceAttention
from foreword.model.foreign.alibi import use_slopes
from foreword.model.foreign.attention import ATTENTION_NAME
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.probe import LayoutProbe, probe_layers, probing_attention
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel, load_model
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage
from tiny_models import BASE, RECIPES, TinyModels, random_tokens

NUM_TOKENS = 600


@pytest.fixture(params=["bloom", "mpt"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def fresh(family: str) -> Any:
    """A model as transformers makes it."""
    config = AutoConfig.for_model(family, **{**BASE, **RECIPES[family].options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


def attention_modules(model: PreTrainedModel) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith((".self_attention", ".attn"))]


def all_logits(model: LoadedModel, token_ids: list[int]) -> Tensor:
    """Logits at every position of one request."""
    layout = model.plan_layout(LayoutOptions(block_size=16))
    num_blocks = -(-len(token_ids) // 16)
    positions = np.arange(len(token_ids), dtype=np.int32)
    starts, tables = np.array([0, len(token_ids)], np.int32), (np.arange(num_blocks, dtype=np.int32)[None],)
    batch = Batch.bare(np.array(token_ids, np.int32), positions, starts, tables)
    runner = ModelRunner(model, KVStorage(layout, num_blocks, model.device))
    return runner.forward(batch, np.arange(len(token_ids)))


def test_float32_logits_are_those_of_transformers(tiny_models: TinyModels, family: str) -> None:
    tokens = random_tokens(np.random.default_rng(1), NUM_TOKENS)
    ours, theirs = all_logits(tiny_models.loaded(family), tokens).cpu(), tiny_models.oracle(family).logits(tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(tiny_models: TinyModels, family: str) -> None:
    """Bloom's own code rounds biases to bfloat16, and is ten times as far off after 600 tokens."""
    tokens = random_tokens(np.random.default_rng(2), NUM_TOKENS)
    exact = tiny_models.oracle(family).logits(tokens)
    ours = all_logits(tiny_models.loaded(family, "bfloat16"), tokens).float().cpu()
    theirs = tiny_models.oracle(family, torch.bfloat16).logits(tokens).float()
    assert (ours - exact).pow(2).mean() <= 1.2 * (theirs - exact).pow(2).mean()


def test_every_attention_module_is_replaced(family: str) -> None:
    model = fresh(family)
    assert len(attention_modules(model)) == 3
    use_slopes(model)
    assert all("forward" in vars(module) for module in attention_modules(model))


def test_models_without_biases_stay_as_they_are() -> None:
    model = fresh("llama")
    use_slopes(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_module_that_computes_something_else_is_left_alone_and_the_model_refused() -> None:
    model = fresh("bloom")
    changed = attention_modules(model)[1]
    changed.beta = 0.5  # of the bias
    use_slopes(model)
    assert ["forward" in vars(module) for module in attention_modules(model)] == [True, False, True]
    flat = FlatModel(model, "past_key_values", torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=r"layer 1 .*never asked for attention"):
        probe_layers(flat, model.config)


def test_a_bias_that_is_not_linear_is_refused() -> None:
    model = fresh("mpt")
    build = model.transformer.build_mpt_alibi_tensor
    model.transformer.build_mpt_alibi_tensor = lambda *args, **options: -build(*args, **options).square()
    use_slopes(model)
    with pytest.raises(UnsupportedModelError, match="is not linear in the position"):
        probe_layers(FlatModel(model, "past_key_values", torch.device("cpu")), model.config)


def test_a_layer_that_asks_for_slopes_itself_is_noted() -> None:
    layer = torch.nn.Identity()
    layer.layer_idx = 0
    probe, heads = LayoutProbe(), torch.zeros(1, 2, 3, 8)
    probing_attention(layer, heads, heads, heads, None, forward_context=probe)
    assert probe.options[0].slopes is None
    probing_attention(layer, heads, heads, heads, None, forward_context=probe, alibi_slopes=torch.ones(2))
    assert probe.options[0].slopes is not None


@pytest.mark.usefixtures("on_cpu")
def test_attention_runs_in_the_reference_on_a_cpu(tiny_models: TinyModels, family: str) -> None:
    """The compiled kernel takes no slopes, and is refused where it is asked for."""
    assert isinstance(tiny_models.loaded(family).kernel, ReferenceAttention)
    with pytest.raises(ConfigError, match="linear biases, or leave the choice to attention_kernel='auto'"):
        load_model(ModelConfig(str(tiny_models.folder(family)), attention_kernel="cpu"))


def test_no_position_is_served_for_which_mpt_has_no_bias(tiny_models: TinyModels) -> None:
    assert tiny_models.loaded("mpt").max_positions == 640
