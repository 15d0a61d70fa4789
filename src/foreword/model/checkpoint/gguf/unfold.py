"""A GGUF file as a usual folder: config.json and tokenizer files made from its metadata, beside a link to the file.

The folder is kept in the user's cache folder, and its name has a digest of the file's path and stamp. So a vocabulary
is turned into a tokenizer only once. A later start removes the folder if the file is gone or has changed. Code that
reads a model's folder can read this folder, too; only weights are read from the GGUF file.

GGUF files that are already on this machine have names: files of Ollama and LM Studio, and files in Python packages. The
search for them writes, moves and fetches nothing. The layouts are those in Ollama's and LM Studio's documentation:

    Ollama       $OLLAMA_MODELS or ~/.ollama/models: manifests/HOST/NAMESPACE/MODEL/TAG names blobs/sha256-DIGEST
    LM Studio    ~/.lmstudio/models or ~/.cache/lm-studio/models: USER/REPOSITORY/FILE.gguf
    packages     any .gguf file that an installed distribution lists
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from foreword.config import ModelConfig, ollama_folder, user_cache_folder, user_path
from foreword.errors import ConfigError, ForewordError, ModelLoadError, UnsupportedModelError
from foreword.model.checkpoint.gguf.architectures import config_fields, weights_of
from foreword.model.checkpoint.gguf.file import MAGIC, GgufFile, UnsoundGgufError, open_gguf, stamp_of
from foreword.model.checkpoint.gguf.tokenizer import end_tokens, tokenizer_files
from foreword.model.checkpoint.hub import find_folder, find_hub, is_hub_name

logger = logging.getLogger(__name__)

_PART = re.compile(r"-\d{5}-of-\d{5}$")
FORM = 2
"""The version of the folders' content. Raise it when a change of code gives a file a folder with different content."""
UNUSED_S = 86_400.0
"""Seconds without use after which a folder may be removed."""


def find_gguf(model: str, revision: str | None = None) -> Path | None:
    """Return the GGUF file that a name means: the file itself, the only GGUF file in a folder, a file that another
    program keeps, or a file of the hub (`hub.py`). For a split model it is the first file.

    None if the name means no such file, or a folder with other weights. Raises ModelLoadError or ConfigError.
    """
    local = find_local(model)
    if local is not None:
        return local
    path = user_path(model)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that no file can have, or a folder that may not be entered
        raise ModelLoadError(
            f"model {model!r} cannot be looked up: {error.strerror}; give a folder, a file or the name of a model"
        ) from error
    if path.suffix.lower() == ".gguf" or _begins_as_one(path):
        if not path.is_file():
            raise ModelLoadError(f"model file {model!r} does not exist; give the path of a .gguf file")
        return path
    if not is_folder:
        return find_hub(model, revision)
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin*")):
        return None
    files = sorted(file for file in path.glob("*.gguf") if "-of-" not in file.stem or "-00001-of-" in file.stem)
    files = [file for file in files if not file.name.startswith("mmproj")]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"folder {model!r} has several GGUF files ({names}); give the path of one of them")
    return files[0] if files else None


def _begins_as_one(path: Path) -> bool:
    """Whether a file without the usual ending is a GGUF file, as Ollama's blobs are."""
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def unfold(path: Path, *, with_tokenizer: bool = True) -> Path:
    """Return the folder of a GGUF file, made now or earlier; `with_tokenizer`: whether it has the file's tokenizer.

    Raises UnsoundGgufError, ModelLoadError or UnsupportedModelError.
    """
    path = Path(os.path.abspath(path))  # links are not followed: parts of a split model lie beside each other by name
    files = open_gguf(path)
    digest = _digest([[str(file.path), *file.stamp] for file in files], with_tokenizer)
    folder = user_cache_folder() / "foreword" / "gguf" / f"{model_name(path)[:100]}-{digest}"
    with contextlib.suppress(OSError):
        os.utime(folder)  # protects it from `_tidy`
    _tidy(folder.parent)
    if _is_ours(folder):
        return folder
    content = _content(files, with_tokenizer=with_tokenizer)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = _written(content, files, folder.parent)
        try:
            os.replace(new, folder)
            return folder
        except OSError:  # another process was first
            shutil.rmtree(new, ignore_errors=True)
            if _is_ours(folder):
                return folder
            raise
    except OSError as error:
        logger.info("the folder made from %s cannot be kept: %s", path.name, error)
    try:
        new = _written(content, files, None)
    except OSError as error:
        raise ModelLoadError(
            f"the tokenizer of {path.name} cannot be written ({error}); make room for temporary files"
        ) from error
    atexit.register(shutil.rmtree, new, ignore_errors=True)
    return new


def _digest(stamps: Sequence[Sequence[object]], with_tokenizer: bool) -> str:
    return hashlib.sha256(json.dumps([FORM, with_tokenizer, stamps]).encode()).hexdigest()[:16]


def _tidy(parent: Path) -> None:
    """Remove folders that were unused for a day, if their GGUF files are gone or changed, or a killed process left
    them.

    A process reads its folder only while it loads the model, so no such folder is in use. Several processes may tidy at
    once.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError):  # there is no such folder, or it is not for this user
        folders += parent.iterdir()
    for folder in folders:
        with contextlib.suppress(OSError):  # another process removes it, too
            if _is_ours(folder) and folder.stat().st_mtime < time.time() - UNUSED_S and not _is_current(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_current(folder: Path) -> bool:
    """Whether the files of a folder are unchanged since the folder was made."""
    try:
        paths = [link.readlink() for link in gguf_files(folder)]
        stamps = [[str(path), *stamp_of(path.stat())] for path in paths]
    except OSError:
        return False
    return any(folder.name.endswith(f"-{_digest(stamps, with_tokenizer)}") for with_tokenizer in (True, False))


def _written(content: Mapping[str, Any], files: Sequence[GgufFile], parent: Path | None) -> Path:
    """Write a new folder in `parent`; None: in the folder of temporary files. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix="new-", dir=parent))
    try:
        for name, fields in content.items():
            (folder / name).write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
        for number, file in enumerate(files):
            (folder / f"model-{number + 1:05}-of-{len(files):05}.gguf").symlink_to(file.path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def unfolded(options: ModelConfig) -> ModelConfig:
    """Return options that load a local folder, if a GGUF file or a checkpoint of the hub is named.

    Other options are returned as they are. Raises ConfigError, UnsoundGgufError, ModelLoadError or
    UnsupportedModelError.
    """
    fetched = find_folder(options.model, options.revision)
    if fetched is not None:
        tokenizer = options.tokenizer or (options.model if options.tokenizer_revision else None)
        return replace(options, model=str(fetched), revision=None, tokenizer=tokenizer)
    is_fetched = is_hub_name(options.model)
    path = None if is_fetched else find_gguf(options.model)
    if path is None and not is_fetched:
        return options
    if options.device != "cpu":
        raise UnsupportedModelError(
            f"device={options.device!r} runs no GGUF files yet; use 'cpu', or the model's safetensors checkpoint"
        )
    if path is None:
        path = find_gguf(options.model, options.revision)
        assert path is not None
    elif options.revision is not None:
        raise ConfigError(
            f"revision={options.revision!r} names a version on the hub, but {str(path)!r} is here; drop it"
        )
    folder = unfold(path, with_tokenizer=options.tokenizer is None)
    return replace(options, model=str(folder), revision=None)


def model_name(path: Path) -> str:
    """The usual name of the model in a file."""
    return _PART.sub("", path.stem)


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder made here, in order; an empty list for any other folder."""
    return sorted(folder.glob("model-*-of-*.gguf"))


def _content(files: Sequence[GgufFile], *, with_tokenizer: bool) -> dict[str, Mapping[str, Any]]:
    """Return names and contents of the folder's files. Raises UnsoundGgufError or UnsupportedModelError."""
    metadata = files[0].metadata
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    content: dict[str, Mapping[str, Any]] = {}
    with _contradictions(files[0].path):
        weights_of(metadata, tensors.values())  # refuses an unknown tensor now, not after minutes of loading
        fields = config_fields(metadata, tensors)
        if with_tokenizer:
            content |= tokenizer_files(metadata)
        fields["eos_token_id"] = end_tokens(metadata, fields["vocab_size"], own_tokenizer=with_tokenizer) or None
    return {**content, "config.json": fields}


@contextlib.contextmanager
def _contradictions(path: Path) -> Iterator[None]:
    """Turn errors of metadata that do not fit together into UnsoundGgufError."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, OSError) as error:
        raise UnsoundGgufError(
            f"the metadata of {path.name} contradicts itself ({error}); convert the model again"
        ) from error


def _is_ours(folder: Path) -> bool:
    """Whether a folder exists, belongs to this user, and other users cannot write to it."""
    try:
        stat = folder.lstat()
    except OSError:
        return False
    return folder.is_dir() and stat.st_uid == os.getuid() and not stat.st_mode & 0o022


_OLLAMA_HOST, _OLLAMA_NAMESPACE = "registry.ollama.ai", "library"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_MANIFEST_BYTES = 1 << 20
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that commands accept by name."""

    name: str
    """"ollama:MODEL:TAG", "lmstudio:USER/REPOSITORY/FILE" or "package:DISTRIBUTION"."""
    path: Path
    why_not: str | None = None
    """Why the model cannot be served although its file is there; None if it can be served."""


def local_models() -> list[LocalModel]:
    """All models of Ollama, LM Studio and Python packages on this machine, sorted by name."""
    models = list(_ollama(ollama_folder()))
    for root in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        models += _lm_studio(user_path(root))
    return sorted([*models, *_packages()], key=lambda model: model.name)


def find_local(name: str) -> Path | None:
    """The file of a name that begins with "ollama:", "lmstudio:" or "package:"; None for other names.

    Raises ModelLoadError if there is no such model here.
    """
    store, _, local_name = name.partition(":")
    if store not in ("ollama", "lmstudio", "package") or Path(name).exists():
        return None
    full_name = f"{name}:latest" if store == "ollama" and ":" not in local_name.rpartition("/")[2] else name
    models = [model for model in local_models() if model.name.startswith(f"{store}:")]
    for model in models:
        if model.name == full_name:
            if model.why_not is not None:
                raise ModelLoadError(f"model {name!r} cannot be served: {model.why_not}")
            return model.path
    names = ", ".join(model.name for model in models) or f"no {store} models"
    raise ModelLoadError(f"model {name!r} is not on this machine, which has {names}; `foreword models` lists them")


def _ollama(root: Path) -> Iterator[LocalModel]:
    manifests = root / "manifests"
    for path in sorted(manifests.glob("*/*/*/*")):
        host, namespace, model, tag = path.relative_to(manifests).parts
        if namespace == _OLLAMA_NAMESPACE and host == _OLLAMA_HOST:
            place = ""
        else:
            place = f"{namespace}/" if host == _OLLAMA_HOST else f"{host}/{namespace}/"
        blobs = _blobs(path)
        if "model" in blobs:
            reason = "it has an adapter beside its weights" if "adapter" in blobs else None
            yield LocalModel(f"ollama:{place}{model}:{tag}", root / "blobs" / f"sha256-{blobs['model']}", reason)


def _blobs(manifest: Path) -> dict[str, str]:
    """Kind of a layer ("model", "adapter", "template") -> digest; empty if the manifest is not sound."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if manifest.stat().st_size <= _MOST_MANIFEST_BYTES:
            layers = json.loads(manifest.read_bytes())["layers"]
            blobs = {str(layer["mediaType"]).rpartition(".")[2]: _DIGEST.fullmatch(layer["digest"]) for layer in layers}
            return {kind: digest[1] for kind, digest in blobs.items() if digest is not None}
    return {}


def _lm_studio(root: Path) -> Iterator[LocalModel]:
    for path in root.glob("*/*/*.gguf"):
        if not path.name.startswith("mmproj") and not _LATER_PART.fullmatch(path.name):
            yield LocalModel(f"lmstudio:{path.relative_to(root).as_posix()}", path)


def _packages() -> Iterator[LocalModel]:
    for package in distributions():
        files = [file for file in package.files or () if file.name.endswith(".gguf")]
        for file in files:
            suffix = f"/{file.name}" if len(files) > 1 else ""
            yield LocalModel(f"package:{package.name}{suffix}", Path(str(package.locate_file(file))))


def describe(model: LocalModel) -> dict[str, Any]:
    """Name, path, bytes, type of most weights, context in tokens, and why the model does not run (None if it runs)."""
    facts: dict[str, Any] = {"name": model.name, "path": str(model.path), "bytes": None, "type": None, "context": None}
    try:
        files = open_gguf(model.path)
        metadata = files[0].metadata
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        facts["bytes"] = sum(file.path.stat().st_size for file in files)
        sizes: Counter[str] = Counter()
        for tensor in tensors.values():
            sizes[tensor.blocks.name] += tensor.num_rows * tensor.row_bytes
        facts["type"] = sizes.most_common(1)[0][0] if sizes else None
        with _contradictions(model.path):
            weights_of(metadata, tensors.values())
            facts["context"] = config_fields(metadata, tensors)["max_position_embeddings"]
            tokenizer_files(metadata, check=False)
    except ForewordError as error:
        return {**facts, "why_not": str(error)}
    return {**facts, "why_not": model.why_not}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword models`."""
    parser.add_argument("--json", action="store_true", help="print one JSON line for each model")


def run(args: argparse.Namespace) -> int:
    """Print the models that are found on this machine, with the names that `serve` and `generate` take."""
    models = [describe(model) for model in local_models()]
    if args.json:
        for model in models:
            print(json.dumps(model))
        return 0
    if not models:
        print("no GGUF files of Ollama, LM Studio or Python packages are here; `foreword serve` takes a path, too")
    width = max((len(model["name"]) for model in models), default=0)
    for model in models:
        context = f"{model['context']:,} tokens" if model["context"] else "?"
        why = "runs" if model["why_not"] is None else f"does not run: {model['why_not']}"
        print(f"{model['name']:{width}}  {_size(model['bytes']):>8}  {model['type'] or '?':7}  {context:>15}  {why}")
    return 0


def _size(num_bytes: int | None) -> str:
    for unit, name in _UNITS:
        if num_bytes is not None and num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return "?" if num_bytes is None else f"{num_bytes} B"
