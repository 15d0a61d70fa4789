"""Where the Triton kernels run: compiled on a GPU, interpreted without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session", autouse=True)
def triton_in_fixed_order(fixed_products: None) -> None:
    """Every test here multiplies so."""
