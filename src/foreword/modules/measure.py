"""`foreword pml measure --model M`: what linking costs in right answers with one model.

Knows the terminal, tasks and files; `agreement.py` asks. Each question goes to `all`, which is the plain prompt bit for
bit, and to each method, greedy. With `--gaps` all are asked again with gaps between positions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foreword import __version__
from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking.measured import EXACT, MeasuredLinks, Rightness
from foreword.llm import LLM
from foreword.modules.agreement import Arm, Tally, tally
from foreword.modules.options import add_engine_flags, check_model
from foreword.modules.questions import TASK_NAMES, Asked, Questions
from foreword.request import SamplingParams

MEANT_FOR = ("independent", "parameters", "order")
"""The tasks that linking is meant for: no line of a part needs another part to be read. A saved file counts these."""
MEASURED_METHODS = ("none", "first-16", "all")
LEAST_PROMPTS = 100
"""Fewest prompts of a saved file. If none of them is lost or gained, a loss of 2.7% or less cannot be told apart."""
LEAST_RIGHT = 0.2
"""Share of the prompts that `all` must answer rightly: a method cannot lose what `all` does not have."""
TASK_TOKENS, USERS_TOKENS = 16, 64
USERS = "prompts"
"""The name of the cell of a user's own prompts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Questions of one kind and size."""

    task: str
    num_tokens: int | None = None
    """About how long its documents are, in tokens of the embedded tokenizer."""
    num_parts: int | None = None
    has_gaps: bool = False
    """Whether its prompts have gaps between positions."""

    @property
    def title(self) -> str:
        size = "" if self.num_tokens is None else f" {self.num_tokens}x{self.num_parts}"
        return f"{self.task}{size}{' gaps' if self.has_gaps else ''}"

    def fails(self, tallies: Mapping[str, Tally]) -> bool:
        """Whether `all` itself has too few right answers to compare with; `leak` has none to have."""
        own = next(iter(tallies.values()))
        return self.task != "leak" and own.num_plain_right < LEAST_RIGHT * own.num_with_answer

    @property
    def counts(self) -> bool:
        """Whether a saved file counts it."""
        return self.task in (*MEANT_FOR, USERS)


Found = dict[Cell, dict[str, Tally]]
"""Tallies by cell and method."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `foreword pml measure`."""
    listed: dict[str, Any] = {"type": _names, "metavar": "LIST"}
    parser.add_argument(
        "--methods", default=MEASURED_METHODS, help=f"methods (default: {','.join(MEASURED_METHODS)})", **listed
    )
    parser.add_argument(
        "--tasks",
        default=MEANT_FOR,
        help=f"of {', '.join(TASK_NAMES)} (default: {','.join(MEANT_FOR)})",
        **listed,
    )
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="questions of a cell (default: 100)")
    parser.add_argument("--contexts", default=("512",), help="tokens of the documents (default: 512)", **listed)
    parser.add_argument("--parts", default=("4",), help="numbers of documents (default: 4)", **listed)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="your prompts instead of tasks: JSON lines")
    parser.add_argument(
        "--gaps",
        action="store_true",
        help="ask all with gaps between positions, too, as a schema makes them of which a prompt leaves out half",
    )
    parser.add_argument("--plain", action="store_true", help="prompts without the model's chat template")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens of an answer (default: {TASK_TOKENS}, with --prompts {USERS_TOKENS})",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the agreements, for `serve`")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    add_engine_flags(parser, "--model MODEL")


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run with parsed arguments; `options` are those of the engine."""
    check_model(options)
    arms, cells, seed = _arms(args.methods), _cells(args), int(options.get("seed") or 0)
    if args.save is not None:
        _check_save(args, cells)
    console = Console(stderr=True)
    with LLM(**{**options, "allow_links": True}) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"--model {options['model']!r} has no tokenizer; measure a model that has one")
        questions = Questions(llm.tokenizer, plain=args.plain)
        found: Found = {}
        users = None if args.prompts is None else questions.read_file(args.prompts)
        if users is not None and args.save is not None:
            _check_number(sum(one.answer is not None for one in users), 'with an "answer" in a file of yours')
        for cell in cells:
            with console.status(cell.title):
                prompts = users or _drawn(questions, cell, args.questions, seed)
                placed = (one.with_gaps() for one in prompts) if cell.has_gaps else prompts
                found[cell] = tally(llm, placed, arms, _params(args, questions))
        model_id = llm.cache_identity.model_id
    failing = [cell for cell in cells if cell.fails(found[cell])]
    failed = [_failure(cell, found.pop(cell)) for cell in failing]
    report = {"model_name": options["model"], "foreword": __version__, "seed": seed, "plain": args.plain}
    report["cells"] = [_as_json(cell, tallies) for cell, tallies in found.items()]
    if args.json and found:
        print(json.dumps({"model_id": model_id, **report}))
    elif found:
        print_table(found, Console())
    is_saved = args.save is not None and not any(cell.counts for cell in failing)
    if is_saved:
        _saved(found, model_id, report).write(args.save.expanduser())
    if failed:
        raise ConfigError(
            f"`all`, the plain prompt, is right in {'; '.join(failed)}, less than {LEAST_RIGHT:.0%}: nothing shows "
            "what a method loses; ask what the model can answer: other --tasks, shorter --contexts, fewer --parts, "
            f"more --max-tokens, or your own --prompts{f'; {str(args.save)!r} is written without it' * is_saved}"
        )
    return 0


def _failure(cell: Cell, tallies: Mapping[str, Tally]) -> str:
    own = next(iter(tallies.values()))
    return f"{own.num_plain_right} of {own.num_with_answer} prompts of {cell.title}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _arms(names: Sequence[str]) -> list[Arm]:
    try:
        found = [Arm.of(name) for name in names]
    except InvalidRequestError as error:
        raise ConfigError(f"--methods: {error}") from error
    if not found:
        raise ConfigError(f"--methods is empty; name methods such as {','.join(MEASURED_METHODS)}")
    return found


def _cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that are asked for. Raises ConfigError for values that cannot be drawn."""
    for name in ("questions", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is too small; give 1 or more")
    with_gaps = (False, True) if args.gaps else (False,)
    if args.prompts is not None:
        return [Cell(USERS, has_gaps=has_gaps) for has_gaps in with_gaps]
    for task in args.tasks:
        if task not in TASK_NAMES:
            raise ConfigError(f"--tasks: {task!r} is no task; choose from {', '.join(TASK_NAMES)}")
    sizes = [_numbers(name, getattr(args, name)) for name in ("contexts", "parts")]
    if not args.tasks or not all(sizes):
        raise ConfigError("--tasks, --contexts and --parts need one value each, at least")
    return [Cell(*one) for one in product(args.tasks, *sizes, with_gaps)]


def _numbers(name: str, given: Sequence[str]) -> list[int]:
    for text in given:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) < 10**8:
            raise ConfigError(f"--{name}: {text!r} is no number of 1 or more; give numbers such as 512,1024")
    return [int(text) for text in given]


def _check_save(args: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Refuse before anything runs what could not be saved after it."""
    path = args.save.expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--save {str(args.save)!r} cannot be written; name a file in a folder that exists")
    if set(args.methods) <= {EXACT} and not args.gaps:
        raise ConfigError(
            f"--save needs a method beside {EXACT!r}, which needs no measurement without --gaps; give --methods "
            "first-16"
        )
    if args.prompts is None:
        counted = sum(cell.counts and not cell.has_gaps for cell in cells)
        _check_number(args.questions * counted, f"of {', '.join(MEANT_FOR)}")


def _check_number(num_prompts: int, which: str) -> None:
    if num_prompts < LEAST_PROMPTS:
        raise ConfigError(
            f"--save needs {LEAST_PROMPTS} prompts or more {which}, and there are {num_prompts}; ask for more "
            "--questions, give more --prompts, or leave --save out"
        )


def _drawn(questions: Questions, cell: Cell, number: int, seed: int) -> Iterator[Asked]:
    assert cell.num_tokens is not None
    assert cell.num_parts is not None
    rng = Random(f"{seed} {cell.task} {cell.num_tokens} {cell.num_parts}")
    try:
        for _ in range(number):
            yield questions.draw(rng, cell.task, cell.num_tokens, cell.num_parts)
    except ValueError as error:
        raise ConfigError(f"--contexts, --parts: {error}") from error


def _params(args: argparse.Namespace, questions: Questions) -> SamplingParams:
    """Greedy. A model without a chat template does not end after an answer, so the line's end does."""
    of_tasks = args.prompts is None
    most = args.max_tokens or (TASK_TOKENS if of_tasks else USERS_TOKENS)
    return SamplingParams(max_tokens=most, temperature=0.0, stop=("\n",) if of_tasks and questions.is_plain else ())


def _as_json(cell: Cell, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    methods = {name: own.as_json() for name, own in tallies.items()}
    size = {"context": cell.num_tokens, "parts": cell.num_parts}
    return {"task": cell.task, **size, "gaps": cell.has_gaps, "methods": methods}


def _saved(found: Found, model_id: str, report: dict[str, Any]) -> MeasuredLinks:
    """Right answers over the prompts of the cells that count, with gaps and without. Raises ConfigError."""
    dense = _totals({cell: own for cell, own in found.items() if not cell.has_gaps})
    return MeasuredLinks(model_id, dense, _totals({cell: own for cell, own in found.items() if cell.has_gaps}), report)


def _totals(found: Found) -> dict[str, Rightness]:
    """Right answers over the prompts of the cells that count, together, of which a method linked anything.

    Raises ConfigError if there are too few: that says nothing about linking.
    """
    totals: dict[str, Tally] = {}
    for cell, tallies in found.items():
        for name, own in tallies.items() if cell.counts else ():
            if name != EXACT or cell.has_gaps:
                totals[name] = totals.get(name, Tally()) + own
    for name, own in totals.items():
        if own.num_linked < LEAST_PROMPTS:
            raise ConfigError(
                f"--save needs {LEAST_PROMPTS} prompts of which a method links anything, and {name!r} linked in "
                f"{own.num_linked} of {own.num_asked}; leave it out of --methods, or give more or longer documents"
            )
    return {name: own.beside_all(own.num_linked) for name, own in totals.items()}


def print_table(found: Mapping[Cell, Mapping[str, Tally]], console: Console) -> None:
    """One row for each cell and method."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("task", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("asked", "right\n%", "beside all:\npoints, 95%", "same\ntext", "com-\nputed", "first\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, tallies in found.items():
        for number, (name, own) in enumerate(tallies.items()):
            told = own.as_json()
            right, beside = told["right"], "-"
            if right is not None:
                low, high = told["difference_interval"]
                beside = f"{told['difference']:+.0f} ({low:+.0f}..{high:+.0f})"
            table.add_row(
                "" if number else cell.title,
                name,
                f"{told['prompts']:,}",
                "-" if right is None else f"{right:.0f}",
                beside,
                f"{told['agreement']:.0f}%",
                f"{told['computed_share']:.0%}",
                f"{told['ttft_ms']:,.0f}",
            )
        table.add_section()
    console.print(table)
