"""Replies: what a model wrote, split into reasoning, text and calls."""

from foreword.text.reply.parts import Call, Part, Reasoning, Text

__all__ = ["Call", "Part", "Reasoning", "Text"]
