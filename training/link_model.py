"""The architecture and the initial weights of the models that test linking: four layers, drawn for their tasks.

Layer 1 gathers the words of a key at the tokens after them, as in `recall_model`. Layer 2 gathers three things: the
place that heads the section (the word before the latest colon), the latest name or noun, and the latest attribute that
does not name a person. Layer 3 finds the latest value whose key is that of the question. Layer 4 follows one more fact:
it finds the value that was stated for the name just found. Hidden dimensions at the start:

    0        1 ..... 7      10 .......... 65   66 .. 83 | .. | .. | .. | .. | .. | 174 .. 191
    common   word classes   identity           spaces of four heads of layer 1, then of three of layer 2
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from recall_model import HEAD_DIM, NOISE, NUM_HEADS, latest_probe, previous_probes, undrawn_model

HIDDEN_SIZE = 192
FLAGS = {
    name: 1 + number for number, name in enumerate("attribute adjective noun value name outer after_place".split())
}
COMMON = 0
IDENTITY = slice(10, 66)
SPACE_DIM = 18
ATTRIBUTE, ADJECTIVE, NOUN, PREVIOUS, PLACE, NAME, OUTER = (
    slice(IDENTITY.stop + number * SPACE_DIM, IDENTITY.stop + (number + 1) * SPACE_DIM) for number in range(7)
)
FLAG_SIZE = 0.6
SLOW = [*range(16, 31), *range(48, 63)]
"""Dimensions of a head that hardly rotate, so that a comparison there does not depend on the distance."""
FLAG_ROW = 31
SHARPNESS = (3.0, 4.0, 5.0, 6.0)
"""The factor of the normalised queries of each layer."""
PASSED_ON = 0.42


def make_link_model(tokenizer: PreTrainedTokenizerFast, classes: dict[str, list[int]]) -> Qwen3ForCausalLM:
    """A freshly initialised model. `flags` are the token ids of each flag. Draws from torch's global random state."""
    model = undrawn_model(tokenizer, hidden_size=HIDDEN_SIZE, intermediate_size=80, num_layers=4)
    initialize(model, classes)
    return model


@torch.no_grad()
def initialize(model: Qwen3ForCausalLM, classes: dict[str, list[int]]) -> None:
    """Writes a draft of the circuit into the weights, over a little noise."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.005 if "down" in name else NOISE)
    embedding = model.model.embed_tokens.weight
    nn.init.normal_(embedding[:, IDENTITY], std=0.15)
    embedding[:, COMMON] = FLAG_SIZE
    for flag, ids in classes.items():
        embedding[ids, FLAGS[flag]] = FLAG_SIZE
    first, second, third, fourth = (layer.self_attn for layer in model.model.layers)
    for attention, sharpness in zip((first, second, third, fourth), SHARPNESS, strict=True):
        attention.q_norm.weight.fill_(sharpness)
    for head, flag in enumerate(("attribute", "adjective", "noun")):
        _find_latest(first, head, FLAGS[flag])
        _write(first, head, (ATTRIBUTE, ADJECTIVE, NOUN)[head])
    _find_previous(first, 3)
    _write(first, 3, PREVIOUS)
    last = _rows(3)[:SPACE_DIM]
    previous_of = first.o_proj.weight[PREVIOUS][:, last] @ first.v_proj.weight[last]
    for head, flag in enumerate(("after_place", "name", "outer")):
        _find_latest(second, head, FLAGS[flag])
    second.k_proj.weight[_rows(1), FLAGS["noun"]] += 3 * latest_probe()  # a noun hides the name of an earlier line
    _pass_on(second, 0, PREVIOUS, PLACE)
    _write(second, 1, NAME)
    _write(second, 2, OUTER)
    _match_keys(third, previous_of)
    rows = _rows(1)[:SPACE_DIM]
    name_of = second.o_proj.weight[NAME][:, rows] @ second.v_proj.weight[rows]
    _hop(fourth, name_of)


def _rows(head: int) -> list[int]:
    return list(range(head * HEAD_DIM, (head + 1) * HEAD_DIM))


def _find_latest(attention: Qwen3Attention, head: int, flag: int) -> None:
    """Makes a head attend to the latest word with a flag."""
    rows = _rows(head)
    attention.q_proj.weight[rows, COMMON] += 3 * latest_probe()
    attention.k_proj.weight[rows, COMMON] -= 1.2 * latest_probe()
    attention.k_proj.weight[rows, flag] += 3 * latest_probe()


def _find_previous(attention: Qwen3Attention, head: int) -> None:
    """Makes a head attend to the token before."""
    query, key = previous_probes()
    attention.q_proj.weight[_rows(head), COMMON] += 3 * query
    attention.k_proj.weight[_rows(head), COMMON] += 3 * key


def _write(attention: Qwen3Attention, head: int, space: slice) -> None:
    """Makes a head write a projection of the tokens that it attends to into a space."""
    random_rows = torch.linalg.qr(torch.randn(IDENTITY.stop - IDENTITY.start, SPACE_DIM))[0].T
    rows = _rows(head)[:SPACE_DIM]
    attention.v_proj.weight[rows, IDENTITY] += 0.4 * random_rows
    attention.o_proj.weight[space, rows] += 0.4 * torch.eye(SPACE_DIM)


def _pass_on(attention: Qwen3Attention, head: int, read: slice, space: slice) -> None:
    """Makes a head copy one space of the tokens that it attends to into another space."""
    rows = _rows(head)[:SPACE_DIM]
    attention.v_proj.weight[rows, read] += PASSED_ON * torch.eye(SPACE_DIM)
    attention.o_proj.weight[space, rows] += PASSED_ON * torch.eye(SPACE_DIM)


def _want_flag(attention: Qwen3Attention, head: int, flag: int, size: float = 1.3) -> None:
    row = head * HEAD_DIM + FLAG_ROW
    attention.q_proj.weight[row, COMMON] += size
    attention.k_proj.weight[row, COMMON] -= size
    attention.k_proj.weight[row, flag] += 2 * size


def _reader(space: slice, size: float = 1.0) -> Tensor:
    """A random projection of a space onto the dimensions that hardly rotate."""
    return size * torch.randn(len(SLOW), space.stop - space.start) * len(SLOW) ** -0.5


def _match_keys(third: Qwen3Attention, previous_of: Tensor) -> None:
    """Makes three heads find values with the question's key, preferably late ones, and one a token's successor."""
    recent = torch.zeros(HEAD_DIM)
    recent[9:15] = 2 * (1 / 6) ** 0.5
    for head in range(NUM_HEADS - 1):
        rows = [_rows(head)[dimension] for dimension in SLOW]
        for space in (ATTRIBUTE, ADJECTIVE, NOUN, PLACE):
            reader = _reader(space)
            third.q_proj.weight[rows, space] += reader
            third.k_proj.weight[rows, space] += reader
        third.q_proj.weight[_rows(head), COMMON] += recent
        third.k_proj.weight[_rows(head), COMMON] += recent
        _want_flag(third, head, FLAGS["value"], 2.0)
    rows = [_rows(NUM_HEADS - 1)[dimension] for dimension in SLOW]
    reader = _reader(PREVIOUS)
    third.k_proj.weight[rows, PREVIOUS] += reader
    third.q_proj.weight[rows] += reader @ previous_of
    _copy(third)


def _hop(fourth: Qwen3Attention, name_of: Tensor) -> None:
    """Makes heads find the value of the name that layer 3 has found, under the question's other attribute."""
    for head in range(NUM_HEADS - 1):
        rows = [_rows(head)[dimension] for dimension in SLOW]
        reader, outer = _reader(NAME), _reader(OUTER, 1.5)
        fourth.k_proj.weight[rows, NAME] += reader
        fourth.q_proj.weight[rows] += 2 * reader @ name_of
        fourth.q_proj.weight[rows, OUTER] += outer
        fourth.k_proj.weight[rows, OUTER] += outer
        _want_flag(fourth, head, FLAGS["value"])
        fourth.k_proj.weight[head * HEAD_DIM + FLAG_ROW, FLAGS["name"]] -= 2.6
    _copy(fourth)


def _copy(attention: Qwen3Attention) -> None:
    """Makes heads copy what they attend to, as in `recall_model`: output projection = transposed value projection."""
    nn.init.normal_(attention.v_proj.weight[:, IDENTITY], std=0.07)
    attention.o_proj.weight.copy_(0.5 * attention.v_proj.weight.T)
