"""Offline: many prompts at once, in the order in which they reuse most of each other.

The prompts make a tree of shared beginnings. Depth-first, each shared beginning is computed once if the pool holds the
longest path of the tree, whatever the order of arrival (Zheng et al., "SGLang", 2024, theorem 3.1). The answers do not
depend on the order: each prompt keeps the seed of its own place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from foreword.cache import ExtraKeys
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

    Subtrees of the root with more cached tokens come first; otherwise the order of arrival decides. Prompts with
    different extra keys or priorities share nothing.
    """
    if len(prompts) < 2:
        return [*range(len(prompts))]
    roots: dict[tuple[int, ExtraKeys], int] = {}
    first_with: dict[tuple[int, int, bytes], int] = {}
    """The first prompt with a beginning -> the next block's number and tokens -> the first prompt with these, too."""
    paths = []
    for number, prompt in enumerate(prompts):
        data, size, path = prompt.token_ids.tobytes(), block_size * prompt.token_ids.itemsize, list[int]()
        first = roots.setdefault((prompt.priority, prompt.extra_keys), number)
        for at in range(0, len(data) - size + 1, size):
            first = first_with.setdefault((first, at, data[at : at + size]), number)
            path.append(first)
        paths.append([*path, number])  # a prompt, even an equal one, ends in a place of its own
    cached = {first: num_cached(prompts[first]) for first in {path[0] for path in paths}}
    return sorted(range(len(prompts)), key=lambda number: (-cached[paths[number][0]], paths[number]))
