"""Finds a model's tokenizer: in a folder, on the hub, or nowhere.

Knows file names and the hub's client, which is imported if a model is not a folder.
"""

from __future__ import annotations

from pathlib import Path

from foreword.errors import ModelLoadError, UnsupportedModelError

_TOKENIZER_FILES = (
    "tokenizer.json tokenizer.model tokenizer_config.json vocab.json vocab.txt spiece.model sentencepiece.bpe.model "
    "tekken.json tiktoken.model"
).split()
"""A model without any of these files has no tokenizer."""


def find_tokenizer_files(model: str, revision: str | None) -> str | None:
    """The folder or hub id to load from; None if it exists but has no tokenizer."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return str(folder) if _holds_tokenizer(folder) else None
    if folder.suffix == ".gguf":
        raise UnsupportedModelError(
            f"{str(model)!r} is a GGUF file, whose tokenizer is used only with its own model; name a folder that has a "
            "tokenizer.json"
        )
    if folder.exists():
        raise ModelLoadError(f"{model!r} is a file; name the folder that holds the model")
    if folder.is_absolute() or model.startswith(".") or len(folder.parts) > 2:
        raise ModelLoadError(f"there is no folder {model!r}; give a model's folder or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(model, revision=revision, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:
        raise ModelLoadError(
            f"{model!r} is neither a folder here nor a model that the hub provides: {one_line(error)}"
        ) from error
    return model if _holds_tokenizer(snapshot) else None


def _holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def one_line(error: Exception) -> str:
    """An error's message in a form that fits inside another message."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
