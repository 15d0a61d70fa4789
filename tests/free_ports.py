"""A port for a server that a test starts later, by its number."""

from __future__ import annotations

import secrets
import socket

FIRST, LAST = 10_000, 32_000
"""Below the ports that Linux gives to clients, which may take one of these before the server begins."""


def free_port() -> int:
    """A port of this machine at which nobody listens."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
