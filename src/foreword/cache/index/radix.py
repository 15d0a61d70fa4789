"""RadixIndex: finds the blocks of a prefix by comparing tokens instead of hashing them.

The tree is that of SGLang's RadixAttention, but with blocks. An edge holds consecutive tokens. The children of a node
differ in their first token. A node splits where sequences diverge, at any token.

    block size 4, sequences ABCDEFGH (blocks 0 1) and ABCDEFXY (blocks 0 2)

        root --ABCDEF--> o --GH--> leaf        a block belongs to the node in which it ends:
             [block 0]    \\    [block 1]        0 to the upper node, 1 and 2 to the leaves
                           --XY--> leaf
                               [block 2]

A search for ABCDEFGZ matches 7 tokens: block 0 whole, and 3 tokens of block 1, which the caller may copy
(copy on write). A lookup costs one array comparison per node on the path.

A finished request leaves a *tail* after its last full block: a node that ends inside a block.

        root --ABCDEF--> o --GH--> leaf
             [block 0]    \\    [block 1]
                           --Z--> leaf        block 3 holds EFZ, and is found as a partial match
                               tail: block 3
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.index.hash_index import HashIndex
from foreword.cache.index.prefix_index import (
    MAX_SHOWN_TOKENS,
    Divergence,
    PartialBlock,
    PrefixIndex,
    PrefixMatch,
    PrefixNode,
)
from foreword.cache.keys.hashing import ExtraKeys, TokenArray
from foreword.cache.keys.sequence import TokenSequence, common_length
from foreword.cache.keys.span_numbers import SpanNumbers, placed_spans, placed_stretches

Namespace = tuple[str | None, str | None, str | None]
NOT_INDEXED = -1
NO_TAIL = -1

MAX_APPENDED_TOKENS = 4096
"""A node with this number of tokens is not extended. This limits the tokens to copy when one block is added."""
MAX_CHILDREN = 1024
"""The most children of a node that `top` examines, the latest first. This limits the cost."""


class RadixNode:
    """The tokens at positions `start` to `end` (exclusive) of all sequences that pass through this node."""

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
        """The number of times that the node's end was trimmed. Other tokens may later replace the trimmed tokens."""
        self.tail = NO_TAIL
        """The block that holds the tokens after the last full block, if this node ends inside a block."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class RadixIndex:
    """Prefixes as a radix tree of tokens.

    Sequences that differ in adapter, salt or embeddings are in different trees. Numbers that represent the content of
    media replace their placeholders, so equal placeholders of different images differ. If a salt or adapter begins
    inside a prompt, such a number also replaces the token at which the salt or adapter begins.

    Forgetting a block also forgets the blocks after it: a suffix without its prefix cannot be found. Duplicates of an
    indexed block wait to take its place, as in `HashIndex`. A tail is unnecessary once a block or a longer tail holds
    its tokens too. The tail stays until the index's owner calls `superseded_tails`: while the new block is still being
    filled, only the tail can be copied.

    Without `cut_tails`, the beginning of a tail is of no use, as with a recurrent state. Lookups then find the longest
    tail whose tokens are all in the sequence, and no tail becomes unnecessary.
    """

    def __init__(self, num_blocks: int, block_size: int, *, keep_tails: bool = True, cut_tails: bool = True) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._cut_tails = cut_tails
        self.keeps_tails = keep_tails and block_size > 1
        self.clear()

    def clear(self) -> None:
        self._roots: dict[Namespace, RadixNode] = {}
        """One tree for each namespace. A namespace is everything that must be equal for a hit, except tokens."""
        self._namespace_of: dict[int, Namespace] = {}
        self._nodes: dict[int, RadixNode] = {}
        self._num_made = 0
        """The number of nodes ever made, which is also the id of the next node."""
        self._node_id_of: npt.NDArray[np.int64] = np.full(self._num_blocks, NOT_INDEXED, np.int64)
        self._number_of: npt.NDArray[np.int32] = np.zeros(self._num_blocks, np.int32)
        """The number of each indexed block within its prefix."""
        self._ends: WeakKeyDictionary[TokenSequence, tuple[RadixNode, int, int]] = WeakKeyDictionary()
        """Sequence -> the node where its last insertion ended, the node's `num_cuts` then, and the end's position."""
        self._duplicates: dict[int, list[int]] = {}
        self._original_of: dict[int, int] = {}
        self._spans = SpanNumbers(self._num_blocks)
        self._num_indexed = 0
        self._tails: dict[int, RadixNode] = {}
        """Block of a tail -> the node that ends with this tail."""
        self._superseded: list[int] = []
        """Tails of nodes below which tokens were inserted since the last `superseded_tails`."""

    def __len__(self) -> int:
        return self._num_indexed

    @property
    def num_tails(self) -> int:
        return len(self._tails)

    # ------------------------------------------------------------------ lookup

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        node, position, parts = self._walk(_namespace(sequence.extra_keys), self._tokens(sequence))
        block_ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        start = len(block_ids) * self._block_size
        if not self._cut_tails:
            while node is not None and (node.tail == NO_TAIL or node.end > position):
                node = node.parent
            tail = None if node is None or node.end < start else PartialBlock(node.tail, node.end - start)
            return PrefixMatch(block_ids, tail)
        partial = position - start
        if not partial:
            return PrefixMatch(block_ids)
        assert node is not None
        source = self._first_block_ending_after(node, position)
        return PrefixMatch(block_ids, PartialBlock(source, partial))

    def diverges(self, sequence: TokenSequence, num_tokens: int) -> Divergence | None:
        tokens = self._tokens(sequence)
        node, position, _ = self._walk(_namespace(sequence.extra_keys), tokens)
        if position == len(tokens):
            return None
        plain_tokens = self._spans.replace(sequence.token_ids, placed_spans(sequence.extra_keys))
        ours = tuple(plain_tokens[position : position + num_tokens].tolist())
        theirs: list[int] = []
        start = position
        while node is not None and len(theirs) < num_tokens:
            theirs += node.tokens[start - node.start :][: num_tokens - len(theirs)].tolist()
            start = node.end
            node = next(iter(node.children.values()), None)
        shown = takewhile(lambda token: self._spans.first_token(token) is None, theirs)  # the rest has another salt
        return Divergence(position, ours, tuple(shown))

    def following(self, sequence: TokenSequence, num_tokens: int) -> TokenArray:
        tokens = self._tokens(sequence)
        node, position, _ = self._walk(_namespace(sequence.extra_keys), tokens)
        if position < len(tokens):
            return np.empty(0, np.int32)
        parts = []
        start, end = position, position + num_tokens
        while node is not None and start < end:
            parts.append(node.tokens[start - node.start : end - node.start])
            start = node.end
            node = next(reversed(node.children.values()), None)
        following = np.concatenate(parts) if parts else np.empty(0, np.int32)
        numbers = np.flatnonzero(following < 0)  # media, or another salt
        return following[: numbers[0]] if len(numbers) else following

    def original_of(self, block_id: int) -> int | None:
        return self._original_of.get(block_id)

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        tokens = self._tokens(sequence)
        start, end = block * self._block_size, (block + 1) * self._block_size
        node = self._roots.get(_namespace(sequence.extra_keys))
        while node is not None and end <= len(tokens):
            # The index has the tokens before the block, so the first token of each node leads to the next node.
            ours = tokens[max(start, node.start) : min(end, node.end)]
            if not np.array_equal(node.tokens[max(0, start - node.start) : end - node.start], ours):
                return False
            if end <= node.end:
                return True
            node = node.children.get(int(tokens[node.end]))
        return False

    # ------------------------------------------------------------------ insert

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        size = self._block_size
        tokens = self._known_tokens(sequence)[: (first + len(block_ids)) * size]
        node, position = self._start(sequence, first * size)
        while position < len(tokens):
            below = node.children.get(int(tokens[position]))
            if below is None:
                break
            node = below
            shared = common_length(node.tokens, tokens[position:])
            self._add_duplicates(node, position, position + shared, first, block_ids)
            position += shared
            if shared == len(node.tokens):
                self._note_superseded(node)
            elif position < len(tokens):
                node = self._split(node, shared)
        num_known = position // size
        if num_known < first:
            self._trim(node)
            return False  # earlier blocks were forgotten while the request ran: no lookup could find these blocks
        if position < len(tokens):
            new_ids = block_ids[num_known - first :].copy()
            self._number_of[new_ids] = np.arange(num_known, num_known + len(new_ids))
            self._num_indexed += len(new_ids)
            node = self._grow(node, position, tokens[position:], new_ids)
        self._ends[sequence] = (node, node.num_cuts, len(tokens))
        return True

    def insert_each(
        self, sequences: Sequence[TokenSequence], numbers: Sequence[int], block_ids: BlockIds
    ) -> list[bool]:
        numbered = enumerate(zip(sequences, numbers, strict=True))
        return [self.insert(*item, block_ids[at : at + 1]) for at, item in numbered]

    def insert_tail(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> bool:
        start = num_tokens // self._block_size * self._block_size
        is_indexed = self._node_id_of[block_id] != NOT_INDEXED or block_id in self._original_of
        if not self.keeps_tails or start == num_tokens or is_indexed:
            return False
        tokens = self._known_tokens(sequence)[:num_tokens]
        node, position = self._start(sequence, start)
        passed: list[RadixNode] = []
        while position == node.end and position < num_tokens:
            below = node.children.get(int(tokens[position]))
            if below is None:
                break
            node = below
            position += common_length(node.tokens, tokens[position:])
            if position == node.end:
                passed.append(node)
        is_found = position == num_tokens and (self._cut_tails or (position == node.end and node.tail != NO_TAIL))
        if position < start or is_found:
            if node.parent is None:
                self._trim(node)
            return False  # the blocks before the tail were forgotten, or lookups find all tokens of the tail already
        if position < node.end:
            node = self._split(node, position - node.start)
        for above in passed if self._cut_tails else ():
            self._note_superseded(above)
        if position < num_tokens:
            above, node = node, self._make(node, position, tokens[position:].copy(), np.empty(0, np.int32))
            above.children[int(tokens[position])] = node
        node.tail = block_id
        self._tails[block_id] = node
        return True

    def _note_superseded(self, node: RadixNode) -> None:
        """Record that tokens are inserted below this node, so that its tail may be unnecessary."""
        if node.tail != NO_TAIL:
            self._superseded.append(node.tail)

    def superseded_tails(self) -> BlockIds:
        nodes = {block_id: self._tails.get(block_id) for block_id in self._superseded}
        self._superseded.clear()
        return np.array([block_id for block_id, node in nodes.items() if node is not None and node.children], np.int32)

    def tail_block_ids(self) -> BlockIds:
        return np.array(list(self._tails), np.int32)

    def _start(self, sequence: TokenSequence, position: int) -> tuple[RadixNode, int]:
        """Return the node at which to begin an insertion of a sequence's tokens from `position` on, and the node's end.

        This is the node in which the sequence's last insertion ended, if that insertion and the untrimmed node both end
        at `position`; otherwise the root. (If other sequences have made the node longer, it may end at `position`
        although the insertion did not.)
        """
        node, num_cuts, end = self._ends.get(sequence, (None, 0, 0))
        if (
            node is not None
            and node.end == end == position
            and node.num_cuts == num_cuts
            and self._nodes.get(node.node_id) is node
        ):
            return node, position
        return self._root(_namespace(sequence.extra_keys)), 0

    def _add_duplicates(self, node: RadixNode, start: int, end: int, first: int, block_ids: BlockIds) -> None:
        """Record which of `block_ids` (from number `first` on) duplicate blocks that end at `start` to `end`."""
        size = self._block_size
        for number in range(max(first, start // size), min(end // size, first + len(block_ids))):
            original = int(node.block_ids[number - node.start // size])
            block_id = int(block_ids[number - first])
            if original != block_id:
                self._duplicates.setdefault(original, []).append(block_id)
                self._original_of[block_id] = original
                self._num_indexed += 1

    # ------------------------------------------------------------------ remove

    def remove(self, block_ids: BlockIds) -> BlockIds:
        if self._tails:
            for tail in self._tails.keys() & set(block_ids.tolist()):
                ends_with_it = self._tails[tail]
                self._drop_tail(ends_with_it)
                self._trim(ends_with_it)
        if self._duplicates:
            forgotten = dict.fromkeys(block_ids.tolist())
            for block_id in block_ids.tolist():
                forgotten.update(dict.fromkeys(self._remove_one(block_id)))
        else:
            node_ids = self._node_id_of[block_ids]
            indexed = node_ids != NOT_INDEXED
            if not indexed.any():
                return block_ids
            forgotten = dict.fromkeys(block_ids.tolist())
            # Cut each node once, at the first of its blocks.
            order = np.lexsort((self._number_of[block_ids], node_ids))[np.count_nonzero(~indexed) :]
            nodes, firsts = np.unique(node_ids[order], return_index=True)
            numbers = self._number_of[block_ids[order[firsts]]]
            for node_id, number in zip(nodes.tolist(), numbers.tolist(), strict=True):
                node = self._nodes.get(node_id)
                if node is not None:  # otherwise it was removed with a node above
                    forgotten.update(dict.fromkeys(self._cut(node, number - node.start // self._block_size)))
        return block_ids if len(forgotten) == len(block_ids) else np.array(list(forgotten), np.int32)

    def _remove_one(self, block_id: int) -> list[int]:
        """Forget one block, in an index with duplicates. Returns the blocks that were forgotten with it."""
        original = self._original_of.pop(block_id, None)
        if original is not None:
            self._duplicates[original].remove(block_id)
            if not self._duplicates[original]:
                del self._duplicates[original]
            self._num_indexed -= 1
            return []
        node = self._nodes.get(int(self._node_id_of[block_id]))
        if node is None:
            return []
        at = int(self._number_of[block_id]) - node.start // self._block_size
        return [] if self._replace(node, at) else self._cut(node, at)

    def _replace(self, node: RadixNode, at: int) -> bool:
        """Let a duplicate take the place of the node's block number `at`; False if the block has no duplicate."""
        block_id = int(node.block_ids[at])
        waiting = self._duplicates.pop(block_id, None)
        if waiting is None:
            return False
        heir = waiting.pop(0)
        del self._original_of[heir]
        if waiting:
            self._duplicates[heir] = waiting
            self._original_of.update(dict.fromkeys(waiting, heir))
        node.block_ids = node.block_ids.copy()
        node.block_ids[at] = heir
        self._number_of[heir] = self._number_of[block_id]
        self._node_id_of[heir], self._node_id_of[block_id] = node.node_id, NOT_INDEXED
        self._num_indexed -= 1
        return True

    def _cut(self, node: RadixNode, at: int) -> list[int]:
        """Forget the node's blocks from number `at` on, and all nodes below. Returns the forgotten blocks."""
        forgotten: list[int] = []
        below = list(node.children.values())
        for child in below:
            below += child.children.values()
            forgotten += self._drop(child.block_ids)
            forgotten += self._drop_tail(child)
            del self._nodes[child.node_id]
        node.children = {}
        forgotten += self._drop(node.block_ids[at:])
        forgotten += self._drop_tail(node)
        node.block_ids = node.block_ids[:at]
        self._trim(node)
        return forgotten

    def _drop_tail(self, node: RadixNode) -> list[int]:
        """Forget the tail at a node's end. Returns a list of the tail's block, which is empty if there is no tail."""
        tail, node.tail = node.tail, NO_TAIL
        if tail == NO_TAIL:
            return []
        del self._tails[tail]
        return [tail]

    def _drop(self, block_ids: BlockIds) -> list[int]:
        """Forget blocks of a node and their duplicates. Returns all forgotten blocks."""
        dropped: list[int] = block_ids.tolist()
        self._node_id_of[block_ids] = NOT_INDEXED
        if self._duplicates:
            for block_id in block_ids.tolist():
                for duplicate in self._duplicates.pop(block_id, ()):
                    del self._original_of[duplicate]
                    dropped.append(duplicate)
        self._num_indexed -= len(dropped)
        return dropped

    # -------------------------------------------------------------------- keys

    def _tokens(self, sequence: TokenSequence) -> TokenArray:
        """The sequence's tokens, with numbers below 0 for spans and for the tokens at which salt and adapter begin."""
        placed = placed_stretches(sequence.extra_keys, sequence.token_ids)
        return self._spans.replace(sequence.token_ids, placed) if placed else sequence.token_ids

    def _known_tokens(self, sequence: TokenSequence) -> TokenArray:
        """Give numbers to all stretches of the sequence, then return `_tokens`.

        If there are too many numbers, first forget the numbers that no node contains.
        """
        placed = placed_stretches(sequence.extra_keys, sequence.token_ids)
        if placed and self._spans.is_full(placed):
            nodes = list(self._nodes.values())
            for node, tokens in zip(nodes, self._spans.keep(node.tokens.copy() for node in nodes), strict=True):
                node.tokens = tokens
            for node in nodes:
                node.children = {int(child.tokens[0]): child for child in node.children.values()}
        self._spans.add(placed)
        return self._tokens(sequence)

    # -------------------------------------------------------------------- view

    def top(
        self, limit: int, num_reuses: npt.NDArray[np.int64] | None, under_salt: str = ""
    ) -> list[PrefixNode] | None:
        """See `PrefixIndex.top`. Examines only children of roots and of nodes that it has examined; ignores tails."""
        nodes: list[PrefixNode] = []
        queue: list[tuple[int, int, int, int | None, str | None, RadixNode]] = []

        def push_children(node: RadixNode, node_id: int | None, salt: str | None) -> None:
            for child in islice(reversed(node.children.values()), MAX_CHILDREN):
                if len(child.block_ids) or child.children:
                    reuses = 0 if num_reuses is None else _most_reuses(child, num_reuses)
                    heapq.heappush(queue, (-reuses, -len(child.tokens), child.node_id, node_id, salt, child))

        for (_, salt, _), root in self._roots.items():
            if salt is None or salt.startswith(under_salt):
                push_children(root, None, salt)
        while queue and len(nodes) < limit:
            reuses, _, node_id, parent_id, salt, node = heapq.heappop(queue)
            tokens, begins = self._first_tokens(node)
            salt = begins or salt
            if salt is not None and not salt.startswith(under_salt):
                continue
            if salt is not None or not under_salt:
                fields = (node.start, len(node.tokens), tokens, node.block_ids.copy(), -reuses, len(node.children))
                nodes.append(PrefixNode(node_id, parent_id, salt, *fields))
            push_children(node, node_id, salt)
        return nodes

    def _first_tokens(self, node: RadixNode) -> tuple[tuple[int, ...], str | None]:
        """Return a node's first tokens, and the salt that begins at one of them; None if no salt begins there."""
        tokens, salt = [], None
        for token in node.tokens[:MAX_SHOWN_TOKENS].tolist():
            if (first := self._spans.first_token(token)) is not None:
                token = first.token_id if first.content is None else token
                salt = first.salt or salt
            tokens.append(token)
        return tuple(tokens), salt

    def block_ids(self) -> BlockIds:
        indexed = np.flatnonzero(self._node_id_of != NOT_INDEXED).astype(np.int32)
        return np.concatenate((indexed, np.array(list(self._original_of), np.int32))) if self._original_of else indexed

    # ---------------------------------------------------------------- the tree

    def _walk(self, namespace: Namespace, tokens: TokenArray) -> tuple[RadixNode | None, int, list[BlockIds]]:
        """Follow `tokens` down the tree. Returns the last node, the number of tokens matched, and the whole blocks."""
        parts: list[BlockIds] = []
        node = self._roots.get(namespace)
        position = 0
        while node is not None:
            shared = common_length(node.tokens, tokens[position:])
            position += shared
            if shared < len(node.tokens):
                parts.append(node.block_ids[: self._blocks_ending(node, position)])
                break
            parts.append(node.block_ids)
            below = node.children.get(int(tokens[position])) if position < len(tokens) else None
            if below is None:
                break
            node = below
        return node, position, parts

    def _blocks_ending(self, node: RadixNode, position: int) -> int:
        """The number of the node's blocks that end at or before `position`."""
        return position // self._block_size - node.start // self._block_size

    def _first_block_ending_after(self, node: RadixNode, position: int) -> int:
        """Return a block that holds the token before `position`; `position` lies in `node`.

        The block ends in the node or in its nearest descendant, or is a tail there. The search takes at most
        block_size steps, because a node in which no block ends lies inside one block.
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
        """Remove tokens that lead to no block, in this node and its ancestors."""
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

    def check_integrity(self) -> None:
        seen, tails = self._check_tree()
        assert tails == self._tails, "tails and nodes differ"
        assert not set(tails) & (set(seen) | set(self._original_of)), "a tail is also a full block"
        waiting = {duplicate: block for block, copies in self._duplicates.items() for duplicate in copies}
        assert waiting == self._original_of, "duplicates and originals differ"
        assert set(self._original_of.values()) <= set(seen), "a duplicate waits for no block"
        assert not set(waiting) & set(seen), "a duplicate stands in the tree"
        assert self._num_indexed == len(seen) + len(waiting), "the index miscounts itself"

    def check_table(self, sequence: TokenSequence, block_ids: BlockIds) -> None:
        matched_ids = self.match(sequence).block_ids.tolist()
        for number, block_id in enumerate(block_ids.tolist()):
            assert block_id not in self._tails, f"block {block_id} is a tail, but somebody holds it"
            original = self._original_of.get(block_id, block_id)
            assert self._node_id_of[original] == NOT_INDEXED or original in matched_ids[number : number + 1], (
                f"block {block_id} is indexed as something else than its holder's block number {number}"
            )


def make_index(name: Literal["radix", "hash"], num_blocks: int, block_size: int) -> PrefixIndex:
    """Make the index with this name."""
    return RadixIndex(num_blocks, block_size) if name == "radix" else HashIndex(num_blocks)


def _namespace(keys: ExtraKeys) -> Namespace:
    adapter, salt = None if keys.adapter_offset else keys.adapter, None if keys.salt_offset else keys.salt
    return (adapter, salt, keys.embeddings_hash)


def _most_reuses(node: RadixNode, num_reuses: npt.NDArray[np.int64]) -> int:
    """The reuses of the node's most reused block or, if no block ends in the node, of the blocks right below."""
    if len(node.block_ids):
        return int(num_reuses[node.block_ids].max())
    below = islice(reversed(node.children.values()), MAX_CHILDREN)
    return max((_most_reuses(child, num_reuses) for child in below), default=0)
