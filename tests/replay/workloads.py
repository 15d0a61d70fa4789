"""Small synthetic traffic of several kinds, as requests with prefix keys."""

import heapq

import numpy as np

from foreword.replay.keys import as_content_ids, chain
from foreword.replay.simulator import Simulation
from foreword.replay.trace import RecordedRequest


class _Blocks:
    def __init__(self):
        self.count = 0

    def new(self, number):
        self.count += int(number)
        return list(range(self.count - int(number), self.count))


def _zipf(count, exponent):
    weights = 1 / np.arange(1, count + 1) ** exponent
    return weights / weights.sum()


def chat(rng, count, tenants=5, think=300):
    """Conversations of some turns under the system prompts of several tenants; half end after one turn."""
    blocks, waiting, prompts = _Blocks(), [], []
    systems = [blocks.new(rng.integers(1, 12)) for _ in range(tenants)]
    while len(prompts) < count:
        now = len(prompts)
        if waiting and waiting[0][0] <= now and rng.random() < 0.8:
            _, _, prompt, turns = heapq.heappop(waiting)
            prompt = prompt + blocks.new(1 + rng.poisson(3))
        else:
            prompt = systems[rng.choice(tenants, p=_zipf(tenants, 1.1))] + blocks.new(1 + rng.poisson(8))
            turns = rng.geometric(0.25) if rng.random() < 0.5 else 1
        prompts.append(prompt + blocks.new(1))
        if turns > 1:
            heapq.heappush(waiting, (now + 1 + int(rng.lognormal(np.log(think))), now, prompt, turns - 1))
    return prompts


def agents(rng, count, tasks=150):
    """Tasks that call a tool again and again, each time with all that came before."""
    blocks, live, prompts = _Blocks(), [], []
    systems = [blocks.new(12) for _ in range(4)]
    while len(prompts) < count:
        if len(live) < tasks:
            live.append([systems[rng.integers(4)] + blocks.new(4), rng.geometric(0.05)])
        task = live[rng.integers(len(live))]
        prompts.append(list(task[0]))
        task[0] = task[0] + blocks.new(1 + rng.poisson(1.5))
        task[1] -= 1
        if not task[1]:
            live.remove(task)
    return prompts


def documents(rng, count, number=1500):
    """Questions about documents, some of which are popular."""
    blocks = _Blocks()
    system, texts = blocks.new(2), [blocks.new(rng.integers(5, 40)) for _ in range(number)]
    chosen = rng.choice(number, count, p=_zipf(number, 0.9))
    return [system + texts[one] + blocks.new(1 + rng.poisson(1)) for one in chosen]


def templates(rng, count):
    """Few-shot templates with short questions."""
    blocks = _Blocks()
    texts = [blocks.new(rng.integers(4, 30)) for _ in range(200)]
    return [texts[one] + blocks.new(1 + rng.integers(3)) for one in rng.choice(200, count, p=_zipf(200, 0.7))]


def scans(rng, count):
    """Chat with floods of long documents that nobody reads twice."""
    blocks, prompts = _Blocks(), []
    talk = iter(chat(rng, count))
    blocks.count = 10**6
    while len(prompts) < count:
        prompts += [next(talk) for _ in range(min(150, count - len(prompts)))]
        prompts += [blocks.new(rng.integers(30, 120)) for _ in range(min(20, count - len(prompts)))]
    return prompts


def noise(rng, count):
    """Prompts drawn alike from many: nothing to learn."""
    blocks = _Blocks()
    texts = [blocks.new(rng.integers(1, 20)) for _ in range(1500)]
    return [texts[one] + blocks.new(1) for one in rng.integers(1500, size=count)]


def shifting(rng, count):
    """What is popular changes."""
    blocks = _Blocks()
    texts = [blocks.new(rng.integers(4, 24)) for _ in range(1000)]
    chosen = rng.choice(1000, count, p=_zipf(1000, 1.0))
    return [texts[(one + 37 * (at // 700)) % 1000] + blocks.new(1) for at, one in enumerate(chosen)]


def recency(rng, count):
    """A prompt comes again soon or never: nothing is better than LRU by much."""
    blocks, prompts = _Blocks(), []
    for _ in range(count):
        if prompts and rng.random() < 0.5:
            prompts.append(prompts[-min(len(prompts), rng.geometric(1 / 60))][:-1] + blocks.new(1))
        else:
            prompts.append(blocks.new(rng.integers(4, 30)))
    return prompts


KINDS = (chat, agents, documents, templates, scans, noise, shifting, recency)


def requests(kind, count, seed=0):
    """Requests of one kind, one block a token."""
    prompts = kind(np.random.default_rng(seed), count)
    return [RecordedRequest(None, chain(as_content_ids(list(map(int, p)))), len(p), 1, 1) for p in prompts]


def simulate(recorded, policies, capacities, **options):
    """The results of a recording on a cache of each policy (or `optimum`) and capacity."""
    simulation = Simulation(policies, capacities, **options)
    for request in recorded:
        simulation.admit(request)
    return simulation.result()
