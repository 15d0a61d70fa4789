"""Real checkpoints and tokenizers, where there are any: `.ci/real_models.py FOLDER` brings them, and the environment
variable FOREWORD_REAL_MODELS names that folder. A test that needs one is skipped without it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDERS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "gemma-3-270m"}


def real_model(name: str) -> Path:
    """The folder of "smollm2" (SmolLM2-135M-Instruct) or "gemma3" (Gemma 3 270M, a base model), both in bfloat16."""
    return _folder(FOLDERS[name])


def real_gguf(name: str) -> Path:
    """The GGUF file of "smollm2" (Q4_1) or "gemma3" (Q4_K_M), from which the folders of `real_model` were made."""
    folder = real_model(name)
    path = folder.parent / "gguf" / f"{folder.name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return path


def real_tokenizer(name: str) -> Path:
    """The folder of a tokenizer with its chat template: qwen3, llama3, gemma3, deepseek_v3 or gptoss."""
    return _folder(f"tokenizers/{name}")


def _folder(name: str) -> Path:
    place = os.environ.get("FOREWORD_REAL_MODELS")
    if not place or not (Path(place) / name / "tokenizer.json").exists():
        pytest.skip(f"{name} is not here: FOREWORD_REAL_MODELS names no folder that has it")
    return Path(place) / name
