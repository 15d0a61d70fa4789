"""Text: tokenizers, chat templates, streaming detokenization and stop strings. Knows no request and no cache."""

from foreword.text.tokenizer import TextStream, Tokenizer

__all__ = ["TextStream", "Tokenizer"]
