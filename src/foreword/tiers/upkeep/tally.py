"""Tallies of a cache directory's blocks: by namespace, group and day."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.disk.manifest import Facts
from foreword.tiers.disk.run_format import PAGE, RunHeader
from foreword.tiers.disk.segments import Damage
from foreword.tiers.tier import PINNED
from foreword.tiers.upkeep.survey import Survey

UNKNOWN = "unknown"


@dataclass(slots=True)
class GroupTally:
    """Blocks of one group of layers."""

    num_blocks: int = 0
    payload_bytes: int = 0
    num_distinct: int = 0
    """Blocks without the copies that several processes wrote."""


@dataclass(slots=True)
class Tally:
    """Blocks of one namespace."""

    namespace: bytes
    facts: Facts
    """What the manifest says; empty without one."""
    num_blocks: int = 0
    num_pinned: int = 0
    num_encrypted: int = 0
    num_expired: int = 0
    payload_bytes: int = 0
    """As stored: of encrypted blocks, with what encryption adds."""
    disk_bytes: int = 0
    """With headers and padding."""
    oldest_s: int = 0
    newest_s: int = 0
    groups: dict[int, GroupTally] = field(default_factory=dict)
    bytes_by_day: Counter[str] = field(default_factory=Counter)
    """`payload_bytes` by the day of the write (UTC)."""

    @property
    def model(self) -> str:
        """The model's name as its user gave it."""
        return str(self.facts.get("model_name", UNKNOWN))

    @property
    def kind(self) -> str:
        """Whether blocks of other arithmetic lie here too."""
        exact = self.facts.get("exact")
        return "exact" if exact is True else "shared" if exact is False else UNKNOWN

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the group with most blocks; None without a manifest."""
        block_size = self.facts.get("block_size")
        if not isinstance(block_size, int):
            return None
        return block_size * max((group.num_distinct for group in self.groups.values()), default=0)

    @property
    def arithmetic(self) -> str:
        """Device, attention and versions, in short."""
        at = self.facts.get("arithmetic", {})
        path, libraries, processor = (_folder(at, name) for name in ("path", "libraries", "processor"))
        attention = path.get("attention")
        parts = [
            " ".join(
                str(part) for part in (path.get("device"), processor.get("kind") or processor.get("name")) if part
            ),
            " ".join(map(str, attention)) if isinstance(attention, list) else "",
            f"torch {libraries['torch']}" if "torch" in libraries else "",
            f"foreword {self.facts['foreword_version']}" if "foreword_version" in self.facts else "",
        ]
        return ", ".join(part for part in parts if part) or UNKNOWN

    def add(self, header: RunHeader, whole: npt.NDArray[np.bool_], now_s: float) -> None:
        """Count the blocks of a run that are whole."""
        entries = header.entries[whole]
        if not len(entries):
            return
        payload_bytes = int(entries["stored_bytes"].sum())
        self.num_blocks += len(entries)
        self.num_pinned += int(np.count_nonzero(entries["flags"] & PINNED))
        self.num_encrypted += len(entries) if header.cipher_id != NO_CIPHER_ID else 0
        self.num_expired += len(entries) if 0 < header.expires_s <= now_s else 0
        self.payload_bytes += payload_bytes
        self.disk_bytes += header.run_bytes
        self.oldest_s = min(self.oldest_s or header.created_s, header.created_s)
        self.newest_s = max(self.newest_s, header.created_s)
        self.bytes_by_day[day(header.created_s)] += payload_bytes
        for group_id in np.unique(entries["group"]).tolist():
            own = entries["group"] == group_id
            group = self.groups.setdefault(group_id, GroupTally())
            group.num_blocks += int(np.count_nonzero(own))
            group.payload_bytes += int(entries["stored_bytes"][own].sum())

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "namespace": self.namespace.hex(),
            "model": self.facts.get("model_name"),
            "arithmetic": None if self.arithmetic == UNKNOWN else self.arithmetic,
            "exact": self.facts.get("exact"),
            "num_blocks": self.num_blocks,
            "num_distinct_blocks": sum(group.num_distinct for group in self.groups.values()),
            "num_pinned": self.num_pinned,
            "num_encrypted": self.num_encrypted,
            "num_expired": self.num_expired,
            "num_tokens": self.num_tokens,
            "payload_bytes": self.payload_bytes,
            "disk_bytes": self.disk_bytes,
            "oldest_s": self.oldest_s or None,
            "newest_s": self.newest_s or None,
            "groups": {
                str(group_id): {"num_blocks": group.num_blocks, "payload_bytes": group.payload_bytes}
                for group_id, group in sorted(self.groups.items())
            },
            "bytes_by_day": dict(sorted(self.bytes_by_day.items())),
        }


def whole_blocks(header: RunHeader, num_bytes: int) -> npt.NDArray[np.bool_]:
    """Which blocks of a run end within a file of that size, [blocks]."""
    ends = header.offset + header.entries["page"].astype(np.int64) * PAGE + header.entries["stored_bytes"]
    return np.asarray(ends <= num_bytes)


def tallies(found: Survey) -> list[Tally]:
    """The blocks of every namespace that has blocks or a manifest, most bytes first. Reads all headers."""
    now_s = time.time()
    by_namespace = {name: Tally(name, facts) for name, facts in found.manifests.facts.items()}
    keys: dict[tuple[bytes, int], list[npt.NDArray[np.uint8]]] = {}
    for segment in found.segments:
        for header in found.runs(segment):
            if isinstance(header, Damage):
                continue
            whole = whole_blocks(header, segment.num_bytes)
            tally = by_namespace.setdefault(header.namespace, Tally(header.namespace, {}))
            tally.add(header, whole, now_s)
            entries = header.entries[whole]
            for group_id in np.unique(entries["group"]).tolist():
                own = entries["key"][entries["group"] == group_id]
                keys.setdefault((header.namespace, group_id), []).append(own)
    for (namespace, group_id), parts in keys.items():
        joined = np.ascontiguousarray(np.concatenate(parts))
        distinct = len(np.unique(joined.view(f"V{joined.shape[1]}")))
        by_namespace[namespace].groups[group_id].num_distinct = distinct
    return sorted(by_namespace.values(), key=lambda tally: (-tally.disk_bytes, tally.namespace))


def day(seconds: float) -> str:
    """The date of a moment since 1970, in UTC."""
    return _utc("%Y-%m-%d", seconds)


def moment(seconds: float) -> str:
    """Date and time, in UTC; `-` for 0."""
    return _utc("%Y-%m-%d %H:%M", seconds) if seconds else "-"


def _utc(pattern: str, seconds: float) -> str:
    try:
        return time.strftime(pattern, time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a clock that had jumped
        return UNKNOWN


def _folder(facts: object, name: str) -> dict[str, Any]:
    """The facts below a name; empty if there are none."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, dict) else {}
