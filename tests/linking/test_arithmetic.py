"""Linked KV is what it is said to be: an oracle computes it with masks and positions, in transformers' own code."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from foreword import LLM, SamplingParams
from foreword.batch import Batch, Move
from foreword.config import Dtype, ModelConfig
from foreword.linking import Method, link_parts
from foreword.model.layout import LayoutOptions
from foreword.model.loader import load_model
from foreword.model.rotation import KeyMover, KeyRotation
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage
from foreword.pml.composition import Composition, Part, Source, Span
from foreword.pml.library import SchemaPrompt
from foreword.request import Links
from linking.prompts import documents
from tiny_models import MAX_POSITIONS, RECIPES, VOCAB_SIZE, Recipe, TinyModels, save_model

FIRST = SamplingParams(max_tokens=1, temperature=0.0, logprobs=VOCAB_SIZE)
BLOCK_SIZE = 4
PAIRS = Recipe("cohere2", {**RECIPES["cohere2"].options, "sliding_window": MAX_POSITIONS, "logit_scale": 1.0})
"""Heads turned in pairs, with windows that no request can leave."""


def open_llm(folder: str) -> LLM:
    return LLM(
        folder,
        dtype="float32",
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=200,
        self_check=False,
        allow_links=True,
    )


def composition(gap: int) -> Composition:
    """Three modules and a question, with gaps between their positions."""
    prompt = documents((24, 32, 28), seed=11, head=0)
    parts, position = [], 0
    for number, ids in enumerate(prompt["documents"]):
        source = Source(tuple(ids), 0, str(number))
        parts.append(Part(tuple(ids), position, "module", str(number), Span(source, 0, len(ids))))
        position += len(ids) + gap
    parts.append(Part(tuple(prompt["question"]), position, "text"))
    return Composition(tuple(parts))


@functools.lru_cache(maxsize=1)
def transformers_model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def oracle(folder: str, composed: Composition, links: Links) -> torch.Tensor:
    """Log probabilities after the prompt, [vocab]: linked KV is that of the module alone, at its place in the prompt.

    One pass computes all modules apart; its mask is blocks on the diagonal. Then the other tokens are computed one by
    one, each after the KV of all tokens before it, linked or not.
    """
    model = transformers_model(folder)
    token_ids, positions = (torch.tensor(own.tolist())[None] for own in (composed.token_ids, composed.positions))
    length, begins = composed.num_tokens, composed.begins
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    for begin, end in itertools.pairwise(begins):
        seen[begin:end, :begin] = False
    mask = torch.zeros(length, length).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    linked = {at for run in links.runs for at in range(run.begin, run.end)}
    apart, cache = DynamicCache(), DynamicCache()
    with torch.inference_mode():
        model(token_ids, position_ids=positions, attention_mask=mask, past_key_values=apart, use_cache=True)
        for at in range(length):
            here = slice(at, at + 1)
            if at in linked:
                for layer, own in enumerate(apart.layers):
                    cache.update(own.keys[:, :, here], own.values[:, :, here], layer)
            else:
                output = model(
                    token_ids[:, here], position_ids=positions[:, here], past_key_values=cache, use_cache=True
                )
    return output.logits[0, -1].log_softmax(-1)


def answered(llm: LLM, composed: Composition, link: str) -> torch.Tensor:
    [output] = llm.generate(SchemaPrompt(composed, "s", ()), FIRST, link=link)
    [places] = output.outputs[0].logprobs or []
    return torch.tensor([places[token].logprob for token in range(VOCAB_SIZE)])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("model", ["qwen3", "pairs", "phi3", "odd_llama"])
def test_links_are_computed_as_an_oracle_computes_them(tiny_models: TinyModels, tmp_path: Path, model: str) -> None:
    """Heads turned as halves, in pairs, in part, and of 20 elements."""
    folder = str(save_model(tmp_path, PAIRS) if model == "pairs" else tiny_models.folder(model))
    with open_llm(folder) as llm:
        for link, gap in (("none", 37), ("first-6", 0), ("first-6", 37), ("all", 37)):
            composed = composition(gap)
            found = answered(llm, composed, link)
            links = link_parts(composed, Method.parse(link)).in_whole_blocks(BLOCK_SIZE)
            assert float((found - oracle(folder, composed, links)).abs().max()) < 2e-3
            if links.runs:
                plain = oracle(folder, composed, Links("", (), composed.positions))
                assert float((found - plain).abs().max()) > 20e-3, "the plain prompt would have passed, too"


@pytest.mark.usefixtures("on_cpu")
def test_without_rotation_the_oracle_disagrees(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    composed, folder = composition(37), str(tiny_models.folder("llama"))
    move = KeyMover.move
    monkeypatch.setattr(KeyMover, "move", lambda self, moves: move(self, [one._replace(shift=0) for one in moves]))
    with open_llm(folder) as llm:
        found = answered(llm, composed, "none")
    links = link_parts(composed, Method.parse("none"))
    assert float((found - oracle(folder, composed, links)).abs().max()) > 20e-3


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "cohere2", "phi3", "odd_llama"])
def test_compiled_moves_have_the_bits_of_torch(tiny_models: TinyModels, model: str, dtype: Dtype) -> None:
    loaded = load_model(ModelConfig(str(tiny_models.folder(model)), dtype=dtype, allow_links=True))
    found, generator = [], torch.Generator().manual_seed(0)
    moves = [Move(np.arange(17), np.arange(40, 57), 5), Move(np.arange(2, 9), np.arange(60, 67), -300)]
    contents: dict[tuple[int, int], torch.Tensor] = {}
    for compiled in (False, None):
        storage = KVStorage(loaded.plan_layout(LayoutOptions(BLOCK_SIZE)), 30, torch.device("cpu"))
        for layer, blocks in storage.blocks.items():
            for at, own in enumerate((blocks.keys, blocks.values)):
                own.copy_(contents.setdefault((layer, at), torch.randn(own.shape, generator=generator)))
        KeyMover(storage, _known(loaded.rotation), compiled=compiled).move(
            [*moves, Move(np.arange(3), np.arange(80, 83), 0)]
        )
        found.append([own.clone() for blocks in storage.blocks.values() for own in (blocks.keys, blocks.values)])
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2.0**-18), ("bfloat16", 2.0**-6)])
def test_moved_keys_are_those_of_their_new_place(tiny_models: TinyModels, dtype: str, tolerance: float) -> None:
    """A key is turned in float32 and rounded once. The key that it is compared with is rounded more often."""
    rng = np.random.default_rng(0)
    loaded = load_model(ModelConfig(str(tiny_models.folder("llama")), dtype=dtype, allow_links=True))  # type: ignore[arg-type]
    layout = loaded.plan_layout(LayoutOptions(BLOCK_SIZE))
    storage = KVStorage(layout, 30, torch.device("cpu"))
    runner = ModelRunner(loaded, storage)
    token = int(rng.integers(3, VOCAB_SIZE))
    for block, position in ((0, 3), (1, 3 + 211)):  # one token alone: its KV depends on nothing but its position
        batch = Batch.bare(
            np.array([token], np.int32),
            np.zeros(1, np.int32),
            np.array([0, 1], np.int32),
            (np.array([[block]], np.int32),),
        )
        runner.forward(replace(batch, rotary=np.array([position], np.int32)), np.zeros(1, np.int64))
    KeyMover(storage, _known(loaded.rotation)).move([Move(np.array([0]), np.array([2 * BLOCK_SIZE]), 211)])
    for blocks in storage.blocks.values():
        before, there, moved = (blocks.keys[block, 0].float() for block in (0, 1, 2))
        scale = there.abs().max()
        assert float((moved - there).abs().max() / scale) < tolerance < float((before - there).abs().max() / scale)
        assert torch.equal(blocks.values[2, 0], blocks.values[0, 0])


@pytest.mark.usefixtures("on_cpu")
def test_a_moved_key_has_the_same_bits_in_any_company(tiny_models: TinyModels) -> None:
    loaded = load_model(ModelConfig(str(tiny_models.folder("cohere2")), dtype="bfloat16", allow_links=True))
    storage = KVStorage(loaded.plan_layout(LayoutOptions(BLOCK_SIZE)), 30, torch.device("cpu"))
    mover, generator = KeyMover(storage, _known(loaded.rotation)), torch.Generator().manual_seed(0)
    for blocks in storage.blocks.values():
        for own in (blocks.keys, blocks.values):
            own.copy_(torch.randn(own.shape, generator=generator))
    moves = [Move(np.arange(17), np.arange(40, 57), 5), Move(np.arange(2, 9), np.arange(60, 67), -3)]
    still = Move(np.arange(8), np.arange(70, 78), 0)
    mover.move([*moves, still])
    together = {layer: blocks.keys.clone() for layer, blocks in storage.blocks.items()}
    for layer in together:
        assert torch.equal(together[layer].flatten(0, 1)[70:78], together[layer].flatten(0, 1)[:8]), "turned by 0"
    for move in moves:
        for source, target in zip(move.sources.tolist(), move.targets.tolist(), strict=True):
            mover.move([Move(np.array([source]), np.array([target]), move.shift)])
    assert all(torch.equal(blocks.keys, together[layer]) for layer, blocks in storage.blocks.items())


def _known(rotation: KeyRotation | None) -> KeyRotation:
    assert rotation is not None
    return rotation
