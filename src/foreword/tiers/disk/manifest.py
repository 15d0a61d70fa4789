"""Manifests: small files that name the model and the arithmetic of a namespace's blocks.

Manifests are for people: no block is served or refused because of what a manifest says. A manifest that is torn or
changed, or that belongs to another namespace, is ignored.

    CACHE_DIR/v1/<namespace, 32 hex>.json     {"checksum": xxh3-128 of the rest, "namespace": ..., facts}
"""

from __future__ import annotations

import contextlib
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from foreword.tiers.disk.files import RealFiles, opened, read_fully, replace_file
from foreword.tiers.identity import CacheIdentity, Facts, canonical_json

_NAME = re.compile(r"[0-9a-f]{32}\.json")
MAX_BYTES = 1 << 20
UNFINISHED_NAME = "manifest.new"


def manifest_facts(identity: CacheIdentity, model_name: str, block_size: int) -> dict[str, Any]:
    """The facts for a manifest. `model_name`: as the user gave it; `block_size`: tokens of a block."""
    return {
        **identity.description(),
        "model_name": model_name,
        "block_size": block_size,
        "foreword_version": version("foreword"),
    }


def identity_in(facts: Facts) -> CacheIdentity | None:
    """The identity that a manifest's facts describe; None if they do not give its namespace."""
    try:
        ids = [str(facts[name]) for name in ("model_id", "arithmetic_id", "layout", "namespace")]
        identity = CacheIdentity(ids[0], ids[1], ids[2], exact=bool(facts["exact"]))
    except KeyError:
        return None
    return identity if identity.namespace.hex() == ids[3] else None


class Manifests(NamedTuple):
    """The manifests of a cache directory."""

    facts: dict[bytes, Facts]
    """The facts of the sound manifests, by namespace."""
    unsound: dict[Path, str]
    """Path of each manifest that is not sound -> the reason."""


def write_manifest(files: RealFiles, root: Path, home: Path, namespace: bytes, facts: Facts) -> None:
    """Write the manifest of a namespace into `root`, unless the same is there. It replaces an old manifest in one step.

    The file is first written into `home`, the caller's folder, whose files are removed after the caller's process has
    died. Raises OSError.
    """
    path = manifest_path(root, namespace)
    content = {**json.loads(canonical_json(facts)), "namespace": namespace.hex()}
    with contextlib.suppress(OSError, ValueError):
        if _read(files, path) == content:
            return
    text = json.dumps({"checksum": _checksum(content), **content}, indent=1).encode() + b"\n"
    replace_file(files, path, home / UNFINISHED_NAME, [text])


def manifest_path(root: Path, namespace: bytes) -> Path:
    """The path of a namespace's manifest."""
    return root / f"{namespace.hex()}.json"


def read_manifests(files: RealFiles, root: Path) -> Manifests:
    """All manifests in `root`, the folder CACHE_DIR/v1. Raises OSError if the folder cannot be listed."""
    manifests = Manifests({}, {})
    for name in sorted(files.list_folder(root)):
        if not _NAME.fullmatch(name):
            continue
        try:
            manifests.facts[bytes.fromhex(name.removesuffix(".json"))] = _read(files, root / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            manifests.unsound[root / name] = f"the manifest cannot be read: {error.strerror}"
        except ValueError as error:
            manifests.unsound[root / name] = str(error)
    return manifests


def _read(files: RealFiles, path: Path) -> dict[str, Any]:
    """The facts in a manifest. Raises OSError, or ValueError with the reason if it is not sound."""
    with opened(files, path) as fd:
        content = bytearray(min(MAX_BYTES, files.fstat(fd).st_size))
        count = read_fully(files, fd, memoryview(content), 0, uncached=False)
    try:
        facts = json.loads(content[:count])
        checksum = facts.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError("the manifest is torn or no manifest") from error
    if checksum != _checksum(facts):
        raise ValueError("the manifest's checksum differs")
    if facts.get("namespace") != path.stem:
        raise ValueError("the manifest is that of another namespace")
    return dict(facts)


def _checksum(facts: Facts) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(facts))
