"""Does the exactness promise hold for this model on this machine?

Knows a runner and its arithmetic; knows nothing of requests or caches.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from foreword.batch import Batch, IntArray
from foreword.model.loader import LoadedModel
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage

NUM_TOKENS = 45
BLOCK_SIZE = 4


def find_inexactness(model: LoadedModel) -> str | None:
    """Compute the end of one short prompt in several ways; say which way gave other bits, or None.

    The ways: all at once; in uneven chunks down to one token; and beside another request, over KV that
    a third one wrote, once as prefill and once as decoding. Costs six forward passes of at most 52 tokens.
    """
    blocks_per_request = -(-NUM_TOKENS // BLOCK_SIZE)
    storage = KVStorage(model.layers, 4 * blocks_per_request, BLOCK_SIZE, model.dtype, model.device)
    runner = ModelRunner(model, storage)
    num_tokens = min(NUM_TOKENS, model.max_positions)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, num_tokens, dtype=np.int32)
    other = tokens[::-1].copy()
    tables = np.arange(4 * blocks_per_request, dtype=np.int32).reshape(4, -1)

    def run(*parts: tuple[int, IntArray, int, int]) -> torch.Tensor:
        batch = _batch([(tables[row], ids, start, end) for row, ids, start, end in parts])
        return runner.forward(batch, batch.query_starts[1:2].astype(np.int64) - 1)[0]

    whole = run((0, tokens, 0, num_tokens))
    cuts = {0, num_tokens // 2, num_tokens - 1, num_tokens}
    for start, end in itertools.pairwise(sorted(cuts)):
        chunked = run((1, tokens, start, end))
    if not torch.equal(whole, chunked):
        return "logits depend on how prefill is chunked"
    num_hit_blocks = min(4, (num_tokens - 1) // BLOCK_SIZE)
    tables[2, :num_hit_blocks] = tables[0, :num_hit_blocks]
    num_other = min(7, num_tokens)
    beside = run((2, tokens, num_hit_blocks * BLOCK_SIZE, num_tokens), (3, other, 0, num_other))
    decoded = run((2, tokens, num_tokens - 1, num_tokens), (3, other, num_other - 1, num_other))
    if not torch.equal(whole, beside) or not torch.equal(whole, decoded):
        return "logits depend on cache hits or on the other requests of a batch"
    return None


def _batch(parts: list[tuple[IntArray, IntArray, int, int]]) -> Batch:
    """A batch of (block table, token ids, start, end)."""
    lengths = [end - start for _, _, start, end in parts]
    return Batch(
        entries=(),
        token_ids=np.concatenate([ids[start:end] for _, ids, start, end in parts]),
        positions=np.concatenate([np.arange(start, end, dtype=np.int32) for _, _, start, end in parts]),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        block_tables=np.stack([table for table, *_ in parts]),
        write_from=np.zeros(len(parts), np.int32),
        copies=np.empty((0, 2), np.int32),
    )
