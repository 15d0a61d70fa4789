"""What each eviction policy should do, written block by block, and a random life that drives both alike."""

import math
import random
from bisect import bisect_right
from collections import Counter
from itertools import pairwise

import numpy as np

from foreword.cache import PriorityPolicy
from foreword.cache.eviction.value import (
    BINS_PER_DOUBLING,
    MIN_REMEMBERED,
    NEIGHBOUR_WEIGHTS,
    NUM_SIZES,
    PRIOR_HAZARD,
    PRIOR_WEIGHT,
    SHRINKAGE,
    STEPS_PER_DOUBLING,
    USE_CLASS,
)
from foreword.replay.policies import POLICIES


def ids(*block_ids):
    return np.array(block_ids, np.int32)


class Model:
    """What a policy should do, block by block, with the order found by sorting all free blocks."""

    def __init__(self, num_blocks):
        self.time = 0
        self.free = dict.fromkeys(range(num_blocks), 0)  # block -> what it is sorted by among its equals
        self.cached = {}  # block -> what is known of its content
        for block in self.free:
            self.free[block] = self.tick()

    def tick(self):
        self.time += 1
        return self.time

    def append(self, blocks):
        self.put_first([block for block in blocks if block not in self.cached])
        for block in blocks:
            if block in self.cached:
                self.free[block] = self.tick()

    def put_first(self, blocks):
        for block in reversed(blocks):
            self.free[block] = -self.tick()

    def remove(self, blocks):
        for block in blocks:
            del self.free[block]

    def popleft(self, count):
        blocks = self.in_order()[:count]
        for block in blocks:
            del self.free[block]
            self.cached.pop(block, None)
        return blocks

    def note_cached(self, blocks, depths):
        for depth, block in sorted(zip(depths, blocks, strict=True), key=lambda pair: -pair[0]):
            self.cached[block] = {"hits": 0, "depth": depth, "cached_at": self.tick(), "priority": 0}

    def note_hit(self, blocks):
        for block in blocks:
            if block in self.cached:
                self.cached[block]["hits"] += 1

    def note_forgotten(self, blocks):
        self.put_first([b for b in blocks if self.cached.pop(b, None) is not None and b in self.free])

    def set_priority(self, blocks, priority):
        for block in blocks:
            if block in self.cached:
                self.cached[block]["priority"] = priority
                if block in self.free:
                    self.free[block] = self.tick()

    def in_order(self):
        return sorted(self.free, key=self.key)

    def key(self, block):
        if block not in self.cached:
            return (0, self.free[block])
        return (1, *self.cached_key(block, self.cached[block]))


class LruModel(Model):
    def cached_key(self, block, content):
        return (self.free[block],)


class LfuModel(Model):
    def cached_key(self, block, content):
        return (content["hits"], self.free[block])


class SlruModel(Model):
    """A block is protected by a hit, until the protected ones that are free grow too many."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.limit = int(0.8 * num_blocks)

    def append(self, blocks):
        super().append(blocks)
        protected = [b for b in self.in_order() if b in self.cached and self.cached[b]["hits"]]
        for block in protected[: max(0, len(protected) - self.limit)]:
            self.cached[block]["hits"] = 0
            self.free[block] = self.tick()

    def cached_key(self, block, content):
        return (content["hits"] > 0, self.free[block])


class FifoModel(Model):
    def cached_key(self, block, content):
        return (content["cached_at"],)


class TlruModel(Model):
    """The four blocks that a request frees first are the ends of its prompt."""

    def append(self, blocks):
        super().append(blocks)
        for at, block in enumerate([block for block in blocks if block in self.cached]):
            self.cached[block]["rank"] = int(at >= 4)

    def cached_key(self, block, content):
        return (content["rank"], self.free[block])


class LastAccessedModel(Model):
    def append(self, blocks):
        super().append(blocks)
        now = self.tick()
        for at, block in enumerate(blocks):
            if block in self.cached:
                self.free[block] = (now, -self.cached[block]["depth"], at)

    def cached_key(self, block, content):
        return (self.free[block],)


class PriorityModel(Model):
    def cached_key(self, block, content):
        return (content["priority"], self.free[block])


class Use:
    """One use of a block: how it ended, and how many ages are known to have been reached."""

    def __init__(self, number, kind):
        self.number, self.kind = number, kind
        self.is_latest = True
        self.num_counted = 0


class ValueModel(Model):
    """The estimates of 0010-value-policy.md, counted use by use: value, then least recently used.

    The life tells no keys, so whatever leaves the cache is never seen again. For pools of fewer than 64 blocks:
    larger ones put their blocks in order a batch at a time.
    """

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.num_blocks = num_blocks
        self.uses = []
        self.parent = {}
        self.edges = [0.0, *self.ages(max(1.0, num_blocks / 64))]
        self.hit = Counter()  # (kind, number of an age) -> uses of that kind that were hit at that age
        self.reached = Counter()
        self.next_count = 0
        self.settle()

    def ages(self, edge):
        while edge < MIN_REMEMBERED:
            yield edge
            edge *= 2 ** (1 / BINS_PER_DOUBLING)

    def note_cached(self, blocks, depths):
        super().note_cached(blocks, depths)
        for block in blocks:
            self.cached[block] |= {"use": None, "times": 0}
            self.parent.pop(block, None)

    def note_hit(self, blocks):
        for content in (self.cached[block] for block in blocks if block in self.cached):
            content["times"] += 1
            use = content["use"]
            if use is not None and use.is_latest:
                self.count(use)
                self.hit[use.kind, self.age(use)] += 1
                use.is_latest = False

    def append(self, blocks):
        super().append(blocks)
        blocks = [block for block in blocks if block in self.cached]
        for block, head in pairwise(blocks):
            if self.cached[block]["depth"] == self.cached[head]["depth"] + 1:
                self.parent[block] = head
        times = [self.cached[block]["times"] for block in blocks]
        num_added = times.count(0)
        size = min(1 + int(2 * math.log2(num_added)), NUM_SIZES - 1) if num_added else 0
        for at, block in enumerate(blocks):
            content = self.cached[block]
            if content["use"] is not None:
                content["use"].is_latest = False
            kind = (int(USE_CLASS[min(times[at], len(USE_CLASS) - 1)]), at == 0, size)
            content["use"] = Use(len(self.uses), kind)
            self.uses.append(content["use"])
        if blocks and len(self.uses) >= self.next_count:
            for use in self.uses:
                if use.is_latest:
                    self.count(use)
            if not self.next_count:  # evidence fades first when there is hardly any, then never in a life this short
                self.hit, self.reached = (Counter({k: n / 2 for k, n in c.items()}) for c in (self.hit, self.reached))
            self.settle()
            self.next_count = len(self.uses) + max(500, self.num_blocks // 16)

    def age(self, use):
        """Number of the last age that a use has reached."""
        return bisect_right(self.edges, len(self.uses) - use.number) - 1

    def count(self, use):
        """It has reached the ages up to its own."""
        for age in range(use.num_counted, self.age(use) + 1):
            self.reached[use.kind, age] += 1
        use.num_counted = max(use.num_counted, self.age(use) + 1)

    def settle(self):
        """Values are what follows from the counts of now."""
        self.values = {}
        self.settled = self.hit.copy(), self.reached.copy()
        everywhere = [Counter(), Counter()]
        for counts, total in zip(self.settled, everywhere, strict=True):
            for (_, age), count in counts.items():
                total[age] += count
        self.everywhere = [
            (everywhere[0][age] + PRIOR_WEIGHT * PRIOR_HAZARD) / (everywhere[1][age] + PRIOR_WEIGHT)
            for age in range(len(self.edges))
        ]

    def value(self, kind, age):
        """Best of all horizons: the chance of a hit within it, by the time that the block is kept for it."""
        if (kind, age) not in self.values:
            still, time, best = 1.0, 0.0, 0.0
            widths = [end - start for start, end in pairwise(self.edges)] + [self.edges[-1]]
            for hazard, width in list(zip(self.hazards(kind), widths, strict=True))[age:]:
                time += width * (still + still * (1 - hazard)) / 2
                still *= 1 - hazard
                best = max(best, (1 - still) / time)
            self.values[kind, age] = round(STEPS_PER_DOUBLING * math.log2(best))
        return self.values[kind, age]

    def hazards(self, kind):
        """The kind's own evidence and its neighbours', leaning on that of all kinds where there is little."""
        ages = range(len(self.edges))
        hit, reached = ([self.evidence(counts, kind, age) for age in ages] for counts in self.settled)
        expected = sum(count * hazard for count, hazard in zip(reached, self.everywhere, strict=True))
        ratio = (sum(hit) + SHRINKAGE) / (expected + SHRINKAGE)
        lean = [min(hazard * ratio, 0.95) for hazard in self.everywhere]
        return [min((hit[age] + SHRINKAGE * lean[age]) / (reached[age] + SHRINKAGE), 0.98) for age in ages]

    def evidence(self, counts, kind, age):
        times, is_last, size = kind
        found = counts[kind, age]
        for distance, weight in enumerate(NEIGHBOUR_WEIGHTS, 1):
            found += weight * counts[(times, is_last, size - distance), age]
            found += weight * counts[(times, is_last, size + distance), age]
        return found

    def cached_key(self, block, content):
        return (self.worth(block), content["use"].number)

    def worth(self, block):
        """A head is worth as much as what follows it."""
        content = self.cached[block]
        following = [
            other
            for other in self.free
            if other in self.cached
            and self.parent.get(other) == block
            and self.cached[other]["depth"] == content["depth"] + 1
        ]
        return max([self.value(content["use"].kind, self.age(content["use"])), *map(self.worth, following)])


MODELS = {
    "lru": LruModel,
    "lfu": LfuModel,
    "tinylfu": LfuModel,  # the life tells no keys
    "tlru": TlruModel,
    "slru": SlruModel,
    "fifo": FifoModel,
    "last_accessed": LastAccessedModel,
    "priority": PriorityModel,
    "value": ValueModel,
}


class RandomLife:
    """Random operations, done to a policy and to a model alike.

    Prefixes are short chains: blocks are taken, some are cached, cached ones are hit, freed, forgotten.
    """

    def __init__(self, rng, num_blocks, policy, model):
        self.rng, self.num_blocks, self.policy, self.model = rng, num_blocks, policy, model
        model.policy = policy
        self.held = []  # one entry per block and holder
        self.cached = set()

    def tell(self, name, blocks, *depths):
        getattr(self.policy, name)(ids(*blocks), *(ids(*each) for each in depths))
        getattr(self.model, name)(blocks, *depths)

    def some(self, blocks, most=None):
        blocks = sorted(set(blocks))
        return self.rng.sample(blocks, self.rng.randint(0, min(len(blocks), most or len(blocks))))

    def take(self):
        count = self.rng.randint(0, len(self.policy))
        taken = self.policy.popleft(count).tolist()
        assert taken == self.model.popleft(count)
        self.held += taken
        self.cached.difference_update(taken)
        fresh, depth = taken[: self.rng.randint(0, count)], self.rng.randint(0, 3)
        self.tell("note_cached", fresh, list(range(depth, depth + len(fresh))))
        self.cached.update(fresh)

    def hit(self):
        found = self.some(self.cached, 6)
        self.tell("remove", [block for block in found if block not in self.held])
        self.tell("note_hit", found)
        self.held += found

    def release(self):
        released = self.some(self.held)
        for block in released:
            self.held.remove(block)
        self.tell("append", [block for block in released if block not in self.held])

    def forget(self):
        gone = self.some(range(self.num_blocks), 4)
        self.tell("note_forgotten", gone)
        self.cached.difference_update(gone)

    def set_priority(self):
        if isinstance(self.policy, PriorityPolicy):
            chosen, priority = self.some(range(self.num_blocks), 3), self.rng.randint(-1, 2)
            self.policy.set_priority(ids(*chosen), priority)
            self.model.set_priority(chosen, priority)

    def step(self):
        steps = (self.take, self.hit, self.release, self.forget, self.set_priority)
        self.rng.choices(steps, (35, 25, 30, 5, 5))[0]()


def lives(name, num_steps, *sizes):
    """Yield after each step of one random life per pool size."""
    for num_blocks in sizes:
        life = RandomLife(random.Random(num_blocks), num_blocks, POLICIES[name](num_blocks), MODELS[name](num_blocks))
        for _ in range(num_steps):
            life.step()
            yield life
