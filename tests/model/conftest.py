"""What Triton's kernels are multiplied with where no GPU runs them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def fixed_products() -> Iterator[None]:
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from interpreted_products import use_fixed_order

    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fixed_order(monkeypatch)
        yield
