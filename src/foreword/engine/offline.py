"""Offline: computes many prompts together, in an order in which each reuses as many cached blocks of the others as
possible.

The prompts make a tree of shared beginnings. Depth-first, each shared beginning is computed once if the pool holds the
longest path of the tree, whatever the order of arrival (Zheng et al., "SGLang", 2024, theorem 3.1). The answers do not
depend on the order: each prompt has the seed of its place in the caller's list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foreword.cache import ExtraKeys, common_length
from foreword.engine.engine import Engine
from foreword.engine.prompt import Prompt
from foreword.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def run_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    block_size: int,
    next_id: Callable[[], str],
    *,
    show_progress: bool = False,
) -> list[RequestOutput]:
    """Continue prompts; the results are in the callers' order. An error or an interrupt aborts all requests."""
    seeds = engine.next_seeds(len(prompts))
    ids = [next_id() for _ in prompts]
    outputs: dict[int, RequestOutput] = {}
    try:
        for number in depth_first(prompts, block_size, engine.num_cached_tokens):
            sampling = params[number]
            sampling = replace(sampling, seed=seeds[number]) if sampling.seed is None else sampling
            outputs[number] = engine.add_request(ids[number], prompts[number], sampling)
        _step_until_done(engine, list(outputs.values()), show_progress)
    except BaseException:
        for output in outputs.values():
            engine.abort_request(output.request_id)
        raise
    return [outputs[number] for number in range(len(prompts))]


def _step_until_done(engine: Engine, outputs: Sequence[RequestOutput], show_progress: bool) -> None:
    with progress_bar() if show_progress else nullcontext() as bar:
        task = bar.add_task("prompts", total=len(outputs)) if bar else None
        while not all(output.finished for output in outputs):
            moved = engine.step()
            if bar is not None and task is not None:
                bar.advance(task, sum(output.finished for output in moved))


def progress_bar(console: Console | None = None) -> Progress:
    """A bar that counts requests, on standard error unless a console is given."""
    from rich import console as consoles
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console or consoles.Console(stderr=True), transient=True)


# ---------------------------------------------------------------------- order


def depth_first(prompts: Sequence[Prompt], block_size: int, num_cached: Callable[[Prompt], int]) -> list[int]:
    """The numbers of the prompts, depth-first over their tree of shared blocks.

    Of the root's subtrees, those with more cached tokens come first. In all else, the order of arrival decides. Prompts
    with different extra keys or priorities share nothing. O(tokens + n log n).
    """
    if len(prompts) < 2:
        return [*range(len(prompts))]
    groups: dict[tuple[int, ExtraKeys], list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault((prompt.priority, prompt.extra_keys), []).append(number)
    trees = [_tree(prompts, numbers, block_size) for numbers in groups.values()]
    cached_counts = {id(child): num_cached(prompts[child.first]) for tree in trees for child in tree.children}
    children = [child for tree in trees for child in tree.children]
    children.sort(key=lambda child: (-cached_counts[id(child)], child.first))
    return [number for child in children for number in child.numbers()]


@dataclass(slots=True)
class _Node:
    """Prompts that share their first `depth` tokens."""

    depth: int
    first: int = -1
    """The least number of the node's prompts. Prompts are numbered in the order of arrival."""
    ending: list[int] = field(default_factory=list)
    """The numbers of the prompts that end at this node."""
    children: list[_Node] = field(default_factory=list)

    def numbers(self) -> Iterator[int]:
        """The numbers of its prompts, depth-first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield from node.ending
            waiting.extend(sorted(node.children, key=lambda child: child.first, reverse=True))


def _tree(prompts: Sequence[Prompt], numbers: Sequence[int], block_size: int) -> _Node:
    """Build the tree of the whole blocks that prompts share. Every prompt, even an equal one, ends in its own node."""
    ordered = sorted(numbers, key=lambda number: (prompts[number].token_ids.astype(">u4").tobytes(), number))
    root = _Node(0)
    path = [root]
    before = None
    for number in ordered:
        tokens = prompts[number].token_ids
        shared = 0 if before is None else common_length(before, tokens) // block_size * block_size
        before = tokens
        while path[-1].depth > shared:
            path.pop()
        if path[-1].depth < shared:
            path[-1].children.append(_Node(shared, children=[path[-1].children.pop()]))
            path.append(path[-1].children[-1])
        leaf = _Node(max(shared + 1, len(tokens)), ending=[number])
        path[-1].children.append(leaf)
        path.append(leaf)
    _note_first(root)
    return root


def _note_first(root: _Node) -> None:
    """Set the first prompt of each node."""
    waiting, seen = [root], []
    while waiting:
        node = waiting.pop()
        seen.append(node)
        waiting += node.children
    for node in reversed(seen):
        node.first = min([*node.ending, *(child.first for child in node.children)], default=-1)
