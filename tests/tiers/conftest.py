"""The command `foreword cache`, run in this process."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from foreword import cli


class Ran(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def cache(capsys, tmp_path):
    """Run `foreword cache ACTION` on `tmp_path`."""

    def run(action, *options, path=tmp_path):
        return Ran(cli.main(["cache", action, str(path), *options]), *capsys.readouterr())

    return run
