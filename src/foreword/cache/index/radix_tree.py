"""RadixTree: runs of tokens in a tree, and the blocks that end in each run.

Knows tokens, nodes and block ids; knows nothing of sequences, duplicates or eviction. A node splits where
sequences diverge, at any token. A node with nothing below it is trimmed to the end of its last block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.keys.hashing import TokenArray
from foreword.cache.keys.sequence import common_length

Namespace = tuple[str | None, str | None, str | None]
NOT_INDEXED = -1
NO_TAIL = -1

MAX_APPENDED_TOKENS = 4096
"""Longer nodes are not extended, which bounds the copy when one block is added."""


class RadixNode:
    """The tokens at positions `start` to `end` (exclusive) of all sequences that pass through."""

    __slots__ = ("block_ids", "children", "node_id", "num_cuts", "parent", "start", "tail", "tokens")

    def __init__(
        self, node_id: int, parent: RadixNode | None, start: int, tokens: TokenArray, block_ids: BlockIds
    ) -> None:
        self.node_id = node_id
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.block_ids = block_ids
        """The blocks that end in this node, in order."""
        self.children: dict[int, RadixNode] = {}
        """Children by first token."""
        self.num_cuts = 0
        """The number of times that its end was trimmed; other tokens may have followed before."""
        self.tail = NO_TAIL
        """The block that holds the tokens after the last full block, if this node ends inside a block."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RadixTree:
    """One tree for each namespace, which is everything besides tokens that must be equal for a hit.

    The base of `RadixIndex`; of no use alone.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size

    def clear(self) -> None:
        """Forget everything."""
        self._roots: dict[Namespace, RadixNode] = {}
        self._namespace_of: dict[int, Namespace] = {}
        self._nodes: dict[int, RadixNode] = {}
        self._num_made = 0
        """The number of nodes ever made: the next node's id."""
        self._node_id_of: npt.NDArray[np.int64] = np.full(self._num_blocks, NOT_INDEXED, np.int64)
        self._number_of: npt.NDArray[np.int32] = np.zeros(self._num_blocks, np.int32)
        """The number of each indexed block within its prefix."""

    def _walk(self, namespace: Namespace, tokens: TokenArray) -> tuple[RadixNode | None, int, list[BlockIds]]:
        """Follow `tokens` down the tree: the last node touched, the number of tokens matched, the whole blocks."""
        found: list[BlockIds] = []
        node = self._roots.get(namespace)
        position = 0
        while node is not None:
            shared = common_length(node.tokens, tokens[position:])
            position += shared
            if shared < len(node.tokens):
                found.append(node.block_ids[: self._blocks_ending(node, position)])
                break
            found.append(node.block_ids)
            below = node.children.get(int(tokens[position])) if position < len(tokens) else None
            if below is None:
                break
            node = below
        return node, position, found

    def _blocks_ending(self, node: RadixNode, position: int) -> int:
        """The number of the node's blocks that end at or before `position`."""
        return position // self._block_size - node.start // self._block_size

    def _first_block_ending_after(self, node: RadixNode, position: int) -> int:
        """A block that holds the token before `position`, which lies in `node`.

        It ends in the node or in its nearest descendant, or is a tail there. This takes at most block_size
        steps, because a node in which no block ends lies inside one.
        """
        at = self._blocks_ending(node, position)
        while at == len(node.block_ids):
            if node.tail != NO_TAIL:
                return node.tail
            node, at = next(iter(node.children.values())), 0
        return int(node.block_ids[at])

    def _grow(self, node: RadixNode, position: int, tokens: TokenArray, block_ids: BlockIds) -> RadixNode:
        """Add a run of tokens after `node`, which ends at `position`: extend the node if nothing else follows it."""
        is_open = node.parent is not None and not node.children and node.tail == NO_TAIL
        if is_open and len(node.tokens) < MAX_APPENDED_TOKENS:
            node.tokens = np.concatenate((node.tokens, tokens))
            node.block_ids = np.concatenate((node.block_ids, block_ids))
        else:
            parent, node = node, self._make(node, position, tokens.copy(), block_ids)
            parent.children[int(tokens[0])] = node
        self._node_id_of[block_ids] = node.node_id
        return node

    def _make(self, parent: RadixNode | None, start: int, tokens: TokenArray, block_ids: BlockIds) -> RadixNode:
        node = RadixNode(self._num_made, parent, start, tokens, block_ids)
        self._nodes[node.node_id] = node
        self._num_made += 1
        return node

    def _root(self, namespace: Namespace) -> RadixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._make(None, 0, np.empty(0, np.int32), np.empty(0, np.int32))
            self._namespace_of[root.node_id] = namespace
        return root

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Split a node after `length` of its tokens; returns the upper part, which takes the node's place."""
        at = self._blocks_ending(node, node.start + length)
        assert node.parent is not None
        upper = self._make(node.parent, node.start, node.tokens[:length], node.block_ids[:at])
        node.parent.children[int(node.tokens[0])] = upper
        upper.children[int(node.tokens[length])] = node
        node.parent, node.start = upper, node.start + length
        node.tokens, node.block_ids = node.tokens[length:], node.block_ids[at:]
        self._node_id_of[upper.block_ids] = upper.node_id
        return upper

    def _trim(self, node: RadixNode) -> None:
        """Remove tokens that lead to no block, in this node and above."""
        while node.parent is not None and not node.children and node.tail == NO_TAIL:
            end = (node.start // self._block_size + len(node.block_ids)) * self._block_size
            if end > node.start:
                node.tokens = node.tokens[: end - node.start]
                node.num_cuts += 1
                return
            del node.parent.children[int(node.tokens[0])], self._nodes[node.node_id]
            node = node.parent
        if node.parent is None and not node.children:
            del self._roots[self._namespace_of.pop(node.node_id)], self._nodes[node.node_id]

    def _check_tree(self) -> tuple[dict[int, int], dict[int, RadixNode]]:
        """Raise AssertionError if the trees are inconsistent; returns the nodes' blocks and tails."""
        seen: dict[int, int] = {}
        tails: dict[int, RadixNode] = {}
        num_nodes = 0
        assert {root.node_id: namespace for namespace, root in self._roots.items()} == self._namespace_of
        for root in self._roots.values():
            assert root.children, "a tree without leaves was left behind"
            stack = [root]
            for node in stack:
                num_nodes += 1
                assert self._nodes[node.node_id] is node, "a node is not registered"
                for first, child in node.children.items():
                    assert child.parent is node, "a child has another parent"
                    assert child.start == node.end, "a child does not begin where its parent ends"
                    assert int(child.tokens[0]) == first, "a child stands under another token"
                    stack.append(child)
                size = self._block_size
                assert len(node.block_ids) == node.end // size - node.start // size, "a node miscounts its blocks"
                if node.tail != NO_TAIL:
                    assert node.end % size, "a tail ends with a block"
                    assert node.tail not in tails, "a block is two tails"
                    tails[node.tail] = node
                if not node.children:
                    assert node.end % size == 0 or node.tail != NO_TAIL, "a leaf ends inside a block"
                    assert node.parent is None or len(node.tokens), "a leaf is empty"
                for at, block_id in enumerate(node.block_ids.tolist()):
                    assert block_id not in seen, "a block stands twice in the tree"
                    seen[block_id] = node.node_id
                    assert self._number_of[block_id] == node.start // size + at, "a block has a wrong number"
        assert num_nodes == len(self._nodes), "a node is out of reach"
        recorded = np.flatnonzero(self._node_id_of != NOT_INDEXED)
        assert {int(block): int(self._node_id_of[block]) for block in recorded} == seen, "blocks and nodes differ"
        return seen, tails
