"""Whose KV a cache holds: digests of the model, and of the arithmetic that computed the KV.

`foreword.model.identity` gathers the facts. Blocks with equal keys hold equal bits only if both digests are equal. So
both digests go into the root of all keys, and into the namespace of the blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMESPACE_BYTES = 16
Facts = Mapping[str, Any]
"""Facts that can be written as JSON. Values of other types are written as texts."""


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """The model and the arithmetic of a cache's blocks. Equal identities may share blocks."""

    model_id: str
    """Digest of the weights' content, the configuration and the layout, in hexadecimal digits."""
    arithmetic_id: str
    """Digest of everything else that decides a bit: kernels, versions, processor, and what a probe computed."""
    layout: str
    """Digest of the layout alone: KV of the same weights may be cached in blocks of several layouts."""
    exact: bool = True
    """Whether another arithmetic is another identity. False: all arithmetics share the blocks of one namespace."""
    facts: Facts = field(default_factory=dict, compare=False, repr=False)
    """Facts about the model and the arithmetic for people; comparisons ignore them."""

    @classmethod
    def of(cls, model: Facts, arithmetic: Facts, layout: Facts, *, exact: bool = True) -> CacheIdentity:
        """The identity that these facts give. The facts about the model do not include the layout."""
        layout_id = digest(layout)
        facts = {"model": {name: value for name, value in model.items() if name != "config"}, "arithmetic": arithmetic}
        return cls(digest({"model": model, "layout": layout_id}), digest(arithmetic), layout_id, exact, facts)

    @property
    def fingerprint(self) -> str:
        """The digest that represents this identity in the root of the keys."""
        return digest({"model": self.model_id, "arithmetic": self.arithmetic_id if self.exact else "any"})

    @property
    def namespace(self) -> bytes:
        """The namespace of this identity's blocks, 16 bytes."""
        return bytes.fromhex(self.fingerprint)[:NAMESPACE_BYTES]

    def description(self) -> dict[str, Any]:
        """All digests and facts of this identity, for manifests and people, ready for `json.dumps`."""
        return {
            "namespace": self.namespace.hex(),
            "model_id": self.model_id,
            "arithmetic_id": self.arithmetic_id,
            "layout": self.layout,
            "exact": self.exact,
            **json.loads(canonical_json(self.facts)),
        }


def digest(facts: Facts) -> str:
    """SHA-256 of facts as canonical JSON, in hexadecimal digits."""
    return hashlib.sha256(canonical_json(facts)).hexdigest()


def canonical_json(facts: Facts) -> bytes:
    """Facts as JSON that is the same for equal facts."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str).encode()
