"""What can begin before transformers is imported: that takes one to two seconds of one core, with Python's lock held.

Knows a checkpoint's files; knows nothing of modules. A thread that seldom needs the lock touches the memory that
packed weights will take. A wrong guess costs time of a core that had little to do. Native code of kernels, read from
numba's cache in a thread of its own, takes as much from the import as it saves: tried, not done.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from foreword.config import ModelConfig

MOST_BYTES = 1 << 30
"""Touched ahead: more than can be in the time, and what is given back again does not crowd out others."""
_MOST_HEADER_BYTES = 1 << 26


@contextlib.contextmanager
def head_start(options: ModelConfig) -> Iterator[None]:
    """Make ready what loading a model will need, until the end at the latest."""
    num_weights = _num_weights(Path(options.model)) if options.dtype in ("auto", "bfloat16") else 0
    if not num_weights or options.device != "cpu":
        yield
        return
    from foreword.kernels.products.weights12 import STEP_BYTES, STEP_WEIGHTS, WEIGHTS
    from foreword.model.cpu.product import can_multiply  # imports torch: a model that is not there needs none

    if not can_multiply():
        yield
        return
    with WEIGHTS.touched_ahead(min(MOST_BYTES, num_weights * STEP_BYTES // STEP_WEIGHTS)):
        yield


def _num_weights(folder: Path) -> int:
    """Number of a checkpoint's bfloat16 values in matrices, without experts, which are not packed.

    Unreadable files count as 0; the loader reports them.
    """
    found = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        for path in folder.glob("model*.safetensors"):
            with path.open("rb") as file:
                header = json.loads(file.read(min(_MOST_HEADER_BYTES, int.from_bytes(file.read(8), "little"))))
            for name, tensor in header.items():
                if tensor.get("dtype") == "BF16" and len(tensor["shape"]) == 2 and ".experts." not in name:
                    found += max(0, int(tensor["shape"][0]) * int(tensor["shape"][1]))
    return found
