"""Servers for tests: the real process, and the same app in this process where a test must reach the engine.

Both listen on a free port of the loopback interface and serve the embedded model.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import openai
import uvicorn

from foreword.demo.run import embedded_model
from foreword.engine import Engine
from foreword.llm import LLM
from foreword.server.app import make_app
from foreword.server.engine_thread import in_a_thread
from foreword.server.options import ServerConfig
from foreword.server.service import OpenDoor, Service

MODEL = "foreword-demo"
FACTS = "The code of the amber falcon is 4821.\nThe home of the quiet lantern is Lisbon.\n"
FALCON = [{"role": "system", "content": FACTS}, {"role": "user", "content": "What is the code of the amber falcon?"}]
START_TIMEOUT_S = 120.0
ENDLESS: dict[str, Any] = {"ignore_eos": True}

T = TypeVar("T")


class ServerProcess:
    """`foreword serve` in a process of its own."""

    def __init__(
        self, *args: str, log: IO[str] | None = None, start_timeout_s: float = START_TIMEOUT_S, **environment: str
    ) -> None:
        """`log` takes what it writes to standard error."""
        # pytest writes the name of the running test there, which may be longer than a process can be given.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "foreword.cli", "serve", "--port", "0", *args],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        )
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        stdout = self._process.stdout
        assert stdout is not None
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        line = lines.get(timeout=start_timeout_s)
        assert "serving" in line, f"the server did not start: {line!r}"
        self.url = line.split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM, and do not wait."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit code."""
        return self._process.wait(timeout=300)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(uvicorn.Server):
    """One that ends when it is told to, and not when it next looks whether it was."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()


class ServerThread:
    """The app in this process, on real sockets."""

    def __init__(self, llm: LLM, config: ServerConfig, open_door: OpenDoor = in_a_thread) -> None:
        self.app = make_app(llm, config, MODEL, open_door)
        self.service: Service = self.app.state.service
        self._server = _Server(
            uvicorn.Config(self.app, host="127.0.0.1", port=0, log_config=None, timeout_graceful_shutdown=20)
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a coroutine on the server's event loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def ask(self, function: Callable[[Engine], T]) -> T:
        """Run something on the engine's thread, between two steps."""
        return self.start(self.service.thread.call(function)).result(60)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The engine makes no step meanwhile; requests are taken, and wait."""
        reached, go_on = threading.Event(), threading.Event()

        def hold(_: Engine) -> None:
            reached.set()
            assert go_on.wait(60)

        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(self.ask, hold)
            assert reached.wait(60)
            try:
                yield
            finally:
                go_on.set()
                holding.result()

    def close(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._server.ending.set)
        self._thread.join(60)
        if self._thread.is_alive():
            faulthandler.dump_traceback()  # where it hangs
        assert not self._thread.is_alive()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def document(name: str, lines: int = 8) -> str:
    """A text of some lines that no other name's text begins like."""
    return "".join(f"{name}, line {number}: the code of the falcon is 4821.\n" for number in range(lines))


@contextmanager
def embedded_llm(**options: Any) -> Iterator[LLM]:
    options = {"kv_cache_memory_bytes": 16 * 2**20, "self_check": False, **options}
    with embedded_model() as folder, LLM(str(folder), **options) as llm:
        yield llm


def client(url: str, key: str = "none", **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120, **options)


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for what another thread or process brings about; fails if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def post(url: str, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=120, **options)


@contextmanager
def tiny_server(folder: Path, chat_template: str | None) -> Iterator[ServerThread]:
    """A tiny model with random weights and this chat template, served in this process."""
    from tiny_models import RECIPES, save_model, save_tokenizer

    save_model(folder, RECIPES["qwen3"])
    save_tokenizer(folder, chat_template=chat_template)
    with (
        LLM(str(folder), kv_cache_memory_bytes=16 * 2**20, self_check=False) as llm,
        ServerThread(llm, ServerConfig()) as server,
    ):
        yield server
