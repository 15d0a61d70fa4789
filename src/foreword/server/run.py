"""Serves one model with uvicorn until a signal stops it.

After SIGTERM or SIGINT /ready answers 503, and `shutdown_delay_s` later the listening socket closes. The server still
finishes the requests that it has accepted, within `shutdown_timeout_s`, and then stops the engine. If the server still
runs ENDING_S after that, its process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

import uvicorn

from foreword.errors import ConfigError, EngineError
from foreword.llm import LLM
from foreword.server.access.tenants import read_keys, read_prefix
from foreword.server.app import make_app
from foreword.server.chats.score_template import CLASSIFYING, RANKING, ScoreTemplate
from foreword.server.dashboard.mount import mount_dashboard
from foreword.server.engine_thread import in_a_thread
from foreword.server.observe.log import log_addresses, log_event, log_model
from foreword.server.options import ServerConfig, name_of_model
from foreword.server.service import OpenDoor

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""The longest time in seconds that the engine's thread may hold the interpreter while the event loop waits.

An answer's first token crosses between the two threads several times. With Python's default of 5 ms, each crossing
costs up to 5 ms (figures: docs/decisions/0011-server.md).
"""


ENDING_S = 30.0
"""Seconds for stopping the engine and writing the tiers, counted from the last answer or the answers' time limit."""


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen at this address. Called before the model is loaded, to save time."""
    failure: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in addresses:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    trial.bind(address)
                except OSError as error:
                    failure = error
                else:
                    return
    except OSError as error:  # the name cannot be resolved
        failure = error
    raise ConfigError(
        f"cannot listen at host={host!r}, port={port}: {failure.strerror if failure else 'it has no address'}; "
        "--host takes an address of this machine, --port 0 takes any free port"
    ) from failure


def check_files(config: ServerConfig) -> None:
    """Raise ConfigError if a file that an option names cannot be read. Called before a model is loaded.

    Pipes are not checked, because a pipe's content can be read only once, and the server reads it later.
    """
    if config.keys_file is not None and not _is_pipe(config.keys_file):
        read_keys(config.keys_file)
    for path in config.share_prefix:
        if not _is_pipe(path):
            read_prefix(path)
    for option, name, places in (
        ("score_template", config.score_template, RANKING),
        ("classify_template", config.classify_template, CLASSIFYING),
    ):
        if name is not None and not _is_pipe(name):
            ScoreTemplate.named(option, name, places)


def _is_pipe(path: str | os.PathLike[str]) -> bool:
    """Say whether a path can be read only once."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def serve(llm: LLM, config: ServerConfig, open_door: OpenDoor = in_a_thread) -> bool:
    """Serve until a signal comes. Print the address to standard output once the server is ready.

    Returns whether the interpreter may end normally. If a thread of a crew still runs compiled code, it may not,
    because this thread would crash while the interpreter ends. Raises EngineError if the start or the stop failed.
    """
    name = next(iter(config.served_model_name), name_of_model(llm.config.model.model))
    app = make_app(llm, config, name, open_door)
    if config.dashboard:
        mount_dashboard(app, app.state.service)
    logging.getLogger("uvicorn.error").addFilter(tell_cancelled)
    options = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        lifespan="on",  # a failed start ends the server; without this, a server without an engine would stay up
        timeout_graceful_shutdown=max(1, round(config.shutdown_timeout_s)),
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    log_model(llm, name)
    service = app.state.service

    def started(address: str) -> None:
        url = address + config.root_path  # the path under which a proxy shows the server
        log_addresses(url, llm.config, config)
        print(f"foreword: serving {name} at {url}", flush=True)

    def stopping() -> None:
        service.is_stopping = True
        text = "stopping: {answers} answers are finished first, within {timeout_s:g} s"
        log_event("stopping", text, answers=service.thread.num_choices, timeout_s=config.shutdown_timeout_s)
        end_within(config.shutdown_delay_s + max(1.0, config.shutdown_timeout_s) + ENDING_S)

    AnnouncingServer(options, started, stopping, config.shutdown_delay_s).run()
    log_event("stopped", "the server has stopped")
    return not any(crew.num_running for crew in service.crews)


def end_within(seconds: float) -> None:
    """End the process after these seconds, whatever still runs in it, unless it has ended by itself."""

    def end() -> None:
        logger.critical("the server has not stopped within %g s; its process ends now", seconds)
        logging.shutdown()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def tell_cancelled(record: logging.LogRecord) -> bool:
    """If the server's end has cancelled a call, replace uvicorn's traceback by one line. Used as a log filter."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        record.msg, record.args, record.exc_info = "a call was ended because the server stops", (), None
        record.levelno, record.levelname = logging.INFO, "INFO"
    return True


class AnnouncingServer(uvicorn.Server):
    """A server that reports its addresses, even if the system chose the port."""

    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[str], None], on_stop: Callable[[], None], delay_s: float = 0.0
    ) -> None:
        """`delay_s`: seconds from `on_stop` until the listening socket closes."""
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop
        self._delay_s = delay_s

    def run(self, sockets: object = None) -> None:
        """Serve until a signal comes. Raises EngineError for a failed start or stop, which uvicorn only logs.

        At its end, uvicorn raises the signals that ended the server once more. Here the repeated signals are ignored.
        Otherwise the process would exit with a failure's code, or KeyboardInterrupt would skip the orderly end.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        super().run(sockets)  # type: ignore[arg-type]
        if not self.started or self.lifespan.should_exit:
            raise EngineError(f"the server did not {'stop' if self.started else 'start'} in order; the log says why")

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        for server in self.servers:
            for listening in server.sockets:
                host, port = listening.getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                self._on_start(f"http://{host}:{port}")

    async def shutdown(self, sockets: object = None) -> None:
        self._on_stop()
        if not self.force_exit:
            await asyncio.sleep(self._delay_s)
        await super().shutdown(sockets)  # type: ignore[arg-type]
