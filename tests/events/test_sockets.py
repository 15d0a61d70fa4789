"""Events over real sockets: a mirror equals the pool, whatever happens to the messages, and the engine never waits."""

from dataclasses import replace

import pytest
import zmq

from doors import feed_of, leave_asleep, num_events
from events.engine_with_events import EVERYTHING, EngineWithEvents, as_ints, hashes, reachable
from events.proxy import Proxy
from foreword.config import EventsConfig
from foreword.errors import ConfigError
from foreword.events.publisher import Publisher, binds
from foreword.events.subscriber import Subscriber
from foreword.events.wire import decode_live
from free_ports import free_port
from polling import poll_until

pytestmark = pytest.mark.filterwarnings("error")


def follow(addresses: dict[str, str], live: str | None = None, **others: str | None) -> Subscriber:
    snapshot, replay = addresses.get("kv_events_snapshot"), addresses.get("kv_events_replay")
    given = {"snapshot": snapshot, "replay": replay, **others}
    return Subscriber(live or reachable(addresses["kv_events"]), **given)


def becomes_equal(subscriber: Subscriber, engine: EngineWithEvents) -> bool:
    """Whether the mirror comes to hold exactly what the engine's pool holds."""
    whole = engine.publisher.config.kv_events_hashes == "bytes"
    held = engine.held() if whole else as_ints(engine.held())
    return poll_until(subscriber, lambda one: one.is_exact and hashes(one.mirror) == held)


@pytest.mark.parametrize("seed", range(4))
def test_a_mirror_equals_the_pool_after_random_traffic(seed: int) -> None:
    """The consumer comes late; the encodings, hashes and indexes vary with the seed."""
    config = replace(
        EVERYTHING,
        kv_events_encoding="array" if seed % 2 else "map",
        kv_events_hashes="bytes" if seed // 2 else "int",
    )
    with EngineWithEvents(config, seed=seed, index="radix" if seed % 2 else "hash") as engine:
        engine.work()
        with follow(engine.publisher.addresses) as subscriber:
            for _ in range(5):
                engine.work(10)
                assert becomes_equal(subscriber, engine)
            assert subscriber.follower.counts["gaps"] == 0
            tokens = sum(len(block.token_ids or ()) for block in subscriber.mirror.blocks.values())
            assert tokens == subscriber.mirror.num_tokens == 4 * len(engine.held())


@pytest.mark.parametrize("without", [None, "replay", "snapshot"])
def test_lost_repeated_reordered_and_damaged_messages_are_made_good(without: str | None) -> None:
    config = EVERYTHING if without != "snapshot" else replace(EVERYTHING, kv_events_snapshot=None)
    with (
        EngineWithEvents(config, seed=7) as engine,
        Proxy(reachable(engine.publisher.addresses["kv_events"]), seed=7) as proxy,
        follow(engine.publisher.addresses, proxy.address, **({} if without is None else {without: None})) as subscriber,
    ):
        engine.work(5)
        counts = subscriber.follower.counts

        def shows_enough() -> bool:
            is_asked_again = counts["snapshots"] > 1 or without != "replay"
            return proxy.num_troubled > 10 and counts["bad"] + counts["gaps"] > 1 and is_asked_again

        for round_number in range(20):
            if round_number >= 4 and shows_enough():  # a busy machine sends fewer and larger messages
                break
            proxy.trouble = 0.4
            engine.work(15)
            subscriber.poll(0.05)
            proxy.trouble = 0.0
            engine.work(3)
            assert becomes_equal(subscriber, engine)
        assert shows_enough(), (proxy.num_troubled, counts)


def test_a_replay_that_is_too_old_ends_in_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.events.publisher.MAX_KEPT_BATCHES", 2)
    with (
        EngineWithEvents(EVERYTHING, seed=1) as engine,
        Proxy(reachable(engine.publisher.addresses["kv_events"]), seed=1) as proxy,
        follow(engine.publisher.addresses, proxy.address) as subscriber,
    ):
        engine.work(5)
        assert becomes_equal(subscriber, engine)
        snapshots = subscriber.follower.counts["snapshots"]
        proxy.trouble = 1.0
        engine.work(20)
        proxy.trouble = 0.0
        engine.work(3)
        assert becomes_equal(subscriber, engine)
        assert subscriber.follower.counts["incomplete_replays"] >= 1
        assert subscriber.follower.counts["snapshots"] > snapshots


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_publisher_that_restarts_at_the_same_addresses_is_noticed(with_ids: bool) -> None:
    ports = [free_port() for _ in range(3)]
    config = EventsConfig(
        kv_events=f"tcp://*:{ports[0]}",
        kv_events_replay=f"tcp://127.0.0.1:{ports[1]}",
        kv_events_snapshot=f"tcp://127.0.0.1:{ports[2]}" if with_ids else None,
    )
    with EngineWithEvents(config, seed=1) as engine, follow(engine.publisher.addresses) as subscriber:
        engine.work()
        assert becomes_equal(subscriber, engine)
        first = subscriber.follower.publisher_id
        engine.publisher.close()
        with EngineWithEvents(config, seed=2) as second:
            for _ in range(1 if with_ids else 200):  # without heartbeats, only news show that it is another one
                second.work(2)
                if poll_until(subscriber, lambda one: one.follower.counts["restarts"] > 0, 0.1):
                    break
            assert becomes_equal(subscriber, second)
            assert second.held() != engine.held()
            assert subscriber.follower.counts["restarts"] == 1
            assert (subscriber.follower.publisher_id != first) is with_ids


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]", "0.0.0.0", "*"])
def test_a_publisher_listens_at_literal_and_loopback_addresses_and_says_where(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    if host == "[::1]" and not binds("tcp://[::1]:1"):
        pytest.skip("this machine has no IPv6")
    port = free_port()
    config = EventsConfig(kv_events=f"tcp://{host}:{port}", kv_events_snapshot="tcp://127.0.0.1:*")
    with caplog.at_level("INFO"), EngineWithEvents(config, seed=1) as engine:
        reached = host if host not in ("0.0.0.0", "*") else "127.0.0.1"
        with Subscriber(
            f"tcp://{reached}:{port}", snapshot=reachable(engine.publisher.addresses["kv_events_snapshot"])
        ) as subscriber:
            engine.work()
            assert becomes_equal(subscriber, engine)
            assert poll_until(subscriber, lambda one: not one.unanswered)
            engine.publisher.close()
            assert poll_until(subscriber, lambda one: bool(one.unanswered)), "the publisher has gone"
    assert f"kv_events: listening at {engine.publisher.addresses['kv_events']}" in caplog.text


def test_a_publisher_calls_a_consumer_at_names_and_other_machines() -> None:
    assert [binds(f"tcp://{host}:5557") for host in ("collector", "192.0.2.7", "[2001:db8::7]")] == [False] * 3
    assert binds("ipc:///run/events")


def test_an_overflowing_feed_burns_a_number_and_a_snapshot_repairs_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher's thread is held up while the engine works: nobody waits, and the loss is visible."""
    monkeypatch.setattr("foreword.events.publisher.MAX_WAITING_BLOCKS", 8)
    with EngineWithEvents(EVERYTHING, seed=3) as engine:
        with follow(engine.publisher.addresses) as subscriber:
            engine.work(5)
            assert poll_until(subscriber, lambda one: one.follower.counts["batches"] > 0)
            for _ in range(10):
                leave_asleep(engine.publisher)  # nobody wakes it until its next heartbeat
                engine.work(10)
            assert becomes_equal(subscriber, engine)
            assert engine.publisher._next_seq > len(engine.publisher._replays), "no number was left out"
            assert subscriber.follower.counts["snapshots"] >= 1
        with follow(engine.publisher.addresses, snapshot=None) as subscriber:
            poll_until(subscriber, lambda one: one.follower.counts["incomplete_replays"] > 0)
            assert not subscriber.is_exact


def test_a_consumer_that_reads_nothing_does_not_hold_up_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All events of the engine are published, though nobody reads one subscriber's messages."""
    monkeypatch.setattr("foreword.events.publisher.MAX_UNSENT", 1)
    with EngineWithEvents(replace(EVERYTHING, kv_events_snapshot=None), seed=4) as engine, zmq.Context() as context:
        slow = context.socket(zmq.SUB)
        slow.rcvhwm, slow.rcvbuf = 1, 1
        slow.connect(reachable(engine.publisher.addresses["kv_events"]))
        slow.subscribe(b"")
        engine.work(200)
        with follow(engine.publisher.addresses) as subscriber:
            assert becomes_equal(subscriber, engine)
        assert feed_of(engine.publisher)._num_taken == num_events(engine.publisher) > 200
        slow.close(linger=0)


def test_the_engines_thread_touches_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """`note` works, at the same cost, when the publisher's thread is gone; what does not fit is dropped."""
    monkeypatch.setattr("foreword.events.publisher.MAX_WAITING_BLOCKS", 50)
    engine = EngineWithEvents(EVERYTHING, seed=5)
    engine.publisher.close()
    engine.work(60)
    feed = feed_of(engine.publisher)
    assert len(feed._events) <= 50 < num_events(engine.publisher)
    number, groups = feed.read() or (0, {})
    assert number == num_events(engine.publisher)
    assert {key for held in groups.values() for key in held} == engine.held()


def test_topics_and_wrong_requests() -> None:
    with (
        EngineWithEvents(replace(EVERYTHING, kv_events_topic="kv@10.0.0.7@demo"), seed=6) as engine,
        zmq.Context() as context,
    ):
        live, asked = context.socket(zmq.SUB), context.socket(zmq.REQ)
        live.subscribe(b"kv@")
        live.connect(reachable(engine.publisher.addresses["kv_events"]))
        frames = live.recv_multipart()
        assert frames[0] == b"kv@10.0.0.7@demo"
        assert decode_live(frames).number >= 0
        asked.connect(engine.publisher.addresses["kv_events_snapshot"])
        asked.send(b"everything")
        assert asked.recv_multipart() == [(-2).to_bytes(8, "big", signed=True), engine.publisher.publisher_id]
        dealer = context.socket(zmq.DEALER)
        dealer.connect(engine.publisher.addresses["kv_events_replay"])
        dealer.send_multipart([b"", b"\0"])  # ignored
        dealer.send_multipart([b"", (10**6).to_bytes(8, "big")])
        assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
        context.destroy(linger=0)


def test_addresses_that_cannot_be_used_are_refused_by_name() -> None:
    with EngineWithEvents(EVERYTHING) as engine:
        taken = engine.publisher.addresses["kv_events_replay"]
        with pytest.raises(ConfigError, match=f"kv_events_replay='{taken}' cannot be used: Address already in use"):
            Publisher(replace(EVERYTHING, kv_events_replay=taken))
    with pytest.raises(ConfigError, match="'tcp://nowhere' is no address that can be followed"):
        Subscriber("tcp://127.0.0.1:5557", replay="tcp://nowhere")
