"""Memory for packed weights: a thread touches it at the start, while imports keep one core busy.

A thread that seldom needs Python's lock touches the memory that packed weights will take. A wrong guess wastes only
time of an idle core. On a virtual machine, which asks its host for each page, the first token of a new process takes
0.87 of the time: 3.08 s after `import torch` instead of 3.95 (measured like benchmarks/load.py, seven interleaved pairs
on 2 cores of a Zen processor; docs/decisions/0009-packed-weights.md).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from foreword.config import ModelConfig

MOST_BYTES = 1 << 30
"""Most bytes to touch: a thread has no time for more, and surplus memory must not crowd out other programs."""
_MOST_HEADER_BYTES = 1 << 26


@contextlib.contextmanager
def head_start(options: ModelConfig) -> Iterator[None]:
    """Touch memory for a model's packed weights until the first of them is packed, or the context ends."""
    num_weights = _num_weights(Path(options.model)) if options.dtype in ("auto", "bfloat16") else 0
    if not num_weights or options.device != "cpu":
        yield
        return
    from foreword.kernels.products.weights12 import STEP_BYTES, STEP_WEIGHTS, WEIGHTS
    from foreword.model.cpu.product import can_multiply  # imports torch, which an absent model does not need

    if not can_multiply():
        yield
        return
    with WEIGHTS.touched_ahead(min(MOST_BYTES, num_weights * STEP_BYTES // STEP_WEIGHTS)):
        yield


def _num_weights(folder: Path) -> int:
    """The number of bfloat16 values in a checkpoint's matrices. Experts are not counted, because they are not packed.

    Unreadable files count as 0; the loader reports them.
    """
    num_weights = 0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        for path in folder.glob("model*.safetensors"):
            with path.open("rb") as file:
                header = json.loads(file.read(min(_MOST_HEADER_BYTES, int.from_bytes(file.read(8), "little"))))
            for name, tensor in header.items():
                if tensor.get("dtype") == "BF16" and len(tensor["shape"]) == 2 and ".experts." not in name:
                    num_weights += max(0, int(tensor["shape"][0]) * int(tensor["shape"][1]))
    return num_weights
