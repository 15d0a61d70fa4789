"""Models of Hugging Face's hub: folders of safetensors as `USER/REPOSITORY`, GGUF files as `USER/REPOSITORY:Q4_K_M`.

huggingface_hub fetches and keeps files. Files that were fetched once are found without a network, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from foreword.config import ModelConfig, user_path
from foreword.errors import ModelLoadError, first_line

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+?)(?::([\w.-]+))?")
_PART = re.compile(r"(.*)-(\d{5})-of-\d{5}\.gguf")
_SIDE_FILES = ("mmproj", "mtp-")
"""Parts of the names of files that are not models by themselves."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BESIDE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files that a checkpoint may have beside its weights."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
INDEX = "model.safetensors.index.json"
PATIENCE_S = 15.0
"""Seconds after which a silent hub counts as unreachable."""
USUAL = "Q4_K_M"
"""The type that a name without a type means, if the repository has files of this type."""


def is_hub_name(name: str) -> bool:
    """Whether `find_hub` would ask the hub for this name."""
    matched = _NAME.fullmatch(name)
    is_named = matched is not None and (matched[2] is not None or name.lower().endswith("gguf"))
    return is_named and not user_path(name).exists()


def refuse_wrong_path(name: str) -> None:
    """Raise ModelLoadError if a name is the path of something here from which no model can be read.

    Otherwise the loader would find out only after its imports, or after it asked the hub for the name.
    """
    path = user_path(name)
    if path.is_file():
        raise ModelLoadError(f"{name!r} is a file, but no GGUF file; name the folder that holds the model")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelLoadError(f"model folder {name!r} has no config.json; is it a Hugging Face checkpoint?")


def find_folder(name: str, revision: str | None) -> Path | None:
    """Fetch the checkpoint of a name, if foreword reads it by itself, and return its folder.

    None for any other checkpoint, whose weights are not fetched: transformers reads more formats, and its errors say
    what is wrong.
    If the hub does not answer, a version that was fetched before is found. Raises ModelLoadError.
    """
    matched = _NAME.fullmatch(name)
    if matched is None or matched[2] is not None or is_hub_name(name) or user_path(name).exists():
        return None
    from huggingface_hub import HfApi, constants

    cached = next((folder for folder in _snapshots(name, revision) if _is_whole(folder)), None)
    if cached is not None and (constants.HF_HUB_OFFLINE or _COMMIT.fullmatch(revision or "")):
        return cached
    try:
        siblings = HfApi().model_info(name, revision=revision, timeout=PATIENCE_S).siblings or []
    except Exception:  # errors of the hub, of the network, and of names
        return cached
    try:
        return _fetch(name, revision, {sibling.rfilename for sibling in siblings})
    except Exception as error:
        if cached is None:
            raise ModelLoadError(f"model {name!r} cannot be fetched: {first_line(error)}; try again") from error
        logger.warning(
            "model %r cannot be fetched (%s); the version that was fetched before is used", name, first_line(error)
        )
        return cached


def file_of(options: ModelConfig, name: str) -> Path | None:
    """A file of a checkpoint, fetched from the hub if necessary; None if it does not exist, or cannot be reached."""
    folder = user_path(options.model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from transformers.utils.hub import cached_file

    try:
        path = cached_file(
            options.model,
            name,
            revision=options.revision or "main",
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None  # reading the model says what is wrong with its name
    return None if path is None else Path(path)


def _fetch(name: str, revision: str | None, files: set[str]) -> Path | None:
    """Fetch a checkpoint, and return its folder. If only transformers can read it, fetch no weights, return None."""
    from huggingface_hub import snapshot_download

    from foreword.model.checkpoint.config_json import read_config  # imports torch, which an absent model does not need
    from foreword.model.checkpoint.grouped import METHODS
    from foreword.model.checkpoint.tensors import UnreadableError

    if not {"model.safetensors", INDEX} & files:
        return None
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_BESIDE)))
    try:
        values = read_config(folder)
    except UnreadableError:
        return None
    quantized = values.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    if values.get("auto_map") or (quantized is not None and method not in METHODS):
        return None
    weights = ["model.safetensors"] if "model.safetensors" in files else _shards(folder)
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*_BESIDE, *weights]))
    return folder if _is_whole(folder) else None


def _shards(folder: Path) -> list[str]:
    """The files that an index names. Raises OSError or ValueError."""
    return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))


def _is_whole(folder: Path) -> bool:
    """Whether the config, all weights and a tokenizer of a checkpoint are there."""
    if not (folder / "config.json").exists() or not any((folder / name).exists() for name in _TOKENIZERS):
        return False
    if (folder / "model.safetensors").exists():
        return True
    try:
        return all((folder / name).exists() for name in _shards(folder))
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False


def find_hub(name: str, revision: str | None) -> Path | None:
    """Fetch the GGUF file of a name that has a type or ends with "gguf". For a split model, return the first file.

    None for other names, and for paths that are here. Raises ModelLoadError.
    """
    if not is_hub_name(name):
        return None
    repository, _, suffix = name.partition(":")
    kind = suffix or None
    from huggingface_hub import HfApi, snapshot_download

    try:
        siblings = HfApi().model_info(repository, revision=revision, timeout=PATIENCE_S).siblings or []
    except Exception as unreachable:  # errors of the hub, of the network, and of names
        return _kept(name, repository, kind, revision, unreachable)
    files = choose((sibling.rfilename for sibling in siblings), name, kind)
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=files))
    except Exception as error:
        raise ModelLoadError(f"model {name!r} cannot be fetched: {first_line(error)}; try again") from error
    return folder / files[0]


def _kept(name: str, repository: str, kind: str | None, revision: str | None, reason: Exception) -> Path:
    """Find the file, if it was fetched before. `reason`: why the hub does not answer. Raises ModelLoadError."""
    folders = _snapshots(repository, revision)
    if not folders:
        raise ModelLoadError(
            f"model {name!r} cannot be fetched from the hub: {first_line(reason)}; check the name, or give a file's "
            "path"
        ) from reason
    folder = folders[0]
    files = choose((path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")), name, kind)
    return folder / files[0]


def _snapshots(repository: str, revision: str | None) -> list[Path]:
    """The local folders of a version of a repository. They may lack files that were not fetched."""
    from huggingface_hub import scan_cache_dir

    versions = []
    with contextlib.suppress(Exception):  # there is no cache yet
        repositories = [cached for cached in scan_cache_dir().repos if cached.repo_id == repository]
        versions = [version for cached in repositories for version in cached.revisions]
    ref = revision or "main"
    return [version.snapshot_path for version in versions if ref in version.refs or version.commit_hash == ref]


def choose(names: Iterable[str], model: str, kind: str | None) -> list[str]:
    """Choose the files of type `kind`, in order; None: `USUAL`, or else the only model. Raises ModelLoadError."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and not any(part in name.rpartition("/")[2] for part in _SIDE_FILES):
            part = _PART.fullmatch(name)
            models.setdefault(part[1] if part else name.removesuffix(".gguf"), []).append(name)
    type_name = kind or USUAL
    ending = re.compile(rf"(?:^|[-._/]){re.escape(type_name)}(?:$|[-._/])", re.IGNORECASE)
    stems = [stem for stem in models if ending.search(stem)]
    if kind is None and not stems and len(models) == 1:
        stems = list(models)
    if len(stems) == 1:
        return models[stems[0]]
    listed = ", ".join(stem.rpartition("/")[2] for stem in models) or "no GGUF files"
    several = f"several files of type {type_name}" if stems else f"no file of type {type_name}"
    repository = model.partition(":")[0]
    raise ModelLoadError(
        f"model {model!r}: the repository has {several}; it has {listed}: name one, as {repository}:{USUAL}"
    )
