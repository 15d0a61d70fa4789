"""Asks an engine's HTTP server where it publishes its events: vLLM's `GET /kv_event_sources`."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from foreword.errors import ConfigError
from foreword.events.publisher import is_here, is_loopback

ASK_S = 10.0
"""Seconds in which the whole answer must arrive."""
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EventSource:
    """The addresses of one data-parallel rank."""

    events: str
    replay: str | None
    topic: str


def find_source(url: str, rank: int | None = None) -> EventSource:
    """Find the source of a rank (None: the only one) at a server such as http://HOST:8000. Raises ConfigError."""
    sources_url = url
    try:
        parts = urlsplit(url)
        sources_url = f"{parts.scheme}://{parts.netloc}/kv_event_sources"
        ranks = _read(json.loads(_answer(sources_url)))
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        why = f"it answers {error.code}" if isinstance(error, urllib.error.HTTPError) else str(error)
        raise ConfigError(
            f"{sources_url} does not say where the engine publishes events: {why}; give the address itself, such as "
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
        why = "no rank is given" if rank is None else f"rank={rank} is none of them"
        raise ConfigError(
            f"the engine at {url} publishes for ranks {', '.join(map(str, sorted(ranks)))}, and {why}; use --rank"
        )
    answer, host = ranks[rank], parts.hostname or ""
    replay = answer.get("replay_endpoint")
    topic = str(answer.get("topic") or "")
    source = EventSource(reachable(answer["endpoint"], host), replay and reachable(replay, host), topic)
    for name, address in (("endpoint", source.events), ("replay_endpoint", source.replay)):
        if address and is_loopback(urlsplit(address).hostname) and not is_here(host):
            raise ConfigError(
                f"the engine at {url} has {name}={address}, which only its own machine reaches; start it with "
                f'"{name}": "tcp://*:{address.rpartition(":")[2]}" in --kv-events-config, or watch there, by '
                "http://127.0.0.1:PORT"
            )
    return source


def _answer(url: str) -> bytes:
    """The body of an answer. A thread limits the whole time: urlopen's timeout is for a single read only."""
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
    for source in answer.values():
        is_map = isinstance(source, dict)
        addresses = (source.get("endpoint"), source.get("replay_endpoint") or "") if is_map else (None,)
        if not all(isinstance(address, str) for address in addresses):
            raise ValueError("its answer has a source without an endpoint")
        for address in addresses:
            urlsplit(address)  # raises ValueError for an address that is none
    return {int(rank): source for rank, source in answer.items() if source.get("publisher", "zmq") == "zmq"}


def reachable(address: str, host: str) -> str:
    """An address at which a socket listens, as other machines see it: tcp://0.0.0.0:5557 -> tcp://HOST:5557."""
    host = f"[{host}]" if ":" in host else host
    for wildcard in ("*", "0.0.0.0", "[::]", "::"):
        if address.startswith(f"tcp://{wildcard}:"):
            return f"tcp://{host}:{address.rpartition(':')[2]}"
    return address
