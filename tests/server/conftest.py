"""One server process for all tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process
