"""Where an engine publishes its events, asked at its HTTP address: vLLM's `GET /kv_event_sources`."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from foreword.errors import ConfigError

ASK_S = 10.0
"""A whole answer must be here by then."""
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EventSource:
    """The addresses of one data-parallel rank."""

    events: str
    replay: str | None
    topic: str


def find_source(url: str, rank: int | None = None) -> EventSource:
    """The source of a rank, by default the only one, at a server such as http://HOST:8000. Raises ConfigError."""
    asked = url
    try:
        parts = urlsplit(url)
        asked = f"{parts.scheme}://{parts.netloc}/kv_event_sources"
        ranks = _read(json.loads(_answer(asked)))
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        why = f"it answers {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise ConfigError(
            f"{asked} does not say where the engine publishes events: {why}; give the address itself, such as "
            "tcp://HOST:5557"
        ) from error
    if not ranks:
        raise ConfigError(
            f"the engine at {url} publishes no events; start it with --kv-events-config "
            "'{\"enable_kv_cache_events\": true}'"
        )
    if rank is None and len(ranks) == 1:
        (rank,) = ranks
    if rank not in ranks:
        said = "no rank is given" if rank is None else f"rank={rank} is none of them"
        raise ConfigError(
            f"the engine at {url} publishes for ranks {', '.join(map(str, sorted(ranks)))}, and {said}; use --rank"
        )
    found, host = ranks[rank], parts.hostname or ""
    replay = found.get("replay_endpoint")
    topic = str(found.get("topic") or "")
    source = EventSource(_reachable(found["endpoint"], host), replay and _reachable(replay, host), topic)
    for name, address in (("endpoint", source.events), ("replay_endpoint", source.replay)):
        if address and _is_loopback(urlsplit(address).hostname) and not _is_here(host):
            raise ConfigError(
                f"the engine at {url} has {name}={address}, which only its own machine reaches; start it with "
                f'"{name}": "tcp://*:{address.rpartition(":")[2]}" in --kv-events-config, or watch there, by '
                "http://127.0.0.1:PORT"
            )
    return source


def _is_loopback(host: str | None) -> bool:
    return host is not None and (host in ("localhost", "::1") or host.startswith("127."))


def _is_here(host: str) -> bool:
    """Whether a host is this machine: what is sent there has the same address as its sender. Sends nothing."""
    with suppress(OSError):  # a name that cannot be resolved
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.connect(address)
                target = trial.getpeername()[0]  # of 0.0.0.0, the address that it stands for
                if target == trial.getsockname()[0] or _is_loopback(target):
                    return True
    return False


def _answer(url: str) -> bytes:
    """The body of an answer. A timeout of urlopen is one of each read, and a server may send a byte at a time."""
    body: Future[bytes] = Future()

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=ASK_S) as answer:
                body.set_result(answer.read(MAX_BYTES))
        except Exception as error:  # raised again by the caller's thread
            body.set_exception(error)

    threading.Thread(target=ask, name="event-sources", daemon=True).start()
    try:
        return body.result(ASK_S)
    except TimeoutError as error:
        raise TimeoutError(f"no whole answer came in {ASK_S:g} s") from error


def _read(answer: Any) -> dict[int, dict[str, Any]]:
    """The sources by rank. Raises ValueError for another form."""
    if not isinstance(answer, dict):
        raise ValueError(f"its answer is a {type(answer).__name__}")
    for one in answer.values():
        addresses = (one.get("endpoint"), one.get("replay_endpoint") or "") if isinstance(one, dict) else (None,)
        if not all(isinstance(address, str) for address in addresses):
            raise ValueError("its answer has a source without an endpoint")
    return {int(rank): one for rank, one in answer.items() if one.get("publisher", "zmq") == "zmq"}


def _reachable(address: str, host: str) -> str:
    """An address that listens everywhere, as one at this host."""
    host = f"[{host}]" if ":" in host else host
    for wildcard in ("*", "0.0.0.0", "[::]", "::"):
        if address.startswith(f"tcp://{wildcard}:"):
            return f"tcp://{host}:{address.rpartition(':')[2]}"
    return address
