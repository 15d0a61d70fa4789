"""Adapters (LoRA) as callers name them, and as requests hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that a request asks for, with vLLM's fields. Cached KV belongs to its content, not to its name."""

    lora_name: str
    """For people: what a server calls it."""
    lora_int_id: int = 0
    """Of no use here; vLLM keeps adapters apart by it."""
    lora_path: str = ""
    """Folder that PEFT's `save_pretrained` wrote."""
    load_inplace: bool = False
    """Of no use here: a folder whose files have changed is read again in any case."""


class Adapter(Protocol):
    """An adapter that is loaded. A request keeps it alive until it ends."""

    @property
    def digest(self) -> str:
        """A digest of its content, which is part of block keys."""

    def begin_in(self, token_ids: npt.NDArray[np.int32]) -> int | None:
        """The index of the first token of a prompt that it computes; None: none, nor of the answer."""
