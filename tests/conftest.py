"""Fixtures that several test files share; whatever is expensive is made once per session.

FOREWORD_TEST_DEVICE names the device on which models run ("cuda" in `make test-gpu`); this is where it is read.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest

if TYPE_CHECKING:
    from tiny_models import TinyModels

if not Path("/dev/nvidiactl").exists():
    # Triton decides while it is imported, by whomever, whether kernels are compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    gc.disable()  # until all is imported: it would go through half a million objects again and again
    check_device()
    read_certificates_once()


def check_device() -> None:
    """A device that is not there ends the run at once: tests that were skipped would look as if they had passed."""
    device_name = os.environ.get("FOREWORD_TEST_DEVICE", "cpu")
    if device_name != "cpu":
        import torch

        if not torch.cuda.is_available():
            pytest.exit(
                f"FOREWORD_TEST_DEVICE={device_name!r}, but torch {torch.__version__} sees no CUDA device here: "
                "nothing was tested. Use a machine with a GPU and a CUDA build of torch",
                returncode=2,
            )


def read_certificates_once() -> None:
    """Each HTTP client would read the file of those that everybody trusts, for 20 ms; no test needs one of them."""
    make = ssl.create_default_context
    make_once = functools.cache(make)
    trusted = {certifi.where(), os.environ.get("SSL_CERT_FILE", certifi.where())}

    def create(*arguments: Any, **options: Any) -> ssl.SSLContext:
        return (make_once if options.get("cafile") in trusted else make)(*arguments, **options)

    ssl.create_default_context = create


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("alone") and "pytest.mark.alone" not in item.path.read_text():
            raise pytest.UsageError(f"{item.nodeid}: `make test-slow` looks for `pytest.mark.alone` in the test's file")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def frozen_after_each_file() -> Iterator[None]:
    """What a file leaves behind is of the session: each end of an LLM would go through all of it again."""
    yield
    gc.collect()  # or garbage would stay for good
    gc.freeze()


@pytest.fixture(autouse=True)
def unchanged_log_level() -> Iterator[None]:
    """A command that runs in this process sets the level of our log; the next test finds it as it was."""
    log = logging.getLogger("foreword")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="session")
def device_name() -> str:
    """Where the models of this run live."""
    return os.environ.get("FOREWORD_TEST_DEVICE", "cpu")


@pytest.fixture
def on_cpu(device_name: str) -> None:
    """For tests of what only a CPU does."""
    if device_name != "cpu":
        pytest.skip(f"about computing on a CPU; this run is on {device_name}")


@pytest.fixture
def on_gpu(device_name: str) -> None:
    """For tests of what only a GPU does."""
    if device_name == "cpu":
        pytest.skip("needs a CUDA device: `make test-gpu`")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TinyModels:
    """Checkpoints, loaded models and oracles by recipe name."""
    import torch  # here, so that only tests that need a model pay for it

    from tiny_models import TinyModels

    torch.set_num_threads(1)  # models this small spend more time waking threads than computing
    return TinyModels(tmp_path_factory.mktemp("tiny_models"), device_name)


@pytest.fixture(scope="session")
def chat_model(tiny_models: TinyModels) -> Path:
    """Folder of a tiny Llama with a tokenizer and a chat template."""
    return tiny_models.folder_with_tokenizer("llama")


@pytest.fixture(scope="session")
def fixed_products() -> Iterator[None]:
    """What Triton's kernels are multiplied with where no GPU runs them."""
    if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from interpreted_products import use_fixed_order

    with pytest.MonkeyPatch.context() as monkeypatch:
        use_fixed_order(monkeypatch)
        yield


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Gives torch back its number of threads."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
