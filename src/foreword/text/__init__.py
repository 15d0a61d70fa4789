"""Text: tokenizers, chat templates, streaming detokenization, stop strings. Knows nothing of requests or the cache."""

from foreword.text.stream import TextStream
from foreword.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
