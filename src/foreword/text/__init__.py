"""Text: tokenizers, chat templates, streaming detokenization and stop strings. Knows no request and no cache."""

from foreword.text.stream import TextStream
from foreword.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
