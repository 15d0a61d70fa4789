"""Grammars: schemas and regular expressions as masks over tokens. Knows no request and no logits."""

from foreword.grammar.grammars import Grammars

__all__ = ["Grammars"]
