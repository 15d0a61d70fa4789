"""Layers that run as one program compute the bits of the layers, whatever lies between them.

Weights are 12 bits with rows of bfloat16, where the processor has instructions for it, or bfloat16 with float32 rows.
"""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from doors import has_run, storage_of
from foreword.config import KernelName, ModelConfig
from foreword.kernels.cpu.attention import CpuAttention
from foreword.kernels.select import ReferenceAttention
from foreword.model.cpu.coded_product import HAS_INSTRUCTIONS
from foreword.model.cpu.layer_program import LayerChain, LayerOperations
from foreword.model.cpu.product import can_multiply
from foreword.model.loader import LoadedModel, load_foreign_model, load_model
from foreword.model.storage import KVStorage
from tiny_models import Recipe, TinyModels, build_engine, complete, greedy, random_tokens, save_model

needs_pairs = pytest.mark.skipif(not can_multiply(), reason="this processor has no products of bfloat16")
needs_codes = pytest.mark.skipif(not HAS_INSTRUCTIONS, reason="this processor has no products of codes")
LENGTHS = (1, 5, 40, 90, 300)
WIDE = {
    "wide_gemma3": Recipe(
        "gemma3_text", {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 32}
    ),
    "wide_granite": Recipe("granite", {"num_attention_heads": 2, "num_key_value_heads": 1, "residual_multiplier": 0.7}),
}
"""Norms after a layer's parts and two rotary embeddings; scaled residuals."""
MIXED = {"head_dim": 32, "use_sliding_window": True, "sliding_window": 24, "num_hidden_layers": 4}
"""Layers of two groups, which have plans of their own."""


Load = Callable[[Path], LoadedModel]


@pytest.fixture(params=[pytest.param("bfloat16", marks=needs_pairs), pytest.param("float32", marks=needs_codes)])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Load:
    """Loads a checkpoint's weights, rounded to bfloat16, for rows of one type."""

    def load_rounded(folder: Path, kernel: KernelName = "auto") -> LoadedModel:
        rounded = tmp_path / "rounded"
        if not rounded.exists():
            shutil.copytree(folder, rounded)
            weights = load_file(folder / "model.safetensors")
            halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
            save_file(halves, rounded / "model.safetensors", metadata={"format": "pt"})
        model = load_model(ModelConfig(str(rounded), dtype=request.param, attention_kernel=kernel))
        assert chain_of(model).layers
        return model

    return load_rounded


def chain_of(model: LoadedModel) -> LayerChain:
    chain = model.decoder.chain
    assert chain is not None
    return chain


def answers(model: LoadedModel, lengths: Sequence[int] = LENGTHS) -> list[object]:
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, length) for length in lengths]
    outputs = complete(build_engine(model, num_blocks=96), prompts, greedy(8, logprobs=3, prompt_logprobs=2))
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


def in_parts(model: LoadedModel) -> list[object]:
    """What the layers answer operation by operation."""
    decoder, chain = model.decoder, model.decoder.chain
    decoder.chain = None
    found = answers(model)
    decoder.chain = chain
    return found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer_types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    return save_model(tmp_path_factory.mktemp("mixed"), Recipe("qwen2", {**MIXED, "layer_types": layer_types}))


@needs_pairs
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "wide_llama"])
def test_a_chain_of_all_layers_gives_the_bits_of_transformers_modules(
    tiny_models: TinyModels, name: str, threads: int
) -> None:
    expected = answers(load_foreign_model(ModelConfig(str(tiny_models.folder(name)), dtype="bfloat16")))
    torch.set_num_threads(threads)
    model = load_model(ModelConfig(str(tiny_models.folder(name)), dtype="bfloat16"))
    chain = chain_of(model)
    assert len(chain.layers) == 3
    assert answers(model) == expected
    assert has_run(chain), "it has run"


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "wide_llama", "wide_gemma3", "wide_granite"])
def test_a_chain_of_all_layers_gives_the_bits_of_the_layers(
    tiny_models: TinyModels, tmp_path: Path, name: str, load: Load
) -> None:
    wide = WIDE.get(name)
    model = load(save_model(tmp_path / "wide", wide) if wide else tiny_models.folder(name))
    expected = in_parts(model)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert answers(model) == expected
    assert has_run(chain_of(model)), "it has run"


def test_layers_of_two_groups_are_one_chain(mixed: Path, load: Load) -> None:
    model = load(mixed)
    assert len(chain_of(model).layers) == 4
    assert answers(model) == in_parts(model)


@pytest.mark.usefixtures("num_threads")
def test_threads_blocks_and_rows_may_change_between_steps(tiny_models: TinyModels, load: Load) -> None:
    model = load(tiny_models.folder("qwen3"))
    expected = in_parts(model)
    for threads in (1, 3, 2):
        torch.set_num_threads(threads)
        assert answers(model) == expected  # each time with an engine, and so with blocks, of its own


def test_what_lay_in_its_memory_changes_nothing(tiny_models: TinyModels, load: Load) -> None:
    """Padding's rows are never written: they may hold anything."""
    model = load(tiny_models.folder("qwen2"))
    chain = chain_of(model)
    expected = answers(model)
    run = chain.program.run

    def run_poisoned(number: int | None = None) -> None:
        bound, space = chain.layers[0]._bound, chain._space
        assert bound is not None
        memory, size = space._memory, model.dtype.itemsize * bound[0].num_rows * space._wide
        wide = bound[0].wide - memory.data_ptr()
        memory[wide : wide + size].fill_(0xFF)  # not numbers
        run(number)

    chain.program.run = run_poisoned  # type: ignore[method-assign]
    assert answers(model) == expected


def test_what_ends_a_step_while_it_is_bound_is_not_remembered_as_bound(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    model = load(tiny_models.folder("qwen3"))
    expected = answers(model, (5,))
    chain = chain_of(model)
    kind: Any = type(chain.layers[0].operations["down"][0])
    bind, at = kind.bind, iter(range(100))

    def interrupted(self: object, *places: int) -> None:
        if next(at) == 6:
            raise KeyboardInterrupt
        bind(self, *places)

    for layer in chain.layers[:2]:
        layer._bound = None
    monkeypatch.setattr(kind, "bind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answers(model, (5,))
    monkeypatch.undo()
    assert answers(model, (5,)) == expected


def test_an_interrupt_between_engines_leaves_no_layer_with_the_others_blocks(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, load: Load
) -> None:
    model = load(tiny_models.folder("qwen3"))
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


def test_rows_with_gaps_between_them_are_kept_until_they_have_been_read(tiny_models: TinyModels, load: Load) -> None:
    """What is made of them for the program is nobody else's."""
    model = load(tiny_models.folder("qwen3"))
    expected = answers(model)
    decoder, chain = model.decoder, chain_of(model)
    embed, run, junk = decoder.embed, chain.program.run, []

    def run_late(number: int | None = None) -> None:
        sizes = range(1, 600)
        junk[:] = [torch.full((num_rows, 64), torch.nan, dtype=model.dtype) for num_rows in sizes]
        run(number)

    chain.program.run = run_late  # type: ignore[method-assign]
    decoder.embed = lambda step: torch.stack((embed(step),) * 2, -1)[..., 0]  # type: ignore[method-assign]
    assert answers(model) == expected


def test_a_model_does_not_keep_the_blocks_of_an_engine_that_is_gone(tiny_models: TinyModels, load: Load) -> None:
    model = load(tiny_models.folder("qwen3"))
    engine = build_engine(model)
    complete(engine, [random_tokens(np.random.default_rng(3), 20)], greedy(3))
    storage = storage_of(engine)
    gone = [weakref.ref(storage), *(weakref.ref(pages) for pages in storage.pages())]
    del engine, storage
    gc.collect()
    assert all(one() is None for one in gone)


def test_another_kernel_is_served_layer_by_layer_also_in_between(tiny_models: TinyModels, load: Load) -> None:
    model = load(tiny_models.folder("qwen3"))
    other = replace(model, kernel=ReferenceAttention())
    expected = answers(model), in_parts(other)
    for _ in range(2):
        assert answers(model) == expected[0]
        assert has_run(chain_of(model)), "it has run"
        assert answers(other) == expected[1]
        assert not has_run(chain_of(model)), "it has not run"


def test_hidden_states_are_those_of_the_layers(tiny_models: TinyModels, load: Load) -> None:
    """Alone, where the program ends with the head, and beside rows that are not wanted, where it ends before."""
    model = load(tiny_models.folder("wide_llama"))
    prompts = [random_tokens(np.random.default_rng(length), length) for length in (7, 40, 3)]

    def states() -> list[bytes]:
        together = complete(build_engine(model), prompts, greedy(1, embeds=True))
        alone = [complete(build_engine(model), [prompt], greedy(1, embeds=True))[0] for prompt in prompts]
        found = [output.hidden_state for output in (*together, *alone)]
        return [state.tobytes() for state in found if state is not None]

    chained, chain = states(), chain_of(model)
    model.decoder.chain = None
    in_layers = states()
    model.decoder.chain = chain
    assert has_run(chain), "it has run"
    assert chained == in_layers
    assert chained[:3] == chained[3:]
    assert len(set(chained)) == 3
