"""foreword: LLM inference with automatic prefix caching.

Public names are loaded on first use, so that `import foreword` stays light and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreword.errors import ForewordError as ForewordError
    from foreword.llm import LLM as LLM
    from foreword.request import CompletionOutput as CompletionOutput
    from foreword.request import LoRARequest as LoRARequest
    from foreword.request import RequestOutput as RequestOutput
    from foreword.request import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "foreword.llm",
    "SamplingParams": "foreword.request",
    "LoRARequest": "foreword.request",
    "RequestOutput": "foreword.request",
    "CompletionOutput": "foreword.request",
    "ForewordError": "foreword.errors",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'foreword' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
