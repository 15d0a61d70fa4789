"""The cache core in another engine: needs only numpy and `foreword.cache`.

    python examples/standalone_cache.py

The "model" is arithmetic: the KV of a token is one number that depends on all tokens so far, and the next token
is computed from the KV of the whole sequence, read from its blocks. A wrong block gives a wrong answer.
"""

import numpy as np

from foreword.cache import ExtraKeys, KVCacheManager, RadixIndex, TokenSequence

BLOCK_SIZE, NUM_BLOCKS, VOCABULARY = 16, 64, 1000


class Engine:
    """One request at a time, greedy."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(NUM_BLOCKS, block_size=BLOCK_SIZE, index=RadixIndex(NUM_BLOCKS, BLOCK_SIZE))
        self.kv = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.int64)  # a real engine: [layers, 2, slots, heads, width]
        self.num_computed = 0

    def generate(self, request_id: str, prompt: list[int], count: int, tenant: str | None = None) -> list[int]:
        manager = self.manager
        sequence = TokenSequence(request_id, prompt, block_size=BLOCK_SIZE, extra_keys=ExtraKeys(salt=tenant))
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)  # the cached beginning
        computed = hit.num_tokens
        for step in range(count):
            if step:
                manager.begin_step()
            if manager.allocate_slots(sequence, len(sequence), hit if step == 0 else None) is None:
                raise MemoryError("a real engine would preempt a request here")
            for source, target in manager.take_copies():  # the hit may end inside a block: copy on write
                blocks = self.kv.reshape(NUM_BLOCKS, BLOCK_SIZE)
                blocks[target] = blocks[source]
            sequence.append(self.forward(sequence, computed))
            computed = len(sequence) - 1
        manager.free(request_id)  # the blocks stay findable until others need them
        return [int(token) for token in sequence.token_ids[len(prompt) :]]

    def forward(self, sequence: TokenSequence, computed: int) -> int:
        """Writes the KV of the tokens from `computed` on, then "attends" to the KV of the whole sequence."""
        table = self.manager.block_ids(sequence.request_id)
        positions = np.arange(len(sequence))
        slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        state = self.kv[slots[computed - 1]] if computed else 0
        for position in range(computed, len(sequence)):
            state = (31 * state + int(sequence.token_ids[position]) + 1) % 1_000_003
            self.kv[slots[position]] = state
            self.num_computed += 1
        return int(self.kv[slots].sum() % VOCABULARY)


def main() -> None:
    engine = Engine()
    document = [token * 7 % VOCABULARY for token in range(100)]
    questions = [[1, 2, 3], [1, 2, 4], [5]]
    for number, question in enumerate(questions * 2):
        prompt, before = document + question, engine.num_computed
        answer = engine.generate(f"request-{number}", prompt, 20)
        fresh = Engine().generate("alone", prompt, 20)
        assert answer == fresh, "the cache changed an answer"
        print(f"request {number}: {len(prompt)} + 20 tokens, {engine.num_computed - before} computed")
    before = engine.num_computed
    engine.generate("other tenant", document + questions[0], 20, tenant="b")
    print(f"another tenant's: {len(document) + 3} + 20 tokens, {engine.num_computed - before} computed")
    engine.manager.check_integrity()
    stats = engine.manager.stats
    print(f"{stats.hits} of {stats.queries} prompt tokens came from the cache ({stats.hit_rate:.0%})")


if __name__ == "__main__":
    main()
