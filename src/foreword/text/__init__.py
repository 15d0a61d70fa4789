"""Text: tokenizers, chat templates, streaming detokenization, stop strings."""

from foreword.text.stream import TextStream as TextStream
from foreword.text.tokenizer import Tokenizer as Tokenizer
