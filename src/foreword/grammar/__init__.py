"""Grammars: schemas and regular expressions as masks over tokens. Knows nothing of requests or logits."""

from foreword.grammar.grammars import Grammars as Grammars
