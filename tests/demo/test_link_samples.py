"""What the models that judge linking are trained on: right answers, whole parts, and links as the engine makes them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from types import ModuleType

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from foreword.demo import tasks

TRAINED = ("independent", "order", "scope", "hops")
QUESTION = re.compile(r"(?:What is|Tell me|Do you know|And) the (.*)[?.]")


@pytest.fixture(scope="module")
def training(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module of samples, found as the scripts find it: in their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.config.rootpath / "training")
        yield importlib.import_module("link_samples")


@pytest.fixture(scope="module")
def maker(training: ModuleType, request: pytest.FixtureRequest):
    tokenizer = AutoTokenizer.from_pretrained(request.config.rootpath / "src/foreword/demo/weights")
    return training.LinkSampleMaker(tokenizer, Random(3), 4096, 1 / 3)


def said_in(lines: list[str]) -> dict[str, str]:
    """Values by key, read line by line: what is said last holds, "In X:" begins a place, a name leads on."""
    said, place = {}, ""
    for line in lines:
        if heading := re.fullmatch(r"In (\w+):", line):
            place = f" in {heading[1]}"
        elif fact := re.fullmatch(r"The (.*) is (\w+)\.", line):
            said[fact[1] + place] = fact[2]
    return said


def answer_to(question: str, said: dict[str, str]) -> str:
    found = QUESTION.fullmatch(question)
    assert found is not None, question
    if found[1] in said:
        return said[found[1]]
    attribute, thing = found[1].split(" of the ", 1)
    return said[f"{attribute} of {said[thing]}"]


@pytest.mark.parametrize("task", TRAINED)
@pytest.mark.parametrize("length", [128, 256, 1024])
def test_what_is_learnt_is_the_answer_that_a_reader_finds(maker, task: str, length: int) -> None:
    learnt = 0
    for _ in range(10):
        ids, weights, positions, parts = maker.link_sample(task, length)
        assert len(ids) == len(weights) == len(positions) == len(parts) == length + 1
        assert positions == sorted(set(positions))
        turns = maker.tokenizer.decode(ids).split("<|im_start|>")
        said = said_in("\n".join(turns).replace("<|im_end|>", "").split("\n"))
        at = 0
        for question, answer in pairwise(turns):
            if not answer.startswith("assistant\n") or "<|im_end|>" not in answer:
                continue
            wanted = answer_to(question.split("<|im_end|>")[0].rsplit("\n", 1)[-1], said)
            while not weights[at]:
                at += 1
            end = ids.index(maker.end, at) + 1
            assert maker.tokenizer.decode(ids[at:end]) == f"{wanted}<|im_end|>"
            assert all(weights[at:end])
            assert set(parts[at:end]) == {1_000}
            at, learnt = end, learnt + 1
    assert learnt >= 10


@pytest.mark.parametrize("task", TRAINED)
def test_parts_of_a_sample_are_the_parts_of_its_case(training: ModuleType, maker, task: str) -> None:
    for seed in range(10):
        case = tasks.draw(Random(seed), task, num_tokens=300, num_parts=4)
        text = maker.tokenizer.apply_chat_template(case.conversation("system"), tokenize=False)
        ids = maker.encode(text).ids
        parts = training.parts_of(training.part_bounds(maker.encode, case, text), len(ids))
        own = {part: [token for token, of in zip(ids, parts, strict=True) if of == part] for part in set(parts)}
        texts = {part: maker.tokenizer.decode(tokens) for part, tokens in own.items()}
        assert texts.pop(training.HEAD).endswith(case.instruction + "\n")
        assert texts.pop(training.TAIL).startswith("<|im_end|>")
        assert tuple(texts[number].rstrip("\n") for number in sorted(texts)) == case.parts


@pytest.mark.parametrize("is_turned", [True, False])
def test_training_links_as_the_engine_does(training: ModuleType, is_turned: bool) -> None:
    """The oracle computes each part after the head, turns its keys, and goes on from a cache, in transformers alone."""
    attention = importlib.import_module("link_attention")
    hidden_states = importlib.import_module("recall_model").hidden_states
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, num_hidden_layers=3, head_dim=16, **sizes)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)  # so that attention matters
    parts = torch.tensor([[training.HEAD] * 5 + [1] * 6 + [2] * 9 + [training.TAIL] * 7])
    positions = torch.arange(27)[None].clone()
    positions[:, 11:] += 40  # gaps before the second part and the tail
    positions[:, 20:] += 300
    ids = torch.randint(0, 50, (1, 27))
    with torch.inference_mode():
        cache = DynamicCache()
        for number in (1, 2):
            own = ids[:, (parts[0] == training.HEAD) | (parts[0] == number)]
            found = model(own, use_cache=True).past_key_values
            shift = (positions[parts == number][0] - 5) * is_turned
            cosine, sine = model.model.rotary_emb(model.lm_head.weight, shift[None, None].expand(1, own.shape[1]))
            for layer, kept in enumerate(found.layers):
                turned = apply_rotary_pos_emb(kept.keys, kept.keys, cosine, sine)[1]
                begin = 5 if number == 2 else 0
                keys = torch.cat([kept.keys[:, :, begin:5], turned[:, :, 5:]], dim=2)
                cache.update(keys, kept.values[:, :, begin:], layer)
        wanted = model.model(ids[:, 20:], position_ids=positions[:, 20:], past_key_values=cache).last_hidden_state
        attention.use_linked_attention(model)
        how = attention.linked(model, parts, positions, is_turned=is_turned)
        found = hidden_states(model, ids, how.positions, linked=how)[:, 20:]
        plain = hidden_states(model, ids, positions, linked=None)[:, 20:]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (plain - wanted).abs().max() > 0.01


def test_one_seed_draws_one_batch(training: ModuleType, maker) -> None:
    first, again, other = (
        training.LinkSampleMaker(maker.tokenizer, Random(seed), 4096, 1 / 3).link_batch(128, 8) for seed in (1, 1, 2)
    )
    assert first.tasks == again.tasks
    assert torch.equal(first.parts, again.parts)
    assert all(torch.equal(one, two) for one, two in zip(first.tensors, again.tensors, strict=True))
    assert not torch.equal(first.tensors[0], other.tensors[0])
