"""Registry: all dialects, and the one that a call is in.

A new dialect adds its folder, and its name to `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from foreword.server.dialect import Dialect
from foreword.server.dialects.anthropic.dialect import Anthropic
from foreword.server.dialects.gemini.dialect import Gemini
from foreword.server.dialects.ollama.dialect import Ollama
from foreword.server.dialects.openai.dialect import OpenAI

DIALECTS: tuple[Dialect, ...] = (Anthropic(), Gemini(), Ollama(), OpenAI())
"""In the order in which they are asked whether a call is theirs; the last one takes every call."""


def choose(path: str, headers: Mapping[str, str]) -> tuple[Dialect, str]:
    """The dialect of a call, and its path without the dialect's name in front."""
    for dialect in DIALECTS:
        if path.startswith(f"/{dialect.name}/"):
            return dialect, path.removeprefix(f"/{dialect.name}")
    return next(dialect for dialect in DIALECTS if dialect.speaks(path, headers)), path
