"""Layers that run as one program compute the bits of the layers, whatever lies between them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from foreword.config import KernelName, ModelConfig
from foreword.kernels.cpu.attention import CpuAttention
from foreword.kernels.select import ReferenceAttention
from foreword.model.cpu.layer_program import LayerChain, LayerOperations
from foreword.model.cpu.product import ProductOperation, can_multiply
from foreword.model.foreign.loading import load_foreign_model
from foreword.model.loader import LoadedModel, load_model
from foreword.model.storage import KVStorage
from tiny_models import Recipe, TinyModels, build_engine, complete, greedy, random_tokens, save_model

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this processor has no instructions for such products")
LENGTHS = (1, 5, 40, 90, 300)
MIXED = {"head_dim": 32, "use_sliding_window": True, "sliding_window": 24, "num_hidden_layers": 4}
"""Layers of two groups, which have plans of their own."""


@pytest.fixture
def num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chain_of(model: LoadedModel) -> LayerChain:
    chain = model.decoder.chain
    assert chain is not None
    return chain


def answers(model: LoadedModel, lengths: Sequence[int] = LENGTHS) -> list[object]:
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, length) for length in lengths]
    outputs = complete(build_engine(model, num_blocks=96), prompts, greedy(8, logprobs=3, prompt_logprobs=2))
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


def plain(folder: Path, kernel: KernelName = "auto") -> LoadedModel:
    """The model in transformers' modules."""
    return load_foreign_model(ModelConfig(str(folder), dtype="bfloat16", attention_kernel=kernel))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer_types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return save_model(tmp_path_factory.mktemp("mixed"), Recipe("qwen2", {**MIXED, "layer_types": layer_types}))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "wide_llama"])
def test_a_chain_of_all_layers_gives_the_bits_of_the_layers(tiny_models: TinyModels, name: str, threads: int) -> None:
    expected = answers(plain(tiny_models.folder(name)))
    torch.set_num_threads(threads)
    model = load_model(ModelConfig(str(tiny_models.folder(name)), dtype="bfloat16"))
    chain = chain_of(model)
    assert len(chain.layers) == 3
    assert answers(model) == expected
    assert chain._is_for_storage, "it has run"


def test_layers_of_two_groups_are_one_chain(mixed: Path) -> None:
    model = load_model(ModelConfig(str(mixed), dtype="bfloat16"))
    assert len(chain_of(model).layers) == 4
    assert answers(model) == answers(plain(mixed))


@pytest.mark.usefixtures("num_threads")
def test_threads_blocks_and_rows_may_change_between_steps(tiny_models: TinyModels) -> None:
    model, expected = tiny_models.loaded("qwen3", "bfloat16"), answers(plain(tiny_models.folder("qwen3")))
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        assert answers(model) == expected  # each time with an engine, and so with blocks, of its own


def test_what_lay_in_its_memory_changes_nothing(tiny_models: TinyModels) -> None:
    """Padding's rows are never written: they may hold anything."""
    model = load_model(ModelConfig(str(tiny_models.folder("qwen2")), dtype="bfloat16"))
    chain = chain_of(model)
    expected = answers(model)
    run = chain.program.run

    def run_poisoned(number: int | None = None) -> None:
        layer = chain.layers[0]
        assert layer._bound is not None
        wide = layer._bound[0].wide - chain._space._memory.data_ptr()
        chain._space._memory[wide : wide + 2 * layer._bound[0].num_rows * chain._space._wide].fill_(0xFF)  # not numbers
        run(number)

    chain.program.run = run_poisoned  # type: ignore[method-assign]
    assert answers(model) == expected


def test_what_ends_a_step_while_it_is_bound_is_not_remembered_as_bound(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(ModelConfig(str(tiny_models.folder("qwen3")), dtype="bfloat16"))
    expected = answers(model, (5,))
    chain = chain_of(model)
    bind, at = ProductOperation.bind, iter(range(100))

    def interrupted(self: ProductOperation, *places: int) -> None:
        if next(at) == 6:
            raise KeyboardInterrupt
        bind(self, *places)

    chain.layers[0]._bound = chain.layers[1]._bound = None
    monkeypatch.setattr(ProductOperation, "bind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(model, (5,))
    monkeypatch.undo()
    assert answers(model, (5,)) == expected


def test_an_interrupt_between_engines_leaves_no_layer_with_the_others_blocks(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(ModelConfig(str(tiny_models.folder("qwen3")), dtype="bfloat16"))
    prompts = [random_tokens(np.random.default_rng(3), 40)]
    engine, other = build_engine(model), build_engine(model)

    def tokens() -> list[int]:
        (output,) = complete(engine, prompts, greedy(4, logprobs=1))
        return output.outputs[0].token_ids

    expected = tokens()
    set_storage, at = LayerOperations.set_storage, iter(range(100))

    def interrupted(self: LayerOperations, storage: KVStorage, kernel: CpuAttention) -> None:
        if next(at) == 2:
            raise KeyboardInterrupt
        set_storage(self, storage, kernel)
        for elements in (storage.blocks[self.layer].keys, storage.blocks[self.layer].values):
            elements.fill_(torch.nan)

    monkeypatch.setattr(LayerOperations, "set_storage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        complete(other, prompts, greedy(1))
    monkeypatch.undo()
    assert tokens() == expected


def test_rows_with_gaps_between_them_are_kept_until_they_have_been_read(tiny_models: TinyModels) -> None:
    """What is made of them for the program is nobody else's."""
    model = load_model(ModelConfig(str(tiny_models.folder("qwen3")), dtype="bfloat16"))
    expected = answers(model)
    decoder, chain = model.decoder, chain_of(model)
    embed, run, junk = decoder.embed, chain.program.run, []

    def run_late(number: int | None = None) -> None:
        sizes = range(1, 600)
        junk[:] = [torch.full((num_rows, 64), torch.nan, dtype=torch.bfloat16) for num_rows in sizes]
        run(number)

    chain.program.run = run_late  # type: ignore[method-assign]
    decoder.embed = lambda step: torch.stack((embed(step),) * 2, -1)[..., 0]  # type: ignore[method-assign]
    assert answers(model) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_does_not_keep_the_blocks_of_an_engine_that_is_gone(
    tiny_models: TinyModels, dtype: Literal["bfloat16", "float32"]
) -> None:
    model = load_model(ModelConfig(str(tiny_models.folder("qwen3")), dtype=dtype))
    engine = build_engine(model)
    complete(engine, [random_tokens(np.random.default_rng(3), 20)], greedy(3))
    storage = engine._runner._storage  # type: ignore[attr-defined]
    gone = [weakref.ref(storage), *(weakref.ref(pages) for pages in storage._pages)]
    del engine, storage
    gc.collect()
    assert all(one() is None for one in gone)


def test_a_model_may_be_asked_with_another_kernel_in_between(tiny_models: TinyModels) -> None:
    model = load_model(ModelConfig(str(tiny_models.folder("qwen3")), dtype="bfloat16"))
    other = replace(model, kernel=ReferenceAttention())
    expected = answers(model), answers(plain(tiny_models.folder("qwen3"), "reference"))
    for _ in range(2):
        assert (answers(model), answers(other)) == expected


def test_another_kernel_is_served_layer_by_layer(tiny_models: TinyModels) -> None:
    folder = tiny_models.folder("qwen3")
    model = load_model(ModelConfig(str(folder), dtype="bfloat16", attention_kernel="reference"))
    assert len(chain_of(model).layers) == 3
    assert answers(model) == answers(plain(folder, "reference"))
    assert not chain_of(model)._is_for_storage, "it has not run"
