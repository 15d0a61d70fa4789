"""A pass without the model's own code gives the bits of a pass with it, and is taken only where that has been seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache

from foreword.config import ModelConfig
from foreword.kernels.products.units import NUM_ROWS
from foreword.kernels.runtime.threads import Program
from foreword.model.cpu.layer_program import LayerChain
from foreword.model.cpu.product import ProductOperation, can_multiply
from foreword.model.fusion.layers import FusedForward
from foreword.model.fusion.straight_pass import StraightPass
from foreword.model.loader import LoadedModel, load_model
from tiny_models import Recipe, TinyModels, build_engine, complete, greedy, random_tokens, save_model

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this processor has no instructions for such products")
Run = Callable[..., Tensor]


def load(tiny_models: TinyModels, name: str = "qwen3") -> LoadedModel:
    return load_model(ModelConfig(str(tiny_models.folder(name)), dtype="bfloat16"))


def answers(model: LoadedModel) -> list[object]:
    """Of prompts in chunks (steps without logits), with logits of some prompt rows, decoding, alone and together."""
    rng = np.random.default_rng(3)
    engine = build_engine(model, num_blocks=96, max_num_batched_tokens=64)
    reporting = complete(engine, [random_tokens(rng, 9)], greedy(4, logprobs=2, prompt_logprobs=1), name="reporting")
    prompts = [random_tokens(rng, length) for length in (1, 5, 40, 150)]
    outputs = reporting + complete(engine, prompts, greedy(8, logprobs=3))
    outputs += complete(engine, [prompts[3]], greedy(2, prompt_logprobs=0), name="again")
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_a_straight_pass_gives_the_bits_of_the_models_own_code(
    tiny_models: TinyModels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_models, name)
    assert len(model.straight) == 1
    with monkeypatch.context() as patch:
        patch.delattr(LoadedModel, "__call__")  # which runs the model's own code
        found = answers(model)
    model.straight.clear()
    assert answers(model) == found


def test_the_last_layer_computes_what_is_asked_for(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    model, run, seen = load(tiny_models), Program.run, []

    def note(program: Program, number: int | None = None) -> None:
        run(program, number)
        gates = [one for one in program.operations if isinstance(one, ProductOperation)][2::4]
        seen.append((number, int(gates[0].arguments[NUM_ROWS]), int(gates[-1].arguments[NUM_ROWS])))

    engine = build_engine(model, num_blocks=96, max_num_batched_tokens=64)
    layers = parts(model)[0].layers
    monkeypatch.setattr(Program, "run", note)
    complete(engine, [random_tokens(np.random.default_rng(0), 100)], greedy(1))
    (without_logits, *_), (everything, first, last) = seen
    assert without_logits == 10 * len(layers) - 7  # keys and values of the last layer, and nothing behind them
    assert (everything, first, last) == (None, 36, 1)


def parts(model: LoadedModel) -> tuple[LayerChain, Run]:
    """What `StraightPass.find` is given."""
    forwards = (module.forward for module in model.module.modules() if isinstance(module.forward, FusedForward))
    chain = next(forward.chain for forward in forwards if forward.chain is not None)

    def run(context: object, tokens: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(tokens, positions, keep, context, DynamicCache())  # type: ignore[arg-type]

    return chain, run


CHANGES: dict[str, Callable[[Run], Run]] = {
    "logits are scaled": lambda run: lambda *given: run(*given) * 1.5,
    "one logit is another": lambda run: lambda *given: run(*given).index_fill(1, torch.tensor([3]), 0.25),
    "logits are float32": lambda run: lambda *given: run(*given).float(),
    "positions are moved": lambda run: (
        lambda context, tokens, positions, keep: run(context, tokens, positions + 1, keep)
    ),
    "tokens are changed": lambda run: (
        lambda context, tokens, positions, keep: run(context, tokens ^ 1, positions, keep)
    ),
    "other rows are kept": lambda run: (
        lambda context, tokens, positions, keep: run(context, tokens, positions, keep - 1)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_does_anything_else_runs_its_own_code(
    tiny_models: TinyModels, change: Callable[[Run], Run]
) -> None:
    model = load(tiny_models)
    chain, run = parts(model)
    assert StraightPass.find(model.module, chain, run, model.vocab_size) is not None
    assert StraightPass.find(model.module, chain, change(run), model.vocab_size) is None


@pytest.mark.parametrize("path", ["lm_head", "model.norm", "model.layers.1", "model.embed_tokens", "model", ""])
def test_a_module_that_is_hooked_later_has_its_say(tiny_models: TinyModels, path: str) -> None:
    model = load(tiny_models)
    before = answers(model)

    def change(module: nn.Module, arguments: object, output: object) -> None:
        del module, arguments
        rows = output if isinstance(output, Tensor) else output[0]  # type: ignore[index]
        rows.mul_(1.25)
        calls.append(1)

    calls: list[int] = []
    handle = model.module.get_submodule(path).register_forward_hook(change)
    changed = answers(model)
    assert calls
    assert changed != before
    handle.remove()
    assert answers(model) == before


def test_a_kernel_without_a_program_is_served_by_the_models_own_code(tiny_models: TinyModels) -> None:
    config = ModelConfig(str(tiny_models.folder("qwen3")), dtype="bfloat16", attention_kernel="reference")
    model = load_model(config)
    assert len(answers(model)) == 6
    assert model.straight[0].chain._head is not None
    assert not model.straight[0].chain._is_for_storage


class Doubled(nn.Module):
    """What another module gives, twice."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.plain(rows) * 2
        return result


@pytest.mark.parametrize("path", ["lm_head", "model.norm", "model.embed_tokens"])
def test_a_module_that_is_put_in_anothers_place_later_has_its_say(tiny_models: TinyModels, path: str) -> None:
    found, expected = load(tiny_models), load(tiny_models)
    expected.straight.clear()
    before = answers(found)
    for model in (found, expected):
        model.module.set_submodule(path, Doubled(model.module.get_submodule(path)))
    assert answers(found) == answers(expected)
    assert path == "model.norm" or answers(found) != before


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.1"])
def test_a_forward_that_is_replaced_later_has_its_say(tiny_models: TinyModels, path: str) -> None:
    model = load(tiny_models)
    before, module = answers(model), model.module.get_submodule(path)
    forward = module.forward
    module.forward = lambda rows, **others: forward(rows, **others) * 1.25  # type: ignore[method-assign]
    assert answers(model) != before


def test_a_hook_of_all_modules_sees_those_of_a_step(tiny_models: TinyModels) -> None:
    model = load(tiny_models)
    seen: list[nn.Module] = []
    with register_module_forward_hook(lambda module, arguments, output: seen.append(module)):
        answers(model)
    assert model.module.get_submodule("lm_head") in seen


@pytest.mark.parametrize("ropes", [[1, 0], [0, 1]])
def test_a_model_of_which_one_layer_alone_is_fused_is_loaded(tmp_path: Path, ropes: list[int]) -> None:
    """The others are transformers' own, which no trial can run."""
    layers = {"num_hidden_layers": 2, "no_rope_layers": ropes, "layer_types": ["full_attention"] * 2}
    folder = save_model(tmp_path, Recipe("smollm3", {"head_dim": 32, **layers}))
    model = load_model(ModelConfig(str(folder), dtype="bfloat16"))
    assert sum(isinstance(module.forward, FusedForward) for module in model.module.modules()) == 1
    assert model.straight == []
    assert len(answers(model)) == 6
