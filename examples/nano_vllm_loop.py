"""nano-vllm's loop (schedule, run, sample) over our block manager: a tiny transformer, paged KV, preemption.

    python examples/nano_vllm_loop.py

Our manager replaces nano-vllm's: `get_computed_blocks` for can_allocate, `allocate_slots` for allocate and
may_append, `free` for deallocate. With the package foreword-cache alone, import from `foreword_cache`.
"""

from collections import deque

import numpy as np

from foreword.cache import KVCacheManager, RadixIndex, TokenSequence

BLOCK, VOCABULARY, WIDTH, MAX_TOKENS = 4, 50, 16, 12
rng = np.random.default_rng(0)
embedding, positions = rng.normal(size=(VOCABULARY, WIDTH)), rng.normal(size=(512, WIDTH))
to_query, to_key, to_value, to_logits = (
    rng.normal(size=(WIDTH, width)) / 4 for width in (WIDTH, WIDTH, WIDTH, VOCABULARY)
)


class Engine:
    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        index = RadixIndex(num_blocks, BLOCK)
        options = {"index": index, "block_size": BLOCK, "enable_prefix_caching": enable_prefix_caching}
        self.manager = KVCacheManager(num_blocks, **options)
        self.kv = np.zeros((num_blocks, BLOCK, 2, WIDTH))
        self.waiting, self.running = deque[TokenSequence](), deque[TokenSequence]()
        self.computed: dict[str, int] = {}
        self.num_computed = self.num_preempted = 0

    def schedule(self) -> list[TokenSequence]:
        """Schedules new requests if any fits, after their cached beginning; else one more token for each request."""
        self.manager.begin_step()
        batch: list[TokenSequence] = []
        while self.waiting:
            hit = self.manager.get_computed_blocks(self.waiting[0])
            if self.manager.allocate_slots(self.waiting[0], len(self.waiting[0]), hit) is None:
                break
            batch.append(self.waiting.popleft())
            self.computed[batch[-1].request_id] = hit.num_tokens
        if batch:
            self.running += batch
            return batch
        for sequence in list(self.running):
            while sequence in self.running:
                if self.manager.allocate_slots(sequence, len(sequence)) is not None:
                    batch.append(sequence)
                    break
                self.waiting.appendleft(self.running.pop())  # preempt the last request, which is in no batch yet
                self.manager.free(self.waiting[0].request_id)  # its blocks stay findable
                self.num_preempted += 1
        if not batch:
            raise MemoryError("one request needs more blocks than there are")
        return batch

    def run(self, batch: list[TokenSequence]) -> None:
        for source, target in self.manager.take_copies():  # a hit may end inside a block: copy on write
            self.kv[target] = self.kv[source]
        for sequence in batch:
            table, tokens = self.manager.block_ids(sequence.request_id), sequence.token_ids.copy()
            for at in range(self.computed[sequence.request_id], len(tokens)):  # row by row: bits do not depend on hits
                x = embedding[tokens[at]] + positions[at]
                self.kv[table[at // BLOCK], at % BLOCK] = x @ to_key, x @ to_value
                keys, values = self.kv[table].reshape(-1, 2, WIDTH)[: at + 1].swapaxes(0, 1)
                weights = np.exp(keys @ (x @ to_query) / WIDTH**0.5)
                logits = (x + weights @ values / weights.sum()) @ to_logits
                self.num_computed += 1
            self.computed[sequence.request_id] = len(tokens)
            sequence.append(int(logits.argmax()))

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        sequences = [TokenSequence(str(at), prompt, block_size=BLOCK) for at, prompt in enumerate(prompts)]
        self.waiting += sequences
        while self.waiting or self.running:
            self.run(self.schedule())
            for sequence in [one for one in self.running if len(one.shown) == MAX_TOKENS]:
                self.running.remove(sequence)
                self.manager.free(sequence.request_id)
        return [sequence.shown for sequence in sequences]


if __name__ == "__main__":
    document = [int(token) for token in rng.integers(0, VOCABULARY, 40)]
    prompts = [[*document, question, question + 1] for question in range(6)]
    cached, plain = Engine(num_blocks=24), Engine(num_blocks=24, enable_prefix_caching=False)
    assert cached.generate(prompts) == plain.generate(prompts), "the cache changed an answer"
    stats = cached.manager.stats
    print(f"{stats.hits} of {stats.queries} prompt tokens came from the cache; the tokens are equal with and without")
    for name, engine in (("with", cached), ("without", plain)):
        print(f"{name}: {engine.num_computed} tokens computed, {engine.num_preempted} preemptions")
