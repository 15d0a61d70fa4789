"""PrefixNode: a cached prefix as somebody who looks at the cache sees it.

Knows nodes, tokens and block ids; changes nothing. What is handed out are copies, valid for ever.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache.blocks.block_pool import BlockIds
from foreword.cache.keys.hashing import TokenArray

MAX_SHOWN_TOKENS = 256
"""Leading tokens of a node that are shown."""
MAX_CHILDREN = 1024
"""Children of one node that are looked at, the latest ones: bounds what a look costs."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A run of tokens that follows its parent's in the cache."""

    node_id: int
    """Of one node for as long as it exists; a node that is cut keeps its id for the lower part."""
    parent_id: int | None
    salt: str | None
    """Under which it is found; None where it is found without one."""
    start: int
    """Tokens before it."""
    num_tokens: int
    token_ids: tuple[int, ...]
    """The first of its tokens, `MAX_SHOWN_TOKENS` at most. Numbers below 0 stand for media."""
    block_ids: BlockIds
    """Blocks that end in it."""
    num_reuses: int
    """How often a request was served from it; 0 where nothing counts that."""
    num_children: int


class TreeNode(Protocol):
    """What is looked at of a radix tree's node."""

    node_id: int
    start: int
    tokens: TokenArray
    block_ids: BlockIds

    @property
    def children(self) -> Mapping[int, TreeNode]: ...


def top_nodes(
    roots: Iterable[tuple[str | None, TreeNode]],
    told: Callable[[int], tuple[int, str | None]],
    limit: int,
    num_reuses: npt.NDArray[np.int64] | None,
    under_salt: str = "",
) -> list[PrefixNode]:
    """The `limit` nodes that were reused most often, then those with most tokens; a parent before its children.

    Tails are left out.
    `roots` are trees with the salt of each; `told` gives for a token below 0 what it stands for, and the salt that
    begins there. With `under_salt`, only nodes under salts that begin so. Looks at the children of the nodes that it
    returns, and of what is above them, and at no others.
    """
    found: list[PrefixNode] = []
    queue: list[tuple[int, int, int, int | None, str | None, TreeNode]] = []

    def push(node: TreeNode, parent_id: int | None, salt: str | None) -> None:
        if not len(node.block_ids) and not node.children:
            return  # a tail, of less than a block
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
                token, its_salt = told(token)
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
    """Reuses of the node's most reused block; of the blocks right below, if none ends in it."""
    if len(node.block_ids):
        return int(num_reuses[node.block_ids].max())
    below = islice(reversed(node.children.values()), MAX_CHILDREN)  # type: ignore[call-overload]
    return max((_most_reuses(child, num_reuses) for child in below), default=0)
