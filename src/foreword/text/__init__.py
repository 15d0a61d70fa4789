"""Text: tokenizers, chat templates, streaming detokenization, stop strings. Knows nothing of requests or the cache."""

from foreword.text.stream import TextStream as TextStream
from foreword.text.tokenizer import Tokenizer as Tokenizer
