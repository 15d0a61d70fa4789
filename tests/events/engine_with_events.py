"""A HashEngine that publishes its events, random traffic for it, and what its pool holds."""

import random
import re

import numpy as np

from doors import counted_keys, listen
from foreword.cache import BlockHash, ExtraKeys
from foreword.config import EventsConfig
from foreword.engine import Prompt
from foreword.events.mirror import Mirror
from foreword.events.publisher import Publisher
from foreword.request import SamplingParams
from hash_runner import HashEngine


class EngineWithEvents:
    """A real engine whose vocabulary of two tokens makes prefixes meet, part, and be evicted."""

    def __init__(self, config: EventsConfig, *, seed: int = 0, index: str = "hash", num_blocks: int = 24) -> None:
        self.publisher = Publisher(config)
        self.built = HashEngine.build(
            num_blocks=num_blocks, vocab_size=2, prefix_index=index, deduplicate=seed % 2 == 1
        )
        self.ledger = self.built.manager.ledger
        listen(self.ledger.events, self.publisher.note)
        self._rng = random.Random(seed)
        self._num_requests = 0

    def work(self, num_requests: int = 20) -> None:
        """Serve random prompts, some under salts, and reset the cache now and then."""
        rng, engine = self._rng, self.built.engine
        for _ in range(num_requests):
            self._num_requests += 1
            keys = ExtraKeys(salt=rng.choice([None, None, "red", "blue"]), adapter=rng.choice([None, None, "sql"]))
            tokens = np.array([rng.randint(0, 1) for _ in range(rng.randint(1, 30))], np.int32)
            prompt = Prompt(tokens, extra_keys=keys)
            engine.add_request(f"r{self._num_requests}", prompt, SamplingParams(max_tokens=rng.randint(1, 9)))
            while engine.has_unfinished_requests() and rng.random() < 0.8:
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        if rng.random() < 0.1:
            engine.reset_prefix_cache()
        self.built.engine.check_integrity()

    def ask(self, tokens: list[int]) -> None:
        """Serve one prompt."""
        self._num_requests += 1
        prompt = Prompt(np.array(tokens, np.int32))
        self.built.engine.add_request(f"r{self._num_requests}", prompt, SamplingParams(max_tokens=1))
        while self.built.engine.has_unfinished_requests():
            self.built.engine.step()

    def held(self) -> set[BlockHash]:
        """The keys that the ledger, which `check_integrity` compares with the index, holds now."""
        return {key for group in self.ledger.groups for key in counted_keys(group)}

    def __enter__(self) -> "EngineWithEvents":
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()


def as_ints(keys: set[BlockHash]) -> set[int]:
    return {int.from_bytes(key[-8:], "big") for key in keys}


def hashes(mirror: Mirror) -> set[int | bytes]:
    assert all(block.token_ids is not None for block in mirror.blocks.values())
    return {name[2] for name in mirror.blocks}


def reachable(address: str) -> str:
    """The address at which a consumer on this machine reaches a publisher."""
    return re.sub(r"//(0\.0\.0\.0|\*)", "//127.0.0.1", address)


EVERYTHING = EventsConfig(
    kv_events="tcp://*:0", kv_events_replay="tcp://127.0.0.1:0", kv_events_snapshot="tcp://127.0.0.1:0"
)
