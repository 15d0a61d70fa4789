"""Connections to a Valkey or Redis server: commands go out in pipelines, replies come into one buffer.

The Python package `valkey` connects and encodes commands. Replies are read here, from the package's socket into memory
that is reused, which is four times as fast as the package's parser.

A server may be hostile or broken. So the caller gives a largest length for every reply. A session has one deadline for
its login and all its reads and writes. So replies of gigabytes, or of one byte per second, do no harm.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

from foreword.errors import ConfigError

SCHEMES = ("valkey", "valkeys", "redis", "rediss", "unix")
UNUSABLE = ("LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN")
"""Errors after which the next command would fail as well."""
LINE_BYTES = 16 << 10
SHORTEST_WAIT_S = 0.001
REFUSAL_CHARACTERS = 200
"""The most characters of a server's error to keep; they go into log lines."""

Command = Sequence[bytes | str | int | memoryview]


class ServerGoneError(Exception):
    """The server sent no answer, or a wrong one. `is_deadline`: the caller's own deadline came before the answer."""

    def __init__(self, message: str, *, is_deadline: bool = False) -> None:
        super().__init__(message)
        self.is_deadline = is_deadline


class ServerRefusedError(ServerGoneError):
    """The server answers, but refuses this user, database or command."""


class Refusal(str):
    """An error that the server sent as a reply to one command."""

    @property
    def code(self) -> str:
        """The first word: `OOM`, `NOPERM`, `WRONGTYPE`, ..."""
        return self.split(" ", 1)[0]


Reply = int | str | memoryview | Refusal | None


class StoreServer:
    """A server by its URL. Raises ConfigError for a wrong URL, or if the package valkey is not installed."""

    def __init__(self, url: str, io_timeout_s: float) -> None:
        self.shown_url = _without_secrets(url)
        self.is_local = False
        """Whether only this machine can reach the server by this address."""
        self.io_timeout_s = io_timeout_s
        try:
            self._valkey: Any = importlib.import_module("valkey")
        except ImportError as error:
            raise ConfigError(
                f"the store {self.shown_url!r} needs the package valkey, which is not installed; "
                "run `pip install 'foreword[store]'`"
            ) from error
        options: dict[str, object] = {
            "socket_timeout": io_timeout_s,
            "socket_connect_timeout": io_timeout_s,
            "lib_name": None,  # saves two round trips, and a permission
            "lib_version": None,
        }
        try:
            parts = urlsplit(url)
            if parts.scheme not in SCHEMES or (parts.scheme == "unix" and not parts.path):
                raise ValueError
            if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
                raise ValueError
            if parts.scheme in ("valkeys", "rediss"):
                options["ssl_check_hostname"] = True
            self.is_local = parts.scheme == "unix" or _is_loopback(parts.hostname or "localhost")
            self._pool = self._valkey.ConnectionPool.from_url(url, **options)
            self._pool.make_connection()
        except Exception:  # its message may quote the password
            raise ConfigError(
                f"the store's URL {self.shown_url!r} cannot be understood; give valkey://HOST:PORT/DATABASE, "
                "valkeys://... for TLS, or unix:///PATH/OF/SOCKET, and write special characters of a password as %XX"
            ) from None

    def link(self) -> Link:
        """Make a connection for one thread; it connects when it is first used."""
        return Link(self._pool.make_connection(), self._valkey.exceptions, self.io_timeout_s)


class Link:
    """One connection of one thread."""

    def __init__(self, connection: Any, errors: Any, io_timeout_s: float) -> None:
        self._connection, self._errors = connection, errors
        # This replaces the package's own login, which reads replies without limits.
        connection.valkey_connect_func = lambda connection: connection._parser.on_connect(connection)
        self._io_timeout_s = io_timeout_s
        self._deadline = 0.0
        self._num_awaited = 0
        self.num_replies = 0
        """The number of replies since the session began."""
        self._line = bytearray(LINE_BYTES)
        self._begin = self._end = 0
        """The range of `_line` that is received and not used yet."""
        self._body = bytearray(LINE_BYTES)

    @contextlib.contextmanager
    def session(self, deadline: float) -> Iterator[Self]:
        """Allow commands and replies until `deadline`, a time of `time.monotonic`. Raises ServerGoneError.

        If replies are unread at the end, the connection is closed.
        """
        self._deadline = deadline
        self.num_replies = self._num_awaited = 0
        try:
            self._connect()
            yield self
        except BaseException:
            self.close()
            raise
        if self._num_awaited:
            self.close()

    def close(self) -> None:
        """Close the connection. Any thread may call this; a thread that waits for a reply gets ServerGoneError."""
        self._connection.disconnect()

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands. Each has one reply. Memory in the commands may change once this returns."""
        with self._translated():
            for chunk in self._connection.pack_commands(commands):
                self._limit().sendall(chunk)
            self._num_awaited += len(commands)

    def reply(self, max_bytes: int = 0) -> Reply:
        """Return the next reply. A memoryview has at most `max_bytes` bytes, and is valid until the next call."""
        with self._translated():
            reply = self._read(max_bytes)
        self._num_awaited -= 1
        self.num_replies += 1
        if isinstance(reply, Refusal) and reply.code in UNUSABLE:
            raise ServerGoneError(reply)
        return reply

    def number(self) -> int:
        """Return the next reply, which must be a number. Raises ServerRefusedError."""
        reply = self.reply()
        if not isinstance(reply, int):
            raise ServerRefusedError(str(reply))
        return reply

    def _connect(self) -> None:
        with self._translated():
            if self._connection._sock is not None:
                with contextlib.suppress(self._errors.ValkeyError, OSError):
                    if self._begin == self._end and not self._connection.can_read():
                        return
                self._connection.disconnect()  # closed by the server, or with unread bytes
            self._begin = self._end = 0
            self._connection.connect()
        connection = self._connection
        if connection.password:
            self._must_accept("AUTH", *([connection.username] if connection.username else []), connection.password)
        if connection.db:
            self._must_accept("SELECT", connection.db)
        self.num_replies = 0

    def _must_accept(self, *command: bytes | str | int) -> None:
        """Send a command of the login. Raises ServerRefusedError unless the reply is OK."""
        self.send([command])
        reply = self.reply()
        if reply != "OK":
            raise ServerRefusedError(str(reply))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of the package and of sockets as ServerGoneError."""
        try:
            yield
        except (self._errors.AuthenticationError, self._errors.ResponseError) as error:
            raise ServerRefusedError(str(error)) from error
        except (self._errors.TimeoutError, TimeoutError) as error:
            late = time.monotonic() >= self._deadline - SHORTEST_WAIT_S
            raise ServerGoneError("it does not answer in time", is_deadline=late) from error
        except (self._errors.ValkeyError, OSError, ValueError, OverflowError, MemoryError) as error:
            raise ServerGoneError(str(error)) from error

    # ------------------------------------------------------------------------------ replies

    def _limit(self) -> socket.socket:
        """The socket, with a timeout for its next call. Raises TimeoutError if the session's deadline has passed."""
        sock: socket.socket | None = self._connection._sock
        if sock is None:
            raise OSError("the connection is closed")
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        sock.settimeout(max(SHORTEST_WAIT_S, min(self._io_timeout_s, remaining_s)))
        return sock

    def _read(self, max_bytes: int) -> Reply:
        line = self._read_line()
        kind, body = line[:1], line[1:]
        if kind in b":$" and not re.fullmatch(rb"-?[0-9]{1,18}", body):
            raise OSError(f"{body[:20]!r} is no number of a Valkey or Redis server")
        if kind == b":":
            return int(body)
        if kind == b"$":
            return None if body == b"-1" else self._read_body(int(body), max_bytes)
        if kind == b"+":
            return body.decode(errors="replace")
        if kind == b"-":
            return Refusal(" ".join(body.decode(errors="replace").split())[:REFUSAL_CHARACTERS])
        raise OSError(f"{kind!r} begins no reply of a Valkey or Redis server")

    def _read_line(self) -> bytes:
        while (at := self._line.find(b"\r\n", self._begin, self._end)) < 0:
            if self._begin:
                self._line[: self._end - self._begin] = self._line[self._begin : self._end]
                self._begin, self._end = 0, self._end - self._begin
            self._end += self._receive(memoryview(self._line)[self._end :])
        line = bytes(self._line[self._begin : at])
        self._begin = at + 2
        return line

    def _read_body(self, num_bytes: int, max_bytes: int) -> memoryview:
        """The bytes of a bulk string; bytes that came with its first line are copied, the rest is received in place."""
        if not 0 <= num_bytes <= max_bytes:
            raise OSError(f"a reply of {num_bytes} bytes came where at most {max_bytes} were asked for")
        needed = num_bytes + 2
        if len(self._body) < needed:
            self._body = bytearray(needed)
        body = memoryview(self._body)
        count = min(needed, self._end - self._begin)
        body[:count] = memoryview(self._line)[self._begin : self._begin + count]
        self._begin += count
        while count < needed:
            count += self._receive(body[count:needed])
        return body[:num_bytes]

    def _receive(self, into: memoryview) -> int:
        if not len(into):
            raise OSError(f"a line of its reply is longer than {LINE_BYTES} bytes")
        received = self._limit().recv_into(into)
        if not received:
            raise OSError("the server has closed the connection")
        return received


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_secrets(url: str) -> str:
    """A URL without its secrets, so that people may see it."""
    return re.sub(r"(password=)[^&]*", r"\1***", re.sub(r"//.*@", "//***@", url))
