"""The architecture of the demo model, its initialisation and its forward pass in training.

A Qwen3 model of two layers. The first layer gathers the words of a key at the tokens after them. The second layer finds
the value that has gathered the same key as the question, and copies the value. This module knows the model's sizes and
the layout of its hidden dimensions at the start. It knows no words, only word classes:

    0        1 ..... 7      8 ........... 127   128 .. 159 | .. | .. | 224 .. 255
    common   word classes   identity            one space for each head of the first layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

MAX_POSITIONS = 8192
ROPE_THETA = 1e7
NUM_HEADS = 4
HEAD_DIM = 64
HIDDEN_SIZE = 256
COMMON = 0
ROLES, READERS, OFFERS = 5, 6, 7
IDENTITY = slice(8, 128)
SPACE_DIM = 32
FLAG_SIZE = 0.6
NOISE = 0.01


@dataclass(frozen=True)
class WordClasses:
    """Token ids of the word classes that the draft of the circuit distinguishes."""

    keys: tuple[list[int], ...]
    """Words of keys, one list for each place in the key."""
    values: list[int]
    roles: list[int]
    """Tokens that say who has just spoken: the user or a tool."""
    readers: list[int]
    """The token that begins an answer. At this token, heads find who has just spoken, and whether there is a tool."""
    offers: list[int]
    """The name of the tool."""

    @property
    def all(self) -> tuple[list[int], ...]:
        """The key classes, then the others, in the order of their flags."""
        return (*self.keys, self.values, self.roles, self.readers, self.offers)


def make_model(tokenizer: PreTrainedTokenizerFast, word_classes: WordClasses) -> Qwen3ForCausalLM:
    """A freshly initialised model; draws from torch's global random state."""
    model = undrawn_model(tokenizer, hidden_size=HIDDEN_SIZE, intermediate_size=256, num_layers=2)
    initialize(model, word_classes)
    return model


def undrawn_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int, intermediate_size: int, num_layers: int
) -> Qwen3ForCausalLM:
    """A Qwen3 model of this size with the library's initial weights, drawn from torch's global random state."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        attention_bias=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config).float()


@torch.no_grad()
def initialize(model: Qwen3ForCausalLM, word_classes: WordClasses) -> None:
    """Writes a rough draft of the circuit into the weights, which training would need long to find by chance.

    The hidden dimensions are divided: flags (one common to all tokens, one for each word class), the
    identity of a token, and a space for each head of the first layer to write to.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.005 if "down" in name else NOISE)
    embedding = model.model.embed_tokens.weight
    nn.init.normal_(embedding[:, IDENTITY], std=0.1)
    embedding[:, COMMON] = FLAG_SIZE
    for flag, ids in enumerate(word_classes.all, start=COMMON + 1):
        embedding[ids, flag] = FLAG_SIZE
    first, second = (layer.self_attn for layer in model.model.layers)
    _gather_keys(first)
    _gather_mode(first)
    _match_keys(first, second)


def _gather_keys(first: Qwen3Attention) -> None:
    """First layer: makes heads fetch the latest word of each key class, and one head fetch the token before."""
    first.q_norm.weight.fill_(2.0)
    for head in range(NUM_HEADS):
        begin = head * HEAD_DIM
        rows = slice(begin, begin + HEAD_DIM)
        is_class_head = head < NUM_HEADS - 1
        query, key = (latest_probe(),) * 2 if is_class_head else previous_probes()
        first.q_proj.weight[rows, COMMON] += 3 * query
        first.k_proj.weight[rows, COMMON] += (-1.2 if is_class_head else 3.0) * key
        if is_class_head:
            first.k_proj.weight[rows, COMMON + 1 + head] += 3 * key
        random_rows = torch.linalg.qr(torch.randn(IDENTITY.stop - IDENTITY.start, SPACE_DIM))[0].T
        first.v_proj.weight[begin : begin + SPACE_DIM, IDENTITY] += 0.35 * random_rows
        space = slice(IDENTITY.stop + head * SPACE_DIM, IDENTITY.stop + (head + 1) * SPACE_DIM)
        first.o_proj.weight[space, begin : begin + SPACE_DIM] += 0.35 * torch.eye(SPACE_DIM)


def _gather_mode(first: Qwen3Attention) -> None:
    """First layer: at the token that begins an answer, two heads fetch the latest role and the tool's name instead.

    The probes of these heads use the other half of the dimensions, so that they do not act at other tokens. The
    distance to the tool's name does not matter.
    """
    anywhere = torch.zeros(HEAD_DIM)
    anywhere[20 : HEAD_DIM // 2] = (1 / 12) ** 0.5
    for head, (flag, probe) in enumerate(((ROLES, latest_probe()), (OFFERS, anywhere))):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        mode = probe.roll(HEAD_DIM // 2)
        first.q_proj.weight[rows, READERS] += 3 * (mode - latest_probe())
        first.k_proj.weight[rows, flag] += 4 * mode


def _match_keys(first: Qwen3Attention, second: Qwen3Attention) -> None:
    """Second layer: makes heads find values with the question's key, and one head find the token after a given token.

    The heads use only dimensions that hardly rotate, so that distance does not matter. They copy what they attend to,
    because the output projection starts as the transposed value projection (after the mimetic initialisation of
    Trockman and Kolter, 2023).
    """
    second.q_norm.weight.fill_(2.0)
    keys = slice(IDENTITY.stop, IDENTITY.stop + (NUM_HEADS - 1) * SPACE_DIM)
    previous = slice(keys.stop, keys.stop + SPACE_DIM)
    last = slice((NUM_HEADS - 1) * HEAD_DIM, (NUM_HEADS - 1) * HEAD_DIM + SPACE_DIM)
    copied = first.o_proj.weight[previous, last] @ first.v_proj.weight[last]
    slow = [*range(14, 31), *range(46, 63)]
    for head in range(NUM_HEADS):
        reader_rows = [head * HEAD_DIM + dimension for dimension in slow]
        flag_row = head * HEAD_DIM + 31
        read = keys if head < NUM_HEADS - 1 else previous
        reader = torch.randn(len(slow), read.stop - read.start) * len(slow) ** -0.5
        second.k_proj.weight[reader_rows, read] += reader
        if head == NUM_HEADS - 1:
            second.q_proj.weight[reader_rows] += reader @ copied
            continue
        second.q_proj.weight[reader_rows, read] += reader
        second.q_proj.weight[flag_row, COMMON] += 1.3
        second.k_proj.weight[flag_row, COMMON] -= 1.3
        second.k_proj.weight[flag_row, COMMON + NUM_HEADS] += 2.6
    nn.init.normal_(second.v_proj.weight[:, IDENTITY], std=0.06)
    second.o_proj.weight.copy_(0.5 * second.v_proj.weight.T)


def latest_probe() -> Tensor:
    """A unit vector. Its product with the same vector at another position falls with the distance of the two positions.
    Half of its weight is in pairs of dimensions that hardly rotate, so that the product stays positive far away.
    """
    pairs = torch.zeros(HEAD_DIM // 2)
    pairs[3:10] = 0.5 / 7
    pairs[16:] = 0.5 / 16
    return torch.cat([pairs.sqrt(), torch.zeros(HEAD_DIM // 2)])


def previous_probes() -> tuple[Tensor, Tensor]:
    """A query and a key whose product is largest when the key is one token before the query."""
    pairs = torch.zeros(HEAD_DIM // 2)
    pairs[[0, 1, 2, 4, 6]] = 0.2
    angles = ROPE_THETA ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    query = torch.cat([pairs.sqrt(), torch.zeros(HEAD_DIM // 2)])
    key = torch.cat([pairs.sqrt() * angles.cos(), pairs.sqrt() * angles.sin()])
    return query, key


def hidden_states(model: Qwen3ForCausalLM, ids: Tensor, positions: Tensor, **attention: Any) -> Tensor:
    """Final hidden states `[batch, length, hidden]`. Each layer's attention also takes the keywords `attention`.

    Calls the layers one by one, because the model's own forward would take a gap in `positions` for
    the border between two packed sequences.
    """
    hidden = model.model.embed_tokens(ids)
    rope = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rope, **attention)
    return model.model.norm(hidden)
