"""The store tier before servers that are broken or hostile: what they send is bounded, and so is the time they take."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreword.tiers.rare_warning import PERIOD_S, RareWarning
from foreword.tiers.store.valkey_tier import ValkeyTier
from foreword.tiers.store.value import HEADER_BYTES, server_key
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import Buffers
from tiers.block_world import BLOCK_BYTES, WAIT_S, keys_of, load, store, until
from tiers.store_world import OPTIONS, shared_server

pytest.importorskip("valkey")

PATIENT = replace(OPTIONS, max_failures=1)
KEYS = keys_of(range(3))
HONEST = {b"EXISTS": b":1\r\n", b"INFO": b"$0\r\n\r\n", b"GETRANGE": b"$0\r\n\r\n"}
DRIPS_S = 10.0
"""After which a server that drips ends by itself: a tier that waits for it fails the test and does not hang."""


class Liar:
    """A server that sends the same bytes for each command of a name, and after those for `drips` single bytes."""

    def __init__(self, folder: Path, replies: dict[bytes, bytes], *, drips: bytes = b"") -> None:
        self.url = f"unix://{folder / 'liar'}"
        self._replies, self._drips = {**HONEST, **replies}, drips
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "liar"))
        self._listener.listen()
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def reply(self, name: bytes, data: bytes) -> None:
        """Send other bytes for the commands of a name from now on."""
        self._replies[name] = data

    def close(self) -> None:
        self._is_closed.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near:
            try:
                while data := near.recv(1 << 16):
                    for name in [word for word in data.split(b"\r\n") if word in self._replies]:
                        near.sendall(self._replies[name])
                        until = time.monotonic() + DRIPS_S
                        while name == self._drips and time.monotonic() < until and not self._is_closed.wait(0.0005):
                            near.sendall(b"1")
            except OSError:
                return


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[Callable[..., Liar]]:
    made: list[Liar] = []

    def make(replies: dict[bytes, bytes], drips: bytes = b"") -> Liar:
        made.append(Liar(tmp_path, replies, drips=drips))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "reply",
    [
        b"$%d\r\n" % (HEADER_BYTES + BLOCK_BYTES + 2),
        b"$8000000000\r\n",
        b"$9223372036854775808\r\n",
        b"$" + b"9" * 4000 + b"\r\n",
        b"$-7\r\n",
        b"$+5\r\nabcde\r\n",
        b"*2\r\n",
        b"\r\n",
        b":" + b"1" * (1 << 15),
    ],
)
def test_no_reply_is_longer_than_what_was_asked_for(liar, reply: bytes) -> None:
    with ValkeyTier(liar({b"GETRANGE": reply}).url, PATIENT) as tier:
        out = np.zeros((len(KEYS), BLOCK_BYTES), np.uint8)
        lengths = np.full(len(KEYS), BLOCK_BYTES)
        ticket = tier.load(KEYS, lengths, Buffers([row.data for row in out]), deadline_s=WAIT_S)
        assert ticket.wait(WAIT_S)
        assert ticket.report.by_reason() == {"io_error": 3}
        assert tier.stats().num_breaker_trips == 1, "it is left alone"
        assert len(tier._loader.link._body) < 1 << 20
        assert not out.any()


@pytest.mark.parametrize(
    "replies",
    [
        {b"EXISTS": b":99999999999999999999999999\r\n"},
        {b"EXISTS": b"$3\r\nyes\r\n"},
        {b"INFO": b"$9223372036854775808\r\n"},
        {b"INFO": b"$8000000000\r\n"},
        {b"AUTH": b"$8000000000\r\n"},
        {b"SELECT": b"*1000000000\r\n"},
    ],
)
def test_a_start_survives_whatever_the_server_says(liar, replies: dict[bytes, bytes]) -> None:
    login = "?password=secret&db=2" if set(replies) & {b"AUTH", b"SELECT"} else ""
    server = liar({b"AUTH": b"+OK\r\n", b"SELECT": b"+OK\r\n", **replies})
    with ValkeyTier(server.url + login, OPTIONS) as tier:
        assert tier.stats().num_breaker_trips >= 1


@pytest.mark.parametrize("name", [b"EXISTS", b"INFO", b"AUTH"])
def test_a_server_that_drips_does_not_hold_up_the_start(liar, caplog, name: bytes) -> None:
    server = liar({b"AUTH": b"+OK\r\n", name: b"+"}, drips=name)
    login = "?password=secret" if name == b"AUTH" else ""
    with ValkeyTier(server.url + login, replace(OPTIONS, session_s=0.2)) as tier:
        assert tier.stats().num_breaker_trips >= 1
    assert "it does not answer in time" in caplog.text


def test_a_load_from_a_server_that_drips_ends_with_its_deadline(liar) -> None:
    server = liar({b"GETRANGE": b"$%d\r\n" % (HEADER_BYTES + BLOCK_BYTES)}, drips=b"GETRANGE")
    with ValkeyTier(server.url, OPTIONS) as tier:
        out = np.zeros((1, BLOCK_BYTES), np.uint8)
        ticket = tier.load(keys_of([0]), np.array([BLOCK_BYTES]), Buffers([out[0].data]), deadline_s=1.0)
        assert ticket.wait(WAIT_S)
        assert ticket.report.outcomes.tolist() == [Outcome.TIMEOUT]
        # A thread that starts late has less than its deadline, and less than LATE_MIN_S would not be measured.
        until(lambda: tier.estimate_load_s(1 << 20) > 1.0)  # so the next load is not tried at once


def test_many_bad_values_are_one_line(caplog) -> None:
    server = shared_server()
    server.client().flushall()
    keys = keys_of(range(40))
    with ValkeyTier(server.url, OPTIONS) as tier:
        store(tier, keys)
        for name in keys.names():
            server.client().set(server_key(name), b"x" * 200)
        with caplog.at_level(logging.WARNING):
            assert load(tier, keys).by_reason() == {"corrupt": 40}
    assert sum("damaged or foreign" in record.message for record in caplog.records) == 1


def test_a_rare_warning_counts_what_it_did_not_say(caplog) -> None:
    now = 5.0
    warning = RareWarning(logging.getLogger("foreword.tests"), "%s is broken", monotonic=lambda: now)
    for number in range(3):
        warning.note(f"value {number}")
    now += PERIOD_S
    warning.note("value 3")
    assert [record.message for record in caplog.records] == [
        "value 0 is broken",
        "value 3 is broken (2 more since the last such line)",
    ]


@pytest.mark.parametrize(
    ("host", "is_warned"), [("127.0.0.1", False), ("localhost", False), ("[::1]", False), ("192.0.2.1", True)]
)
def test_an_unsigned_store_on_another_machine_is_a_warning(caplog, tmp_path: Path, host: str, is_warned: bool) -> None:
    key_file = tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    key_file.chmod(0o600)
    quick = replace(OPTIONS, io_timeout_s=0.01, session_s=0.02)
    for options, expected in ((quick, is_warned), (replace(quick, mac_key_file=key_file), False)):
        caplog.clear()
        with ValkeyTier(f"valkey://user:secret@{host}:1", options):
            assert ("are not signed" in caplog.text) == expected
            assert "secret" not in caplog.text


def test_a_server_that_refuses_all_questions_is_tried_less_and_less_often(liar, caplog) -> None:
    caplog.set_level(logging.INFO, "foreword")
    server = liar({b"EXISTS": b":0\r\n"})
    with ValkeyTier(server.url, PATIENT) as tier:
        server.reply(b"EXISTS", b"-NOAUTH Authentication required.\r\n")
        begun = time.monotonic()
        while time.monotonic() < begun + 1.0:
            tier.lookup(keys_of([time.monotonic_ns()]))
            time.sleep(0.01)
        assert tier.stats().num_breaker_trips == 1
        assert "answers again" not in caplog.text
        server.reply(b"EXISTS", b":0\r\n")
        until(lambda: tier.stats().breaker == "closed")
    assert "answers again" in caplog.text
