"""The adapters of one model that are in memory. They are read on demand; the least recently used is dropped first.

A folder whose files have changed is read again. Requests that run or wait hold adapters, too, so one limit in bytes
holds for all adapters in memory. Nothing in a folder is unpickled, nothing outside its two files is read, and a tensor
is read only when its shape fits the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from foreword.errors import AdaptersBusyError, InvalidRequestError
from foreword.model.adapters.weights import AdapterName, AdapterWeights, LowRank, Place, most_bytes, places
from foreword.model.checkpoint.tensors import StoredPlace, UnreadableError, places_in
from foreword.model.spec import DecoderSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_CONFIG_BYTES = 1 << 20
MOST_INVOCATION_TOKENS = 1024
_NO_MATTER = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config inference_mode lora_dropout lora_ga_config "
    "loftq_config megatron_config megatron_core peft_version qalora_group_size revision runtime_config task_type "
    "ensure_weight_tying peft_type alora_invocation_string exclude_modules".split()
)
"""Fields that do not change what the file's matrices compute."""
_READ = frozenset(
    "r lora_alpha use_rslora rank_pattern alpha_pattern layers_to_transform layers_pattern target_modules bias "
    "init_lora_weights alora_invocation_tokens".split()
)
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MOST_PATTERN, _MOST_REPEATS, _MOST_GROUPS = 512, 4, 4
_MOST_KEYS, _MOST_REPEATING_KEYS = 1024, 32
"""Most keys of rank_pattern and alpha_pattern. PEFT writes a key for each module; keys with repeats take longest."""
_REPEATS, _NESTED = re.compile(r"(?<!\\)[*+{]|(?<!\\)(?<!\()\?"), re.compile(r"\)[*+{?]|\\\d|\(\?[^:]")
Match = Callable[[str], bool]
Patterns = Sequence[tuple[re.Pattern[str], Any]]
SETTLED_S = 2.0
"""A file that changed less than this number of seconds before it was read may change again without a new date."""
MOST_NAMES = 1024
"""A process that computes nothing remembers the adapters' names for at most this number of folders."""
HELD = 2
"""The adapters in memory may take this many times the bytes of `max_adapters` adapters of the highest rank: one half
for adapters that are kept, the other for adapters that only requests hold.
"""
Stamp = tuple[tuple[int, ...], ...]


class _RefusedError(Exception):
    """Why an adapter is refused; the message has the value, the limit and the remedy."""


def read_adapter(folder: str, spec: DecoderSpec, max_rank: int) -> AdapterWeights:
    """Read the adapter in a folder, for a model with this spec. Raises InvalidRequestError, with a one-line message."""
    try:
        config = _read_config(Path(folder))
        return _read(Path(folder), config, spec, max_rank)
    except (_RefusedError, UnreadableError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InvalidRequestError(f"the adapter in {folder!r:.300} cannot be used: {reason:.400}") from error


@dataclass(frozen=True, slots=True)
class _Config:
    """The fields of an adapter's config that are used."""

    rank: int
    alpha: float
    by_root: bool
    """Whether a change is divided by the root of its rank, not by the rank."""
    ranks: Patterns
    alphas: Patterns
    is_target: Match
    invocation: list[int] | None

    def rank_of(self, module: str) -> int:
        return _whole("rank_pattern", _by_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        alpha = _number("alpha_pattern", _by_pattern(self.alphas, module, self.alpha))
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def _read_config(folder: Path) -> _Config:
    """Read the config of the adapter in a folder. Raises _RefusedError or OSError."""
    if not folder.is_dir():
        raise _RefusedError("it is no folder of this machine; download the adapter first")
    path = folder / CONFIG
    if not path.is_file():
        raise _RefusedError(f"it has no {CONFIG}; give a folder that PEFT's save_pretrained wrote")
    if path.stat().st_size > MOST_CONFIG_BYTES:
        raise _RefusedError(f"{CONFIG} has {path.stat().st_size} bytes, and {MOST_CONFIG_BYTES} is the limit")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"{CONFIG} is no JSON ({error})") from error
    if not isinstance(fields, dict) or str(fields.get("peft_type", "LORA")).upper() != "LORA":
        raise _RefusedError(f"{CONFIG} is not for LoRA; other kinds of adapters are not supported")
    for name, value in fields.items():
        if name not in _NO_MATTER | _READ and value not in (None, False, [], {}, ""):
            raise _RefusedError(f"{name}={value!r:.80} is not supported; train without it, or merge the adapter")
    if fields.get("bias", "none") != "none":
        raise _RefusedError(f"bias={fields['bias']!r:.80} is not supported; train with bias='none'")
    init = fields.get("init_lora_weights", True)
    if not any(init is harmless or (isinstance(init, str) and init == harmless) for harmless in _INITS):
        raise _RefusedError(
            f"init_lora_weights={init!r:.80} changed the base model's weights; save it as plain LoRA, with "
            "path_initial_model_for_weight_conversion"
        )
    return _Config(
        rank=_whole("r", fields.get("r", 8)),
        alpha=_number("lora_alpha", fields.get("lora_alpha", 8)),
        by_root=fields.get("use_rslora") is True,
        ranks=_patterns("rank_pattern", fields),
        alphas=_patterns("alpha_pattern", fields),
        is_target=_targets(fields),
        invocation=_invocation(fields.get("alora_invocation_tokens")),
    )


def _whole(name: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _RefusedError(f"{name}={value!r:.80} is no rank; it must be a whole number from 1 on")
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e6 or not math.isfinite(value):
        raise _RefusedError(f"{name}={value!r:.80} is no finite number up to 1e6")
    return float(value)


def _invocation(tokens: Any) -> list[int] | None:
    if tokens is None:
        return None
    is_list = isinstance(tokens, list) and 1 <= len(tokens) <= MOST_INVOCATION_TOKENS
    if not is_list or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise _RefusedError(
            f"alora_invocation_tokens={tokens!r:.80} must be a list of 1 to {MOST_INVOCATION_TOKENS} token ids"
        )
    return list(tokens)


# ------------------------------------------------------------------------------------------ names


def _pattern(text: Any) -> re.Pattern[str]:
    """A regular expression that cannot take long, even if its author wants it to. Raises _RefusedError."""
    if not isinstance(text, str) or len(text) > _MOST_PATTERN:
        raise _RefusedError(f"the pattern {text!r:.80} is no text of at most {_MOST_PATTERN} characters")
    if len(_REPEATS.findall(text)) > _MOST_REPEATS or text.count("(") > _MOST_GROUPS or _NESTED.search(text):
        raise _RefusedError(
            f"the pattern {text!r:.80} may take too long; use at most {_MOST_REPEATS} repeats, {_MOST_GROUPS} groups, "
            "and no repeated group"
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise _RefusedError(f"the pattern {text!r:.80} is no regular expression ({error})") from error


def _patterns(name: str, fields: Mapping[str, Any]) -> Patterns:
    """Return each value of a field with the pattern of its modules' names. Raises _RefusedError."""
    values = fields.get(name) or {}
    if not isinstance(values, dict):
        raise _RefusedError(f"{name}={values!r:.80} must be an object")
    num_repeating = sum(_REPEATS.search(key) is not None for key in values)
    if len(values) > _MOST_KEYS or num_repeating > _MOST_REPEATING_KEYS:
        raise _RefusedError(
            f"{name} has {len(values)} keys, {num_repeating} of them with repeats, and {_MOST_KEYS} and "
            f"{_MOST_REPEATING_KEYS} are the limits; let one pattern name several modules"
        )
    return [
        (re.compile(rf"(?:.*\.)?(?:{re.escape(key)}|{_pattern(key).pattern})"), value) for key, value in values.items()
    ]


def _by_pattern(patterns: Patterns, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as in PEFT."""
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), default)


def _targets(fields: Mapping[str, Any]) -> Match:
    """Return a function that says if a module is a target. A regex ignores `layers_to_transform`, as in PEFT."""
    targets, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return _in_layers(lambda name: True, layers)
        pattern = _pattern(targets)
        return lambda name: pattern.fullmatch(name) is not None
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise _RefusedError(f"target_modules={targets!r:.80} names no module; it must be a list, a regex or all-linear")
    ends = tuple(f".{target}" for target in targets)
    return _in_layers(lambda name: f".{name}".endswith(ends), layers)


def _in_layers(match: Match, layers: Any) -> Match:
    if layers is None or layers == []:
        return match
    numbers = layers if isinstance(layers, list) else [layers]
    if not all(type(number) is int for number in numbers):
        raise _RefusedError(f"layers_to_transform={layers!r:.80} must be numbers of layers")
    chosen = frozenset(numbers)
    return lambda name: match(name) and int(name.split(".")[2]) in chosen


# ---------------------------------------------------------------------------------------- matrices


def _read(folder: Path, config: _Config, spec: DecoderSpec, max_rank: int) -> AdapterWeights:
    path, changeable = folder / WEIGHTS, places(spec)
    if not path.is_file():
        raise _RefusedError(f"it has no {WEIGHTS}; pickled weights are not read: save the adapter as safetensors")
    pairs: dict[str, dict[str, StoredPlace]] = {}
    for name, stored in places_in(path).items():
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in changeable:
            raise _RefusedError(
                f"it changes {name!r:.120}, which this model has no low-rank product for; only attention's and plain "
                "networks' weights can be changed"
            )
        pairs.setdefault(match[1], {})[match[2]] = stored
    if not pairs:
        raise _RefusedError(f"{WEIGHTS} has no matrices")
    targets = {name for name in changeable if config.is_target(name)}
    strange = sorted(set(pairs) - targets)
    if strange:
        raise _RefusedError(f"{WEIGHTS} changes {strange[0]!r}, which target_modules does not name")
    changes = {}
    for name, matrices in sorted(pairs.items()):
        if len(matrices) != 2:
            raise _RefusedError(f"{name!r} has only one of its two matrices")
        _check_shapes(name, config, changeable[name], matrices, max_rank)
        changes[name] = _change(name, config, matrices)
    return AdapterWeights(spec, changes, config.invocation, str(folder))


def _check_shapes(name: str, config: _Config, place: Place, matrices: Mapping[str, StoredPlace], max_rank: int) -> None:
    rank = config.rank_of(name)
    if rank > max_rank:
        raise _RefusedError(f"{name!r} has rank {rank}, and max_lora_rank={max_rank}; raise it")
    for matrix, shape in (("A", (rank, place.inputs)), ("B", (place.width, rank))):
        if matrices[matrix].shape != shape:
            raise _RefusedError(f"lora_{matrix} of {name!r} has shape {matrices[matrix].shape}, and {shape} fits")


def _change(name: str, config: _Config, matrices: Mapping[str, StoredPlace]) -> LowRank:
    content, wide = hashlib.sha256(), {}
    for matrix in ("A", "B"):
        stored = matrices[matrix].stored()
        content.update(f"{stored.dtype} {tuple(stored.shape)} ".encode())
        content.update(stored.view(-1).view(torch.uint8).numpy().data)
        wide[matrix] = stored.float()
        if not bool(torch.isfinite(wide[matrix]).all()):
            raise _RefusedError(f"lora_{matrix} of {name!r} has numbers that are not finite")
    scale = config.scale_of(name)
    if not bool(torch.isfinite(wide["B"] * scale).all()):
        raise _RefusedError(f"lora_B of {name!r} times its scale {scale:g} has numbers that are not finite in float32")
    return LowRank(wide["A"].numpy(), wide["B"].numpy(), scale, content.digest())


class LoadedAdapters:
    """Reads and keeps adapters. Any thread may call it."""

    def __init__(self, spec: DecoderSpec, max_adapters: int, max_rank: int) -> None:
        """Keep at most `max_adapters` adapters of ranks up to `max_rank`, besides the adapters that requests hold."""
        self.spec, self._max_adapters, self._max_rank = spec, max_adapters, max_rank
        self._max_bytes = HELD * max_adapters * most_bytes(spec, max_rank)
        self._adapters: OrderedDict[str, tuple[Stamp | None, AdapterWeights]] = OrderedDict()
        """Folder -> the state of its files (None: read them again), and its adapter; the last used folder is last."""
        self._alive: WeakValueDictionary[str, AdapterWeights] = WeakValueDictionary()
        """Digest -> the adapter, as long as a request or the table holds it. So equal adapters are in memory once."""
        self._lock = threading.Lock()
        """Held while the tables are used, but not while files are read, because that may take long."""

    def get(self, folder: str) -> AdapterWeights:
        """The adapter that is in a folder now. Raises InvalidRequestError or AdaptersBusyError."""
        stamp = _stamp(Path(folder))
        with self._lock:
            stamp_before, adapter = self._adapters.get(folder, (None, None))
        if adapter is None or stamp is None or stamp_before != stamp:
            adapter = read_adapter(folder, self.spec, self._max_rank)
        with self._lock:
            adapter = self._alive.get(adapter.digest) or self._admit(adapter)
            self._adapters[folder] = stamp, adapter
            self._adapters.move_to_end(folder)
            while len(self._adapters) > self._max_adapters:
                self._adapters.popitem(last=False)
            return adapter

    def named(self, name: AdapterName) -> AdapterWeights:
        """Return the adapter that another process has named: from memory, or else from the adapter's folder.

        Raises AdaptersBusyError, or InvalidRequestError, also if the folder has another adapter by now.
        """
        with self._lock:
            held = self._alive.get(name.digest)
            if held is not None and name.folder in self._adapters:
                self._adapters.move_to_end(name.folder)
        adapter = self.get(name.folder) if held is None else held
        if adapter.digest != name.digest:
            raise InvalidRequestError(f"the adapter in {name.folder!r:.300} has changed since the request was sent")
        return adapter

    def _admit(self, read: AdapterWeights) -> AdapterWeights:
        """Make room for one more adapter. An adapter that no request holds leaves memory when it leaves the table."""
        dropped: list[tuple[str, Stamp | None, str]] = []
        while self._adapters and self.num_bytes + read.num_bytes > self._max_bytes:
            folder, (stamp, adapter) = self._adapters.popitem(last=False)
            dropped.append((folder, stamp, adapter.digest))
            del adapter
        for folder, stamp, digest in reversed(dropped):  # dropping adapters that requests hold frees no memory
            held = self._alive.get(digest)
            if held is not None:
                self._adapters[folder] = stamp, held
                self._adapters.move_to_end(folder, last=False)
        if self.num_bytes + read.num_bytes > self._max_bytes:
            raise AdaptersBusyError(
                f"requests hold adapters of {self.num_bytes} bytes, and {self._max_bytes} is the limit; try again "
                "when they have ended, name fewer in one call, or raise max_loras"
            )
        self._alive[read.digest] = read
        return read

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters in memory."""
        return sum(adapter.num_bytes for adapter in list(self._alive.values()))


class AdapterNames:
    """Reads adapters as `LoadedAdapters` does, and keeps only their names: for a process that computes nothing."""

    num_bytes = 0
    """No adapters are kept in memory."""

    def __init__(self, spec: DecoderSpec, max_rank: int) -> None:
        self.spec, self._max_rank = spec, max_rank
        self._names: OrderedDict[str, tuple[Stamp | None, AdapterName]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, folder: str) -> AdapterName:
        """The name of the adapter that is in a folder now. Raises InvalidRequestError."""
        stamp = _stamp(Path(folder))
        with self._lock:
            stamp_before, name = self._names.get(folder, (None, None))
        if name is None or stamp is None or stamp_before != stamp:
            read = read_adapter(folder, self.spec, self._max_rank)
            name = AdapterName(read.digest, None if read.invocation is None else read.invocation.tolist(), folder)
        with self._lock:
            self._names[folder] = stamp, name
            self._names.move_to_end(folder)
            if len(self._names) > MOST_NAMES:
                self._names.popitem(last=False)
        return name


def _stamp(folder: Path) -> Stamp | None:
    """The state of an adapter's files, taken before they are read; None if later changes may not show in it."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return None
    # A program may set st_mtime, as `cp -p` does; st_ctime logs every change, also the change of st_mtime.
    if max(file.st_ctime for file in stats) > time.time() - SETTLED_S:
        return None
    return tuple((file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns) for file in stats)
