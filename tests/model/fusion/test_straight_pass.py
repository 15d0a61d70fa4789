"""A pass without the model's own code gives the bits of a pass with it, and is taken only where that has been seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from foreword.batch import NO_ENTRIES, Batch
from foreword.config import ModelConfig
from foreword.model.cpu.layer_program import LayerChain
from foreword.model.cpu.product import can_multiply
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.fusion.fused_layer import FusedForward
from foreword.model.fusion.straight_pass import StraightPass
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel, load_model
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage
from tiny_models import Recipe, TinyModels, build_engine, complete, greedy, random_tokens, save_model

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this processor has no instructions for such products")


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


def logits_of(model: LoadedModel, prompt: list[int], rows: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of some rows of a prompt, and then those of the token that follows it, over the KV that was kept."""
    layout = model.plan_layout(LayoutOptions(block_size=4))
    runner = ModelRunner(model, KVStorage(layout, 8, model.device))
    tables = tuple(np.arange(8, dtype=np.int32)[None] for _ in layout.specs)

    def run(start: int, token_ids: list[int], wanted: list[int]) -> Tensor:
        batch = Batch(
            entries=NO_ENTRIES,
            token_ids=np.array(token_ids, np.int32),
            positions=np.arange(start, start + len(token_ids), dtype=np.int32),
            query_starts=np.array([0, len(token_ids)], np.int32),
            group_tables=tables,
            write_from=np.zeros(1, np.int32),
            copies=np.empty((0, 2), np.int32),
        )
        return runner.forward(batch, np.array(wanted, np.int64))

    return run(0, prompt, rows), run(len(prompt), [7], [0])


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_a_straight_pass_gives_the_bits_of_the_models_own_code(tiny_models: TinyModels, name: str) -> None:
    model = load(tiny_models, name)
    assert model.straight is not None
    assert answers(model) == answers(replace(model, straight=None))


def test_no_step_runs_the_models_own_code(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny_models)
    monkeypatch.setattr(LoadedModel, "__call__", lambda *_: pytest.fail("a step ran the model's own code"))
    assert len(answers(model)) == 6


@pytest.mark.parametrize("keep", [[], [0], [11], [4, 5, 6], [0, 7]], ids=str)
def test_logits_do_not_depend_on_which_others_are_wanted(tiny_models: TinyModels, keep: list[int]) -> None:
    """The last layer computes only what is wanted: no bit of a wanted row changes, nor of the KV that is kept."""
    model = load(tiny_models)
    prompt = random_tokens(np.random.default_rng(0), 12)
    every, after = logits_of(model, prompt, list(range(12)))
    some, after_some = logits_of(model, prompt, keep)
    assert torch.equal(some, every[keep])
    assert torch.equal(after_some, after)


class Changed(FlatModel):
    """A model that does something else than its modules say."""

    __slots__ = ("change",)

    @classmethod
    def of(cls, model: FlatModel, change: Callable[..., Tensor]) -> Changed:
        changed = cls(model.module, model.cache_argument, model.device)
        object.__setattr__(changed, "change", change)
        return changed

    def __call__(self, *given: Any) -> Tensor:
        result: Tensor = self.change(super().__call__, *given)
        return result


CHANGES: dict[str, Callable[..., Tensor]] = {
    "nothing is changed": lambda run, *given: run(*given),
    "logits are scaled": lambda run, *given: run(*given) * 1.5,
    "one logit is another": lambda run, *given: run(*given).index_fill(1, torch.tensor([3]), 0.25),
    "logits are float32": lambda run, *given: run(*given).float(),
    "positions are moved": lambda run, tokens, positions, *others: run(tokens, positions + 1, *others),
    "tokens are changed": lambda run, tokens, *others: run(tokens ^ 1, *others),
    "other rows are kept": lambda run, tokens, positions, keep, *others: run(tokens, positions, keep - 1, *others),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_does_anything_else_has_no_straight_pass(tiny_models: TinyModels, name: str) -> None:
    model = load(tiny_models)
    assert model.straight is not None
    changed = Changed.of(model, CHANGES[name])
    found = StraightPass.find(changed, model.straight.chain, model.vocab_size)
    assert (found is not None) == (name == "nothing is changed")


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
    options = ModelConfig(str(tiny_models.folder("qwen3")), dtype="bfloat16", attention_kernel="reference")
    model = load_model(options)
    assert model.straight is not None
    assert answers(model) == answers(replace(model, straight=None))


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
    model = load(tiny_models)
    before = answers(model)
    model.module.set_submodule(path, Doubled(model.module.get_submodule(path)))
    assert answers(model) == answers(replace(model, straight=None))
    assert path == "model.norm" or answers(model) != before


@pytest.mark.parametrize("path", ["model.embed_tokens", "model.layers.1"])
def test_a_forward_that_is_replaced_later_has_its_say(tiny_models: TinyModels, path: str) -> None:
    model = load(tiny_models)
    before, module = answers(model), model.module.get_submodule(path)
    forward = module.forward
    module.forward = lambda rows, **others: forward(rows, **others) * 1.25  # type: ignore[method-assign]
    assert answers(model) != before


def test_layers_that_were_handed_other_rows_run_one_by_one_from_then_on(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the hook that did it is gone: a step must not mix the program with layers of their own."""
    model = load(tiny_models)
    before = answers(model)
    layer = model.module.get_submodule("model.layers.1")
    with layer.register_forward_pre_hook(lambda module, given: (given[0].clone(), *given[1:])):
        assert answers(model) == before
    monkeypatch.setattr(LayerChain, "logits", lambda *_: pytest.fail("a straight pass"))
    assert answers(model) == before


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
    assert model.straight is None
    assert len(answers(model)) == 6
