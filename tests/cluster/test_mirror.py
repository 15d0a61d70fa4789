"""Mirrors of replicas: equal to the pool whatever order its events come in, or openly unknown."""

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, CacheLedger, EventLog
from foreword.cluster import EventBatch, ReplicaMirror
from foreword.cluster.holders import HolderIndex
from foreword.cluster.reuse_ages import ReuseAges
from foreword.replay.caches import ManagerCache, as_sequence
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.trace import RecordedRequest

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=30)


class Pool:
    """A real cache of 8 blocks that publishes a batch for each request."""

    def __init__(self, life=b"a"):
        self.events, self.life, self.batches, self.sequences = EventLog(), life, [], []
        self.cache = ManagerCache(8, "lru", CacheLedger(8, events=self.events))

    def take(self, content):
        """Serve a prompt; its keys."""
        request = RecordedRequest(0.0, chain(as_content_ids(content)), 4 * len(content), 1, 4)
        sequence = as_sequence(request)
        self.cache.admit_sequence(sequence)
        self.sequences.append(sequence)
        self._publish()
        return list(sequence.block_hashes())

    def reset(self):
        self.cache.manager.reset_prefix_cache()
        self._publish()

    def _publish(self):
        events = tuple(each.event for each in self.events.take())
        self.batches.append(EventBatch(self.life, len(self.batches), events))

    def held(self):
        """The keys that lookups find."""
        lookup = self.cache.manager.get_computed_blocks
        return {key for each in self.sequences for key in each.block_hashes()[: lookup(each).num_shared_tokens // 2]}

    def snapshot(self):
        """The state as one batch, from the events that made it."""
        mirror = new_mirror()
        for batch in self.batches:
            observe(mirror, batch, 0.0)
        stored = [BlockStored((key,), parent, (), 2) for key, parent in mirror.parents.items()]
        return EventBatch(self.life, len(self.batches) - 1, tuple(stored))


def observe(mirror: ReplicaMirror, batch: EventBatch, now: float) -> None:
    mirror.learn(lambda: mirror.follower.take(batch), now)


def install(mirror: ReplicaMirror, snapshot: EventBatch, now: float) -> None:
    mirror.learn(lambda: mirror.follower.install(snapshot), now)


def new_mirror():
    return ReplicaMirror(0, HolderIndex(), ReuseAges())


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.sets(st.integers(0, 29), max_size=2))
def test_a_mirror_equals_the_pool_after_every_batch(prompts, resets):
    pool, mirror, keys = Pool(), new_mirror(), set()
    for number, content in enumerate(prompts):
        if number in resets:
            pool.reset()
            observe(mirror, pool.batches[-1], number)
        keys.update(pool.take(content))
        observe(mirror, pool.batches[-1], number)
        assert mirror.is_synced
        assert set(mirror.parents) == pool.held()
        mirror.check_integrity(list(keys))


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.randoms(use_true_random=False), st.booleans())
def test_dropped_doubled_and_reordered_batches_never_leave_a_wrong_mirror_that_claims_to_be_right(prompts, rng, lossy):
    pool, mirror, states = Pool(), new_mirror(), []
    keys = [key for content in prompts for key in pool.take(content)]
    for number in range(len(pool.batches)):
        exact = new_mirror()
        for batch in pool.batches[: number + 1]:
            observe(exact, batch, 0.0)
        states.append(set(exact.parents))
    sent = [batch for batch in pool.batches for _ in range(rng.choice((0, 1, 1, 2) if lossy else (1, 1, 2)))]
    for at in range(len(sent) - 1):
        if rng.random() < 0.3:
            sent[at], sent[at + 1] = sent[at + 1], sent[at]
    newest = -1
    for batch in sent:
        observe(mirror, batch, 0.0)
        newest = max(newest, batch.number)
        if mirror.is_synced:
            assert set(mirror.parents) == states[newest]
    if not lossy:
        assert mirror.is_synced
    install(mirror, pool.snapshot(), 0.0)
    assert mirror.is_synced
    assert set(mirror.parents) == states[-1] == pool.held()
    mirror.check_integrity(keys)


def test_batches_after_a_snapshot_are_kept_while_it_is_under_way_and_those_it_includes_are_dropped():
    pool, mirror = Pool(), new_mirror()
    for content in ([0, 1], [0, 0]):
        pool.take(content)
    snapshot = pool.snapshot()
    pool.take([1, 1, 1])
    observe(mirror, pool.batches[1], 0.0)
    observe(mirror, pool.batches[2], 0.0)
    assert not mirror.is_synced
    assert mirror.follower.counts["gaps"] == 0, "it was never synced"
    install(mirror, snapshot, 0.0)
    assert mirror.is_synced
    assert len(mirror.parents) == 6
    install(mirror, snapshot, 0.0)  # older than what is known by now
    assert len(mirror.parents) == 6


def test_a_replica_restarted_at_the_same_address_is_followed_from_its_first_batch():
    for lives in ((b"a", b"b"), (None, None)):
        old, new, mirror = Pool(lives[0]), Pool(lives[1]), new_mirror()
        keys = [key for content in ([0, 1], [1, 1]) for key in old.take(content)]
        for batch in old.batches:
            observe(mirror, batch, 0.0)
        mirror.claim([b"expected"])
        keys += new.take([0, 0, 1])
        observe(mirror, new.batches[0], 0.0)
        assert mirror.is_synced
        assert mirror.follower.counts["restarts"] == 1
        assert set(mirror.parents) == new.held()
        mirror.check_integrity([*keys, b"expected"])
        late = Pool(b"c")
        for content in ([0], [1]):
            late.take(content)
        observe(mirror, late.batches[1], 0.0)
        assert not mirror.is_synced
        assert not mirror.parents


def test_a_reset_closes_a_gap_and_a_removal_of_an_unknown_block_needs_a_snapshot():
    mirror = new_mirror()
    observe(mirror, EventBatch(b"a", 0, (BlockStored((b"x",), None, (), 2),)), 0.0)
    observe(mirror, EventBatch(b"a", 1, (BlockRemoved((b"y",)),)), 0.0)
    assert not mirror.is_synced
    assert mirror.follower.counts["gaps"] == 1
    observe(mirror, EventBatch(b"a", 2), 0.0)
    assert not mirror.is_synced
    reset = (BlockRemoved((b"z",)), AllBlocksCleared(), BlockStored((b"w",), None, (), 2))
    observe(mirror, EventBatch(b"a", 7, reset), 0.0)
    assert mirror.is_synced
    assert set(mirror.parents) == {b"w"}


def test_blocks_of_other_groups_and_media_are_not_taken_for_blocks_on_the_device():
    mirror = new_mirror()
    events = (
        BlockStored((b"x",), None, (), 2, medium="cpu"),
        BlockStored((b"y",), None, (), 2, group_idx=1),
        BlockRemoved((b"x",), medium="cpu"),
    )
    observe(mirror, EventBatch(b"a", 0, events), 0.0)
    assert mirror.is_synced
    assert not mirror.parents


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 11)), max_size=60),
    st.lists(st.integers(0, 20), max_size=25),
    st.sets(st.integers(0, 11)),
)
def test_one_walk_finds_the_depth_of_every_replica(held, keys, among):
    index = HolderIndex()
    model = {slot: {key for key, holder in held if holder == slot} for slot in range(12)}
    for key, slot in held:
        index.add([key], slot)
    mask = sum(1 << slot for slot in among)
    expected = [
        next((at for at, key in enumerate(keys) if key not in model[slot]), len(keys)) if slot in among else 0
        for slot in range(12)
    ]
    assert index.depths([keys], mask, 12)[0].tolist() == expected
    ends = range(len(keys) + 1)
    each = index.depths([keys[:end] for end in ends], mask, 12)
    assert each.tolist() == [[min(depth, end) for depth in expected] for end in ends]
    for key, slot in held:
        index.discard([key], slot)
    assert not len(index)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.lists(st.integers(0, 1), max_size=7)), max_size=60), st.integers(0))
def test_a_search_finds_what_the_walk_finds_on_the_mirrors_of_radix_pools(prompts, among):
    index, pools = HolderIndex(), [Pool() for _ in range(40)]
    mirrors = [ReplicaMirror(slot, index, ReuseAges()) for slot in range(40)]
    for slot, content in prompts:
        pools[slot].take(content)
        observe(mirrors[slot], pools[slot].batches[-1], 0.0)
    several = [Pool().take(content) for _, content in [*prompts, (0, [1] * 30)]]
    for mask in ((1 << 40) - 1, among & (1 << 40) - 1):
        walked = [index.depths([keys], mask, 40)[0].tolist() for keys in several]
        assert [index.depths([keys], mask, 40, closed=True)[0].tolist() for keys in several] == walked
        assert index.depths(several, mask, 40, closed=True).tolist() == walked
    assert index.depths([], 1, 40).shape == (0, 40)
    deep = [("deep", at) for at in range(40)]
    for slot in range(40):  # more depths than a search is made for
        index.add(deep[: slot + 1], slot)
    assert index.depths([deep], (1 << 40) - 1, 40, closed=True)[0].tolist() == list(range(1, 41))
