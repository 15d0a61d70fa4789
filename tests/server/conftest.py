"""One server process for all tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword.llm import LLM
from live_server import ServerProcess, embedded_llm


@pytest.fixture(scope="session")
def server_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the server process logs: a JSON object per line."""
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="session")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server process with keys, under a proxy's path, and its log."""
    options = ("--root-path", "/llm", "--api-key", "sk-all", "--operator-key", "sk-operator")
    log = tmp_path_factory.mktemp("locked_server") / "log"
    with log.open("w") as file, ServerProcess(*options, log=file) as process:
        yield process, log


@pytest.fixture(scope="session")
def linking_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    """A server process that links and has no dashboard, and its log."""
    options = ("--allow-links", "--link-gate", "0", "--no-self-check", "--no-dashboard")
    log = tmp_path_factory.mktemp("linking_server") / "log"
    with log.open("w") as file, ServerProcess(*options, log=file) as process:
        yield process, log


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The shipped model, for servers in this process."""
    with embedded_llm() as llm:
        yield llm


@pytest.fixture(scope="session")
def server(server_log: Path) -> Iterator[ServerProcess]:
    options = ("--log-format", "json", "--log-requests", "--log-interval-s", "0.5")
    with server_log.open("w") as log, ServerProcess(*options, log=log) as process:
        yield process
