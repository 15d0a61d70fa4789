"""A publisher of what a test wants, at the times that it wants, in vLLM's form: no ids, replays or snapshots."""

import zmq

from foreword.events.wire import Event, EventBatch, encode_batch, encode_seq


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

    def send(self, time: float, *events: Event) -> None:
        self._socket.send_multipart([b"", encode_seq(self._seq), encode_batch(EventBatch(time, events), "map")])
        self._seq += 1

    def __enter__(self) -> "RawPublisher":
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
