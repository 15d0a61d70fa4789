"""A digest of a checkpoint's weights, computed by threads while the model loads, and remembered for later starts.

SHA-256 reads 1.6 GB a second on a core with SHA instructions (3.1 on two; measured on an EPYC of 2 cores). Files whose
digests are remembered cost only a few system calls. A folder is read as soon as the load begins, while imports keep one
core busy.

    a file      SHA-256 of the digests of its pieces of 32 MiB, which threads compute
    weights     SHA-256 of the digests of all files, in the order of their names
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from foreword.config import ModelConfig, UserFile, user_cache_folder
from foreword.errors import ModelLoadError

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 25
READ_BYTES = 1 << 20
MOST_THREADS = 8
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files in which transformers looks for weights, in this order; an index names the files."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Files of an adapter beside the weights. transformers adds the adapter to the weights."""


class Stamp(NamedTuple):
    """The facts that change when somebody writes to a file or replaces it."""

    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    """The last change of the content, or of anything about the file; unlike `mtime_ns`, no program can set it back."""
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


class RememberedDigests:
    """Digests of files by path and stamp, in one file of the user; if it cannot be written, nothing is kept."""

    def __init__(self, path: Path | None = None, *, least_bytes: int = 1 << 24, settled_s: float = 2.0) -> None:
        """`least_bytes`: digests of smaller files are not kept, because such files are read quickly; `settled_s`: a
        file that changed less than this time ago may change again within one tick of its file system's clock, so its
        digest is not kept.
        """
        self._file = UserFile(path or user_cache_folder() / "foreword" / "weights.json")
        self._least_bytes, self._settled_ns = least_bytes, int(settled_s * 1e9)

    def find(self, path: Path, stamp: Stamp) -> bytes | None:
        """The digest of a file that still has the stamp; None if the digest is not known."""
        entry = self._file.read().get(str(path))
        if isinstance(entry, list) and entry[:-1] == list(stamp):
            with contextlib.suppress(TypeError, ValueError):
                digest = bytes.fromhex(entry[-1])
                return digest if len(digest) == hashlib.sha256().digest_size else None
        return None

    def keep(self, digests: Mapping[Path, tuple[Stamp, bytes]]) -> None:
        """Remember digests of files, in addition to earlier digests."""
        settled = time.time_ns() - self._settled_ns
        new = {
            str(path): [*stamp, digest.hex()]
            for path, (stamp, digest) in digests.items()
            if stamp.num_bytes >= self._least_bytes and max(stamp.mtime_ns, stamp.ctime_ns) < settled
        }
        if new:
            self._file.keep(new)


class WeightsDigest:
    """The digest of a checkpoint's weights; threads compute it while the context is open and the model loads."""

    def __init__(self, options: ModelConfig, remembered: RememberedDigests | None = None) -> None:
        self._options = options
        self._remembered = remembered or RememberedDigests()
        self._stamps: dict[Path, Stamp] = {}
        self._old_digests: dict[Path, bytes] = {}
        self._pieces: dict[Path, list[Future[bytes]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> WeightsDigest:
        folder = Path(self._options.model)
        if folder.is_dir():  # files of the hub's client do not change, and may not be there yet
            with contextlib.suppress(OSError, TypeError, AttributeError):  # the loader says what is wrong with a folder
                self._start(weight_files(folder))
        return self

    def __exit__(self, *_: object) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None

    def hex(self) -> str | None:
        """The digest, after the model has loaded; None if the files are not known.

        Raises ModelLoadError if a file has changed since the load began.
        """
        try:
            if not self._stamps:
                self._start(weight_files(_hub_folder(self._options)))
            digests = {
                path: self._old_digests[path]
                if path in self._old_digests
                else _sha256(piece.result() for piece in self._pieces[path])
                for path in self._stamps
            }
            changed = [path for path, stamp in self._stamps.items() if Stamp.of(path) != stamp]
        except OSError as error:
            raise ModelLoadError(
                f"the weights of model {self._options.model!r} cannot be read: {error}; start again"
            ) from error
        if changed:
            raise ModelLoadError(
                f"{changed[0].name} of model {self._options.model!r} changed while it was read; start again"
            )
        self._remembered.keep({path: (self._stamps[path], digests[path]) for path in self._pieces})
        return _sha256(digests.values()).hex() if digests else None

    def _start(self, paths: list[Path]) -> None:
        """Look up remembered digests, and begin to compute the missing digests."""
        self._stamps = {path: Stamp.of(path) for path in paths}
        for path, stamp in self._stamps.items():
            digest = self._remembered.find(path, stamp)
            if digest is not None:
                self._old_digests[path] = digest
                continue
            if self._threads is None:
                self._threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "foreword-digest")
            starts = range(0, stamp.num_bytes, PIECE_BYTES)
            ends = [min(start + PIECE_BYTES, stamp.num_bytes) for start in starts]
            self._pieces[path] = [self._threads.submit(_piece, path, *ends) for ends in zip(starts, ends, strict=True)]


def weight_files(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """The files from which transformers reads a folder's weights; empty if they are not known.

    With an adapter in the folder, the files of the model to which it belongs count too. `above`: the folders of
    adapters that belong to this folder. Raises OSError.
    """
    files: list[Path] = []
    explicit = _json(folder / "config.json").get("transformers_weights")
    for name in [explicit] if isinstance(explicit, str) else WEIGHT_FILES:
        path = folder / name
        if path.is_file() and name.endswith(".json"):
            files = [folder / part for part in sorted(set(_json(path).get("weight_map", {}).values()))]
        elif path.is_file():
            files = [path]
        if files:
            break
    files = files or sorted(folder.glob("model-*-of-*.gguf"))
    adapter = _json(folder / "adapter_config.json")
    if adapter:
        base = Path(str(adapter.get("base_model_name_or_path")))
        above = (*above, folder.resolve())
        below = weight_files(base, above) if base.is_dir() and base.resolve() not in above else []
        adapter_files = [path for path in (folder / name for name in ADAPTER_FILES) if path.is_file()]
        files = [*files, *below, *adapter_files] if files or below else []
    return [Path(os.path.realpath(path)) for path in files]


def _hub_folder(options: ModelConfig) -> Path:
    """The folder of a loaded model: the folder that the options name, or a folder of the hub's client."""
    if os.path.isdir(options.model):
        return Path(options.model)
    from transformers.utils.hub import cached_file

    config = cached_file(options.model, "config.json", revision=options.revision or "main", local_files_only=True)
    return Path(str(config)).parent


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such object."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        fields = json.loads(path.read_bytes())
        return fields if isinstance(fields, dict) else {}
    return {}


def _piece(path: Path, start: int, end: int) -> bytes:
    """The digest of bytes `start` to `end` of a file. Raises OSError if the file is shorter."""
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            num_bytes = file.readinto(memoryview(buffer)[: min(READ_BYTES, end - start)])
            if not num_bytes:
                raise OSError(f"{path.name} ended at byte {start} of {end}")
            digest.update(memoryview(buffer)[:num_bytes])
            start += num_bytes
    return digest.digest()


def digest_sources(*folders: Path) -> str:
    """A digest of the Python files in folders, whose code decides the bits of results."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return _sha256(hashlib.sha256(path.read_bytes()).digest() for path in paths).hex()


def _sha256(parts: Any) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
