"""Checks that a model's bits on this machine do not depend on chunks, batches, preemption or the cache."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import torch

from foreword.batch import Batch, IntArray
from foreword.cache import KVCacheManager, StateCheckpoints, TokenSequence
from foreword.model.foreign.trial import RandomInputs, same_bits
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage

NUM_TOKENS = 45
BLOCK_SIZE = 4
CELL_TOKENS = 12
NUM_PROMPT_TOKENS = 29
"""Prompt tokens of the preempted request: two cells, and a part of a third cell that holds a whole block."""
NUM_GENERATED_TOKENS = 3


class ShortPrompt:
    """One short prompt of a model, computed at once. Other ways to compute it must give the same bits."""

    def __init__(self, model: LoadedModel, num_tokens: int = NUM_TOKENS) -> None:
        self.num_tokens = num_tokens = min(num_tokens, model.max_positions)
        self.check = _Check(model, num_tokens)
        self.tokens: IntArray = RandomInputs().integers(model.vocab_size, num_tokens).numpy().astype(np.int32)
        self.num_hit = min(4, (num_tokens - 1) // BLOCK_SIZE) * BLOCK_SIZE
        start = 0
        if model.states and self.num_hit:  # the state after the hit is kept only if a step ends there
            self.check.run((0, self.tokens, 0, self.num_hit))
            start = self.num_hit
        self.logits = self.check.run((0, self.tokens, start, num_tokens))

    def digest(self) -> str:
        """A digest of the logits and of all attention layers' KV, which differs from one arithmetic to another."""
        digest = hashlib.sha256(_bytes(self.logits))
        storage = self.check.storage
        for layer, group_id in sorted(storage.group_of.items()):
            of_layer = storage.blocks[layer]
            for blocks in (of_layer.keys, of_layer.values, *(of_layer.scales or ())):
                rows = blocks[torch.from_numpy(self.check.tables[group_id][0]).long()].flatten(0, 1)
                digest.update(_bytes(rows[: self.num_tokens]))
        return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def find_inexactness(model: LoadedModel, prompt: ShortPrompt | None = None) -> str | None:
    """Compute the end of one short prompt in several ways; return what the logits wrongly depend on, or None.

    The ways are: all at once; in uneven chunks down to one token; and beside another request, over KV that a third
    request wrote, once as prefill and once as decoding. They cost six forward passes of at most 52 tokens. Recurrent
    layers give equal bits for equal cells only. So chunks of models with such layers end on the grid of cells, and
    decoding is not compared with prefill. Instead, at most nine more passes check cells after preemption and after
    cache hits.
    """
    prompt = prompt or ShortPrompt(model)
    check, tokens, whole = prompt.check, prompt.tokens, prompt.logits
    num_tokens, num_hit = prompt.num_tokens, prompt.num_hit
    other = tokens[::-1].copy()
    cuts = {0, num_tokens // 2, num_tokens - 1, num_tokens}
    if model.states:
        cuts = {0, *(cut // BLOCK_SIZE * BLOCK_SIZE for cut in cuts), num_tokens}
    for start, end in itertools.pairwise(sorted(cuts)):
        chunked = check.run((1, tokens, start, end))
    if not same_bits(whole, chunked):
        return "logits depend on how prefill is chunked"
    check.share(0, 2, num_hit)
    num_other = min(7, num_tokens)
    beside = check.run((2, tokens, num_hit, num_tokens), (3, other, 0, num_other))
    decoded = check.run((2, tokens, num_tokens - 1, num_tokens), (3, other, num_other - 1, num_other))
    if not same_bits(whole, beside) or not (model.states or same_bits(whole, decoded)):
        return "logits depend on cache hits or on the other requests of a batch"
    return _cell_inexactness(model, tokens) if model.states and num_tokens == NUM_TOKENS else None


def _cell_inexactness(model: LoadedModel, tokens: IntArray) -> str | None:
    """Check recurrent layers after preemption and after hits on other requests' cells. Return what the logits wrongly
    depend on, or None.

    preempted    |--12--|--12--|-5-||||              is computed again after its hit
    longer       |--12--|--12--|--12--|--9--|        hits the first two cells, and then, as "again", three
    """
    cached = _CachedRequests(model)
    sequence = cached.sequence("preempted", tokens[:NUM_PROMPT_TOKENS])
    before = cached.compute(sequence)
    for token_id in tokens[NUM_PROMPT_TOKENS : NUM_PROMPT_TOKENS + NUM_GENERATED_TOKENS].tolist():
        sequence.append(token_id)
        before = cached.compute(sequence)
    cached.free(sequence)
    resumed = cached.compute(sequence)
    cached.free(sequence)
    if not same_bits(before, resumed):
        return "logits of a request depend on whether it was preempted"
    for name in ("longer", "again"):
        sequence = cached.sequence(name, tokens)
        hit = cached.compute(sequence)
        cached.free(sequence)
    if not same_bits(hit, _CachedRequests(model).compute(sequence)):
        return "logits depend on what other requests left in the cache"
    return None


class _CachedRequests:
    """Runs requests of a model with recurrent layers one at a time, by the rules of the cache."""

    def __init__(self, model: LoadedModel) -> None:
        layout = model.plan_layout(LayoutOptions(BLOCK_SIZE, CELL_TOKENS, CELL_TOKENS, max_tokens=model.max_positions))
        num_blocks = 4 * sum(2 + -(-NUM_TOKENS // spec.block_size) for spec in layout.specs)
        self._manager = KVCacheManager(num_blocks, groups=layout.specs)
        self._runner = ModelRunner(model, KVStorage(layout, num_blocks, model.device))
        states = StateCheckpoints.for_groups(layout.specs)
        assert states is not None, "a model without recurrent layers"
        self._states = states
        self._num_computed: dict[str, int] = {}

    def sequence(self, name: str, prompt: IntArray) -> TokenSequence:
        return TokenSequence(name, prompt, block_size=self._manager.block_size)

    def compute(self, sequence: TokenSequence) -> torch.Tensor:
        """Look up a request that does not run yet, and compute its known tokens; returns logits after the last one."""
        length = len(sequence)
        while True:
            self._manager.begin_step()
            start, hit = self._num_computed.get(sequence.request_id), None
            if start is None:
                hit = self._manager.get_computed_blocks(sequence)
                start = hit.num_tokens
            end = self._states.cut(start, length, sequence.num_prompt_tokens, length, ())
            self._num_computed[sequence.request_id] = end
            allocated = self._manager.allocate_slots(sequence, end, hit)
            assert allocated is not None, "too few blocks"
            logits = self._step(sequence, start, end)
            if end == length:
                return logits

    def free(self, sequence: TokenSequence) -> None:
        """Preempt or end a request."""
        self._manager.free(sequence.request_id)
        del self._num_computed[sequence.request_id]

    def _step(self, sequence: TokenSequence, start: int, end: int) -> torch.Tensor:
        tables = self._manager.group_block_tables(self._manager.handles([sequence.request_id]))
        batch = Batch.of_spans([sequence.token_ids[start:end]], [start], tuple(table for table, _ in tables))
        batch = replace(batch, prompt_ends=np.array([sequence.num_prompt_tokens], np.int32))
        return self._runner.forward(batch, np.array([end - start - 1]))[0]


class _Check:
    """Four requests; each has blocks of its own in every group."""

    def __init__(self, model: LoadedModel, num_tokens: int) -> None:
        options = LayoutOptions(block_size=BLOCK_SIZE, state_block_size=BLOCK_SIZE, max_tokens=model.max_positions)
        layout = model.plan_layout(options)
        self.tables = []
        num_blocks = 0
        for spec in layout.specs:
            length = -(-num_tokens // spec.block_size)
            self.tables.append(num_blocks + np.arange(4 * length, dtype=np.int32).reshape(4, length))
            num_blocks += 4 * length
        self.storage = KVStorage(layout, num_blocks, model.device)
        self.runner = ModelRunner(model, self.storage)

    def share(self, source: int, target: int, num_tokens: int) -> None:
        """Let request `target` use the blocks of request `source` for its first `num_tokens` tokens, in every group."""
        for table, size in zip(self.tables, self.storage.block_sizes, strict=True):
            table[target, : num_tokens // size] = table[source, : num_tokens // size]

    def run(self, *parts: tuple[int, IntArray, int, int]) -> torch.Tensor:
        """Run parts, each (request, token ids, start, end), as one batch; returns logits after the first part."""
        rows = [row for row, *_ in parts]
        spans = [ids[start:end] for _, ids, start, end in parts]
        batch = Batch.of_spans(spans, [start for *_, start, _ in parts], tuple(table[rows] for table in self.tables))
        return self.runner.forward(batch, batch.query_starts[1:2].astype(np.int64) - 1)[0]
