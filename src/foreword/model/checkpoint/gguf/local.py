"""GGUF files that are on this machine already: those of Ollama and LM Studio, and those that Python packages bring.

Nothing is written, moved or fetched. Layouts are those of Ollama's and LM Studio's documentation:

    Ollama       $OLLAMA_MODELS or ~/.ollama/models: manifests/HOST/NAMESPACE/MODEL/TAG names blobs/sha256-DIGEST
    LM Studio    ~/.lmstudio/models or ~/.cache/lm-studio/models: USER/REPOSITORY/FILE.gguf
    packages     any .gguf file that an installed distribution lists
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from foreword.config import ollama_folder
from foreword.errors import ForewordError, ModelLoadError
from foreword.model.checkpoint.gguf.architectures import config_fields, weights_of
from foreword.model.checkpoint.gguf.file import open_gguf
from foreword.model.checkpoint.gguf.tokenizer import tokenizer_files

_OLLAMA_HOST, _OLLAMA_NAMESPACE = "registry.ollama.ai", "library"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MOST_MANIFEST_BYTES = 1 << 20
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model that a command can be given by name."""

    name: str
    """"ollama:MODEL:TAG", "lmstudio:USER/REPOSITORY/FILE" or "package:DISTRIBUTION"."""
    path: Path
    why_not: str | None = None
    """Why it cannot be served although its file is there."""


def local_models() -> list[LocalModel]:
    """All models that are found, by name."""
    found = list(_ollama(ollama_folder()))
    for root in ("~/.lmstudio/models", "~/.cache/lm-studio/models"):
        found += _lm_studio(Path(root).expanduser())
    return sorted([*found, *_packages()], key=lambda one: one.name)


def find_local(name: str) -> Path | None:
    """The file of a name that begins with "ollama:", "lmstudio:" or "package:"; None for other names.

    Raises ModelLoadError if there is no such model here.
    """
    store, _, rest = name.partition(":")
    if store not in ("ollama", "lmstudio", "package") or Path(name).exists():
        return None
    wanted = f"{name}:latest" if store == "ollama" and ":" not in rest.rpartition("/")[2] else name
    known = [one for one in local_models() if one.name.startswith(f"{store}:")]
    for one in known:
        if one.name == wanted:
            if one.why_not is not None:
                raise ModelLoadError(f"model {name!r} cannot be served: {one.why_not}")
            return one.path
    names = ", ".join(one.name for one in known) or f"no {store} models"
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
    """Kind of a layer ("model", "adapter", "template") -> digest, of a manifest that is sound."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if manifest.stat().st_size <= _MOST_MANIFEST_BYTES:
            layers = json.loads(manifest.read_bytes())["layers"]
            found = {str(layer["mediaType"]).rpartition(".")[2]: _DIGEST.fullmatch(layer["digest"]) for layer in layers}
            return {kind: digest[1] for kind, digest in found.items() if digest is not None}
    return {}


def _lm_studio(root: Path) -> Iterator[LocalModel]:
    for path in root.glob("*/*/*.gguf"):
        if not path.name.startswith("mmproj") and not _LATER_PART.fullmatch(path.name):
            yield LocalModel(f"lmstudio:{path.relative_to(root).as_posix()}", path)


def _packages() -> Iterator[LocalModel]:
    for package in distributions():
        files = [file for file in package.files or () if file.name.endswith(".gguf")]
        for file in files:
            own = f"/{file.name}" if len(files) > 1 else ""
            yield LocalModel(f"package:{package.name}{own}", Path(str(package.locate_file(file))))


def describe(model: LocalModel) -> dict[str, Any]:
    """Name, path, bytes, type of most weights, context in tokens, and why it does not run (None if it does)."""
    found: dict[str, Any] = {"name": model.name, "path": str(model.path), "bytes": None, "type": None, "context": None}
    try:
        files = open_gguf(model.path)
        metadata = files[0].metadata
        tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
        found["bytes"] = sum(file.path.stat().st_size for file in files)
        sizes: Counter[str] = Counter()
        for tensor in tensors.values():
            sizes[tensor.blocks.name] += tensor.num_rows * tensor.row_bytes
        found["type"] = sizes.most_common(1)[0][0] if sizes else None
        weights_of(metadata, tensors.values())
        found["context"] = config_fields(metadata, tensors)["max_position_embeddings"]
        tokenizer_files(metadata, check=False)
    except ForewordError as error:
        return {**found, "why_not": str(error)}
    return {**found, "why_not": model.why_not}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword models`."""
    parser.add_argument("--json", action="store_true", help="print one JSON line for each model")


def run(args: argparse.Namespace) -> int:
    """Print what is found: the names to give to `serve` and `generate`."""
    models = [describe(one) for one in local_models()]
    if args.json:
        for one in models:
            print(json.dumps(one))
        return 0
    if not models:
        print("no GGUF files of Ollama, LM Studio or Python packages are here; `foreword serve` takes a path, too")
    width = max((len(one["name"]) for one in models), default=0)
    for one in models:
        context = f"{one['context']:,} tokens" if one["context"] else "?"
        why = "runs" if one["why_not"] is None else f"does not run: {one['why_not']}"
        print(f"{one['name']:{width}}  {_size(one['bytes']):>8}  {one['type'] or '?':7}  {context:>15}  {why}")
    return 0


def _size(num_bytes: int | None) -> str:
    for unit, name in _UNITS:
        if num_bytes is not None and num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return "?" if num_bytes is None else f"{num_bytes} B"
