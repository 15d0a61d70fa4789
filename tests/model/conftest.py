"""Triton's kernels multiply in a fixed order where no GPU runs them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def triton_in_fixed_order(fixed_products: None) -> None:
    """Every test here multiplies so."""
