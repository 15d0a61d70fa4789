"""A publisher of what a test wants, at the times that it wants, in vLLM's form: no ids, replays or snapshots."""

import zmq

from foreword.cache import BlockHash, KVCacheEvent
from foreword.events.wire import Format, encode_seq


def key(number: int) -> BlockHash:
    """A key that is this number on the wire."""
    return BlockHash(number.to_bytes(8, "big"))


class RawPublisher:
    """Numbers its batches from 0. `wait` first, or a consumer misses what was sent before it came."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._seq = 0

    def has_consumer(self) -> bool:
        """Whether one has come since the last call."""
        return bool(self._socket.poll(0)) and bool(self._socket.recv())

    def wait(self, timeout_s: float = 60.0) -> None:
        """Until a consumer has come."""
        assert self._socket.poll(round(1000 * timeout_s)), "nobody came"
        self._socket.recv()

    def send(self, time: float, *events: KVCacheEvent) -> None:
        self._socket.send_multipart([b"", encode_seq(self._seq), Format().batch(events, time)])
        self._seq += 1

    def __enter__(self) -> "RawPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
