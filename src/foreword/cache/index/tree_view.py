"""PrefixNode: a cached prefix, as shown to people who inspect the cache.

Knows nodes, tokens and block ids; changes nothing. Results are copies and stay valid.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.keys.hashing import TokenArray

MAX_SHOWN_TOKENS = 256
"""The number of leading tokens to show of a node."""
MAX_CHILDREN = 1024
"""The number of children to examine of one node, the latest ones; this bounds the cost."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of tokens in the cache that follows its parent's tokens."""

    node_id: int
    """Stays the same while the node exists; the lower part of a split node keeps it."""
    parent_id: int | None
    salt: str | None
    """The salt under which lookups find it; None if they find it without one."""
    start: int
    """The number of tokens before it."""
    num_tokens: int
    token_ids: tuple[int, ...]
    """Its first tokens, at most `MAX_SHOWN_TOKENS`. Negative numbers represent media."""
    block_ids: BlockIds
    """The blocks that end in it."""
    num_reuses: int
    """The number of requests that reused it; 0 if nothing counts reuses."""
    num_children: int


class TreeNode(Protocol):
    """The part of a radix tree's node that this module reads."""

    node_id: int
    start: int
    tokens: TokenArray
    block_ids: BlockIds

    @property
    def children(self) -> Mapping[int, TreeNode]: ...


def top_nodes(
    roots: Iterable[tuple[str | None, TreeNode]],
    meaning: Callable[[int], tuple[int, str | None]],
    limit: int,
    num_reuses: npt.NDArray[np.int64] | None,
    under_salt: str = "",
) -> list[PrefixNode]:
    """The `limit` most reused nodes, then those with the most tokens; a parent comes before its children.

    `roots` are trees, each with its salt. `meaning` maps a negative token to the token that it represents and to the
    salt that begins there. `under_salt` selects nodes under salts that start with it. Leaves out tails. Examines only
    the children of the returned nodes and of their ancestors.
    """
    found: list[PrefixNode] = []
    queue: list[tuple[int, int, int, int | None, str | None, TreeNode]] = []

    def push(node: TreeNode, parent_id: int | None, salt: str | None) -> None:
        if not len(node.block_ids) and not node.children:
            return  # a tail: less than a block
        reuses = 0 if num_reuses is None else _most_reuses(node, num_reuses)
        heapq.heappush(queue, (-reuses, -len(node.tokens), node.node_id, parent_id, salt, node))

    for salt, root in roots:
        for child in islice(reversed(root.children.values()), MAX_CHILDREN):  # type: ignore[call-overload]
            push(child, None, salt)
    while queue and len(found) < limit:
        reuses, _, node_id, parent_id, salt, node = heapq.heappop(queue)
        tokens, begins = [], None
        for token in node.tokens[:MAX_SHOWN_TOKENS].tolist():
            if token < 0:
                token, its_salt = meaning(token)
                begins = its_salt or begins
            tokens.append(token)
        salt = begins or salt
        if salt is not None and not salt.startswith(under_salt):
            continue
        if salt is not None or not under_salt:
            shown = (node.start, len(node.tokens), tuple(tokens), node.block_ids.copy(), -reuses, len(node.children))
            found.append(PrefixNode(node_id, parent_id, salt, *shown))
        for child in islice(reversed(node.children.values()), MAX_CHILDREN):  # type: ignore[call-overload]
            push(child, node_id, salt)
    return found


def _most_reuses(node: TreeNode, num_reuses: npt.NDArray[np.int64]) -> int:
    """The reuses of the node's most reused block, or of the blocks right below if none ends in it."""
    if len(node.block_ids):
        return int(num_reuses[node.block_ids].max())
    below = islice(reversed(node.children.values()), MAX_CHILDREN)  # type: ignore[call-overload]
    return max((_most_reuses(child, num_reuses) for child in below), default=0)
