"""One answer from those of several engines that have caches of their own."""

from __future__ import annotations

from dataclasses import replace

from foreword.cache import CacheEntry, LookupExplanation, PrefixNode
from foreword.linking import LinkExplanation


def best(found: list[LookupExplanation]) -> LookupExplanation:
    """The lookup that found most: a router would have sent the prompt there."""
    return max(found, key=lambda one: one.num_hit_tokens)


def fewest_missing(found: list[LinkExplanation]) -> LinkExplanation:
    """What the engine says that has most of a prompt's sources."""
    return min(found, key=lambda one: sum(part.num_missing_tokens for part in one.parts))


def longest(found: list[CacheEntry]) -> CacheEntry:
    """The entry that keeps most."""
    return max(found, key=lambda one: one.num_kept_tokens)


def most(found: list[list[int]]) -> list[int]:
    """The largest number at each place."""
    return [max(numbers) for numbers in zip(*found, strict=True)]


def all_prefixes(found: list[list[PrefixNode] | None]) -> list[PrefixNode] | None:
    """The nodes of all trees, numbered anew so that no two have one id; None if no engine has a tree."""
    trees = [nodes for nodes in found if nodes is not None]
    if len(trees) < 2:
        return trees[0] if trees else None
    ids = {(at, node.node_id): number for number, (at, node) in enumerate(_all(trees))}
    return [
        replace(
            node,
            node_id=ids[at, node.node_id],
            parent_id=None if node.parent_id is None else ids.get((at, node.parent_id)),
        )
        for at, node in _all(trees)
    ]


def _all(trees: list[list[PrefixNode]]) -> list[tuple[int, PrefixNode]]:
    return [(at, node) for at, nodes in enumerate(trees) for node in nodes]
