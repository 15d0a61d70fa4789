"""Which requests share the beginning of their prompts, and which part of a lost hit's cost is charged to one request.

Prompts lie in a tree, whose nodes have consecutive blocks. The tree keeps the last used prompts, up to as many blocks
as all replicas have together.

    system prompt                conversations 3, under way 2
    |-- first conversation       conversations 1, under way 1
    |-- second conversation      conversations 1, under way 0
    `-- third conversation       conversations 1, under way 1
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from foreword.cache.block_ids import Int64Array
from foreword.cluster.holders import Key
from foreword.cluster.reuse_ages import FloatArray


@dataclass(slots=True, eq=False)
class PromptNode:
    """Consecutive blocks that belong to the same prompts. They follow the blocks of the parent node."""

    parent: PromptNode | None
    keys: list[Key]
    conversations: int = 1
    """The number of prompts with these blocks that differ from each other. A prompt that only continues an earlier
    prompt is the same conversation, so it is not counted again."""
    under_way: int = 0
    """The number of requests whose prompts have these blocks and that have no first token yet."""
    children: dict[Key, PromptNode] = field(default_factory=dict)
    """Child nodes by their first keys."""

    def path(self) -> Iterator[PromptNode]:
        """Yield this node and its ancestors, without the root."""
        node: PromptNode = self
        while node.parent is not None:
            yield node
            node = node.parent


class Stretch(NamedTuple):
    """Consecutive blocks of a prompt, from the end of the preceding stretch up to `end` (exclusive)."""

    end: int
    conversations: int
    under_way: int


class Demand:
    """The tree of prompts. A key identifies all tokens before its block too, so equal keys mean equal beginnings."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._root = PromptNode(None, [])
        self._leaves: OrderedDict[PromptNode, None] = OrderedDict()
        """Leaves of the tree, the last used at the end."""

    def of_prompt(self, keys: Sequence[Key]) -> list[Stretch]:
        """The stretches of a prompt's remembered blocks, each with counts of conversations and requests under way."""
        node, end, at = self._find(keys)
        stretches = []
        for each in node.path():
            stretches.append(Stretch(end, each.conversations, each.under_way))
            end -= at if each is node else len(each.keys)
        stretches.reverse()
        return stretches

    def enter(self, keys: Sequence[Key], max_blocks: int) -> PromptNode:
        """Add a request, under way until `leave` gets the returned node. Forgets old prompts beyond `max_blocks`."""
        node, depth, at = self._find(keys)
        if at < len(node.keys):
            node = self._split(node, at)
        new_keys = list(keys[depth:])
        if new_keys:
            node = self._add(node, new_keys)
        else:  # the prompt may differ after its last whole block
            for each in node.path():
                each.conversations += 1
        for each in node.path():
            each.under_way += 1
        if node in self._leaves:
            self._leaves.move_to_end(node)
        self._forget(max_blocks)
        return node

    def leave(self, node: PromptNode) -> None:
        """Record that a request has its first token, or ended without a token."""
        for each in node.path():
            each.under_way -= 1

    def _find(self, keys: Sequence[Key]) -> tuple[PromptNode, int, int]:
        """The last node with blocks of the prompt, the number of known blocks, and the number of these in the node."""
        node, depth = self._root, 0
        while depth < len(keys) and (child := node.children.get(keys[depth])) is not None:
            end = depth + len(child.keys)
            if end > len(keys) or keys[end - 1] != child.keys[-1]:
                num_equal = _num_equal(keys, depth, child.keys)
                return child, depth + num_equal, num_equal
            node, depth = child, end
        return node, depth, len(node.keys)

    def _split(self, node: PromptNode, at: int) -> PromptNode:
        """Split a node before its block `at`. Returns the new node, which has the first blocks."""
        assert node.parent is not None
        first = PromptNode(node.parent, node.keys[:at], node.conversations, node.under_way, {node.keys[at]: node})
        node.parent.children[node.keys[0]] = first
        node.parent, node.keys = first, node.keys[at:]
        return first

    def _add(self, node: PromptNode, keys: list[Key]) -> PromptNode:
        """Add blocks after a node's last block. Returns the node that has the new blocks."""
        self.num_blocks += len(keys)
        is_leaf = node in self._leaves
        if is_leaf and node.conversations == 1 and not node.under_way:  # the next turn of a conversation
            node.keys = node.keys + keys
            return node
        if is_leaf:
            del self._leaves[node]
        else:
            for each in node.path():
                each.conversations += 1
        child = node.children[keys[0]] = PromptNode(node, keys)
        self._leaves[child] = None
        return child

    def _forget(self, max_blocks: int) -> None:
        while self.num_blocks > max_blocks and len(self._leaves) > 1:
            leaf = next(iter(self._leaves))
            if leaf.under_way:
                self._leaves.move_to_end(leaf)
                return
            del self._leaves[leaf]
            self.num_blocks -= len(leaf.keys)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.keys[0]]
            gone = leaf.conversations
            if not parent.children and parent.parent is not None:
                self._leaves[parent] = None
                self._leaves.move_to_end(parent, last=False)
                gone -= 1
            for each in parent.path():
                each.conversations -= gone

    def check_integrity(self) -> None:
        blocks, nodes = 0, [self._root]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            blocks += len(node.keys)
            assert node is self._root or (node in self._leaves) == (not node.children)
            for first, child in node.children.items():
                assert child.parent is node
                assert child.keys[0] == first
            if node is not self._root:
                assert node.conversations >= max(1, sum(child.conversations for child in node.children.values()))
                assert node.under_way >= sum(child.under_way for child in node.children.values()) >= 0
        assert blocks == self.num_blocks


def lost_shares(stretches: Sequence[Stretch], hits: Int64Array, scale: float) -> tuple[Int64Array, FloatArray]:
    """For each replica: how many blocks it lacks but another has, and the part of their cost charged to this request.

    `hits` [replicas]: leading blocks that each replica holds. `scale`: requests under way at all routers, divided by
    those of this router. Both results are [replicas]. The part of one block is the smaller of

        1 / (1 + requests under way that want it / replicas that hold it)     later requests share the copy
        replicas / conversations that want it                                 a copy serves its replica's conversations

    The cost of a block of one conversation is charged in full. A block that all requests have costs almost nothing.
    """
    held = hits.tolist()
    num_at = Counter(held)
    depths = sorted(num_at, reverse=True)
    share, holders, at = 0.0, 0, len(stretches)
    share_at = {depths[0]: 0.0}
    for end, begin in pairwise(depths):  # replicas that reach the deeper depth hold the blocks between the two depths
        holders += num_at[end]
        while begin < end:
            while at and stretches[at - 1].end >= end:
                at -= 1
            _, conversations, under_way = stretches[at] if at < len(stretches) else (end, 1, 0)
            low = max(begin, stretches[at - 1].end) if at else begin
            share += (end - low) * min(1 / (1 + under_way * scale / holders), len(hits) / conversations)
            end = low
        share_at[begin] = share
    return depths[0] - hits, np.array([share_at[depth] for depth in held])


def _num_equal(keys: Sequence[Key], depth: int, node_keys: Sequence[Key]) -> int:
    """The number of leading keys that a node shares with a prompt from `depth` on. After a difference, all differ."""
    length = min(len(node_keys), len(keys) - depth)
    return bisect_left(range(length), True, key=lambda at: keys[depth + at] != node_keys[at])
