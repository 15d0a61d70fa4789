"""A proxy between a publisher's live stream and a consumer, which loses, repeats, reorders and damages messages."""

import random
import threading

import zmq


class Proxy:
    """Forwards messages from `upstream`; `trouble` is the share of them that something happens to."""

    def __init__(self, upstream: str, seed: int) -> None:
        self.trouble = 0.0
        self.num_troubled = 0
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._sub, self._pub = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._sub.connect(upstream)
        self._sub.subscribe(b"")
        self.address = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        held_back: list[list[bytes]] = []
        while not self._ends:
            if not self._sub.poll(20):
                continue
            frames = self._sub.recv_multipart()
            if self._rng.random() >= self.trouble:
                self._pub.send_multipart(frames)
                while held_back:
                    self._pub.send_multipart(held_back.pop())
                continue
            self.num_troubled += 1
            match self._rng.choice(["drop", "repeat", "later", "cut", "garbage"]):
                case "repeat":
                    self._pub.send_multipart(frames)
                    self._pub.send_multipart(frames)
                case "later":
                    held_back.append(frames)
                case "cut":
                    self._pub.send_multipart([*frames[:2], frames[2][: len(frames[2]) // 2]])
                case "garbage":
                    self._pub.send_multipart([self._rng.randbytes(5) for _ in range(self._rng.randint(1, 4))])

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()
        self._context.destroy(linger=0)
