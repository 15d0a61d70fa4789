"""Switches of thinking: the inputs of chat templates that let a model think, or keep it from it."""

from __future__ import annotations

from typing import Any


def thinking_inputs(template: str, *, enabled: bool | None = None, effort: str | None = None) -> dict[str, Any]:
    """The inputs that a client asks for (None: it does not), those among them that the template mentions."""
    wanted = {"enable_thinking": enabled, "reasoning_effort": effort}
    return {name: value for name, value in wanted.items() if value is not None and name in template}
