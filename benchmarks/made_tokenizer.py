"""A tokenizer for models with random weights."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """Trains a byte-level tokenizer of at most `vocab_size` tokens on Python's library. Writes it beside a model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
