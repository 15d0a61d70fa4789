"""`foreword pml measure --model M`: measures how many right answers linking loses with one model.

Each question is asked with the method `all`, which is the plain prompt bit for bit, and with each other method. Answers
are greedy. With `--gaps`, all questions are asked again with gaps between positions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from foreword import LLM, __version__
from foreword.config import user_path
from foreword.errors import ConfigError, InvalidRequestError
from foreword.linking import EXACT, MeasuredLinks, Method, Rightness, Z
from foreword.modules.questions import EDIT, EDIT_LEAK, TASK_NAMES, Asked, Questions
from foreword.modules.run import add_engine_flags, check_model
from foreword.pml.composition import Composition
from foreword.pml.library import SchemaPrompt
from foreword.request import RequestOutput, SamplingParams

_COMPUTE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
Interval = tuple[float, float]
MEANT_FOR = ("independent", "parameters", "order")
"""The tasks for which linking is meant: each line of a part is understood without other parts. A saved file counts
these tasks."""
MEASURED_METHODS = ("none", "first-16", "all")
LEAST_PROMPTS = 100
"""The fewest prompts of a saved file. If no answer among 100 is lost or gained, the loss may still be up to 2.7%."""
LEAST_RIGHT = 0.2
"""The least share of prompts that `all` must answer rightly. With fewer, a comparison says little: a method cannot lose
answers that `all` has wrong."""
TASK_TOKENS, USERS_TOKENS = 16, 64
USERS = "prompts"
"""The name of the cell of a user's own prompts."""


@dataclass(frozen=True)
class Arm:
    """One way to answer a prompt."""

    name: str
    method: Method
    salt: str | None = None
    """A separate cache namespace, for an arm whose cached bits differ from other arms', or whose times count."""
    changed: Callable[[LLM], AbstractContextManager[None]] = lambda llm: nullcontext()
    """A context that changes the model while the arm answers, for a negative control."""

    @classmethod
    def of(cls, name: str) -> Arm:
        """Make the arm of a method by its name. Raises InvalidRequestError for an unknown method."""
        return cls(name, Method.parse(name))


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer to one prompt."""

    output: RequestOutput
    first_token_ms: float
    """Milliseconds from the call to the first token; the choice of the parts to link takes some of this time."""


@dataclass
class Tally:
    """Counts of one arm's answers to the prompts of one cell."""

    num_asked: int = 0
    num_with_answer: int = 0
    """Prompts whose right answer is known."""
    num_right: int = 0
    num_plain_right: int = 0
    """The number of prompts that `all` without gaps answers rightly."""
    num_lost: int = 0
    """The number of prompts that `all` without gaps answers rightly, and this arm wrongly."""
    num_gained: int = 0
    """The number of prompts that this arm answers rightly, and `all` without gaps wrongly."""
    num_agreeing: int = 0
    num_linked: int = 0
    """Prompts with a known answer that were not computed exactly: tokens were linked, or positions have gaps. The other
    prompts say nothing about the method, and count neither as lost nor as gained."""
    shares: list[float] = field(default_factory=list)
    """For each prompt, the share of its tokens that were neither linked nor part of its exact beginning."""
    times_ms: list[float] = field(default_factory=list)
    """For each prompt, the milliseconds to the first token."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(Tally)})

    def add(self, prompt: Asked, answer: Answer, plain: Answer, num_exact: int) -> None:
        """Count one answer; `plain` is the answer of `all` without gaps."""
        output = answer.output
        assert output.link is not None
        completion, expected = output.outputs[0], plain.output.outputs[0]
        num_tokens = len(output.prompt_token_ids)
        is_right, was_right = prompt.is_right(completion.text), prompt.is_right(expected.text)
        self.num_asked += 1
        self.num_with_answer += prompt.answer is not None
        self.num_right += is_right
        self.num_plain_right += was_right
        self.num_lost += was_right and not is_right
        self.num_gained += is_right and not was_right
        self.num_agreeing += list(completion.token_ids) == list(expected.token_ids)
        self.num_linked += prompt.answer is not None and not output.link.exact
        self.shares.append((num_tokens - num_exact - output.link.linked_tokens) / num_tokens)
        self.times_ms.append(answer.first_token_ms)

    def beside_all(self, num_prompts: int) -> Rightness:
        """The answers that this arm loses and gains, compared with `all` without gaps; `num_prompts`: the number of
        compared prompts.
        """
        return Rightness(num_prompts, self.num_lost, self.num_gained)

    def as_json(self) -> dict[str, Any]:
        """The percentages of right and of agreeing answers with their 95% intervals, the mean share of computed tokens,
        and the median time to the first token.
        """
        num_asked = self.num_with_answer
        facts: dict[str, Any] = {"prompts": self.num_asked, "linked_prompts": self.num_linked, "right": None}
        if num_asked:
            beside = self.beside_all(num_asked)
            low, high = (round(-100 * bound, 1) for bound in reversed(beside.loss_interval))
            facts |= {
                "right": round(100 * self.num_right / num_asked, 1),
                "interval": wilson(self.num_right, num_asked),
                "lost": self.num_lost,
                "gained": self.num_gained,
                "difference": round(-100 * beside.loss, 1) + 0.0,  # never -0.0
                "difference_interval": (low, high),
                "p": round(beside.p_value, 4),
            }
        return {
            **facts,
            "agreement": round(100 * self.num_agreeing / self.num_asked, 1),
            "agreement_interval": wilson(self.num_agreeing, self.num_asked),
            "computed_share": round(statistics.fmean(self.shares), 3),
            "ttft_ms": round(statistics.median(self.times_ms), 2),
        }


def wilson(right: int, count: int) -> Interval:
    """The 95% interval of a share, in percent (Wilson, 1927)."""
    z, share = Z, right / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = (100 * (middle + sign * half) / (1 + z * z / count) for sign in (-1, 1))
    return round(max(0.0, low), 1), round(min(100.0, high), 1)


def tally(
    llm: LLM, prompts: Iterable[Asked], arms: Sequence[Arm], params: SamplingParams, *, at_once: int = 1
) -> dict[str, Tally]:
    """Ask all prompts with `all`, without gaps between positions, and with each arm. Returns counts by the arms' names.

    `at_once` prompts run together, which is faster. Times are meaningful only if `at_once` is 1. Then each arm has a
    namespace of its own: otherwise a method would find tokens in the cache that another method has computed.
    """
    if at_once == 1:
        arms = [replace(arm, salt=arm.salt or arm.name) for arm in arms]
    tallies = {arm.name: Tally() for arm in arms}
    waiting = iter(prompts)
    while several := list(islice(waiting, at_once)):
        _compute_sources(llm, several, None)
        dense = [replace(prompt, composition=prompt.dense or prompt.composition) for prompt in several]
        plain = _answers(llm, dense, Arm.of(EXACT), params)
        for arm in arms:
            answers = _linked_answers(llm, several, arm, params, plain)
            for prompt, answer, expected in zip(several, answers, plain, strict=True):
                tallies[arm.name].add(prompt, answer, expected, _exact_tokens(llm, prompt))
    return tallies


def _linked_answers(
    llm: LLM, several: Sequence[Asked], arm: Arm, params: SamplingParams, plain: Sequence[Answer]
) -> list[Answer]:
    """Answer with a method. The answer is copied from `plain` if the method links no token of the prompt and the prompt
    has no gaps: both have the same bits.
    """
    differs = [prompt.composition.has_gaps or _links_any(prompt.composition, arm.method) for prompt in several]
    linked = [prompt for prompt, may_differ in zip(several, differs, strict=True) if may_differ]
    if arm.salt is not None:
        _compute_sources(llm, linked, arm.salt)
    with arm.changed(llm):
        answers = iter(_answers(llm, linked, arm, params))
    return [next(answers) if may_differ else answer for may_differ, answer in zip(differs, plain, strict=True)]


def _answers(llm: LLM, several: Sequence[Asked], arm: Arm, params: SamplingParams) -> list[Answer]:
    inputs = [{"prompt": SchemaPrompt(prompt.composition, "", ()), "cache_salt": arm.salt} for prompt in several]
    started = time.monotonic()
    outputs = llm.generate(inputs, params, link=arm.method, show_progress=False)
    return [Answer(output, 1e3 * ((output.metrics.first_token_time or started) - started)) for output in outputs]


def _links_any(composition: Composition, method: Method) -> bool:
    return any(
        part.span is not None
        and begin + len(part.token_ids) > composition.num_exact_tokens
        and method.num_computed(part) < len(part.token_ids)
        for part, begin in zip(composition.parts, composition.begins, strict=False)
    )


def _exact_tokens(llm: LLM, prompt: Asked) -> int:
    """The number of leading tokens that every method finds as a cached prefix once the sources are computed."""
    block_size = llm.layout.block_size
    return prompt.composition.num_exact_tokens // block_size * block_size


def _compute_sources(llm: LLM, several: Sequence[Asked], salt: str | None) -> None:
    """Compute the sources, so that they do not add to the time of an arm."""
    sources = [source for prompt in several for source in (*prompt.composition.sources, *prompt.hidden)]
    prompts = [{"prompt_token_ids": source.token_ids, "cache_salt": salt} for source in dict.fromkeys(sources)]
    llm.generate(prompts, _COMPUTE, show_progress=False)


@dataclass(frozen=True, slots=True)
class Cell:
    """Questions of one kind and size."""

    task: str
    num_tokens: int | None = None
    """Approximate length of a prompt's documents, in tokens of the embedded tokenizer; None: users' prompts."""
    num_parts: int | None = None
    has_gaps: bool = False
    """Whether the prompts have gaps between positions."""

    @property
    def title(self) -> str:
        size = "" if self.num_tokens is None else f" {self.num_tokens}x{self.num_parts}"
        return f"{self.task}{size}{' gaps' if self.has_gaps else ''}"

    def fails(self, tallies: Mapping[str, Tally]) -> bool:
        """Whether `all` has too few right answers for a comparison. Leak tasks never fail: no answer is right there."""
        of_all = next(iter(tallies.values()))
        return self.task not in ("leak", EDIT_LEAK) and of_all.num_plain_right < LEAST_RIGHT * of_all.num_with_answer

    @property
    def counts(self) -> bool:
        """Whether a saved file counts the cell among prompts that consist of parts."""
        return self.task in (*MEANT_FOR, USERS)

    @property
    def is_edit(self) -> bool:
        """Whether a saved file counts the cell among edits of chats. Cells with gaps do not count, because such edits
        leave no gaps.
        """
        return self.task == EDIT and not self.has_gaps


Found = dict[Cell, dict[str, Tally]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword pml measure`."""
    listed: dict[str, Any] = {"type": _names, "metavar": "LIST"}
    parser.add_argument(
        "--methods",
        default=MEASURED_METHODS,
        help=f"methods of linking (default: {','.join(MEASURED_METHODS)})",
        **listed,
    )
    parser.add_argument(
        "--tasks",
        default=MEANT_FOR,
        help=f"kinds of questions, of {', '.join(TASK_NAMES)} (default: {','.join(MEANT_FOR)})",
        **listed,
    )
    parser.add_argument("--questions", type=int, default=100, metavar="N", help="questions of each size (default: 100)")
    parser.add_argument(
        "--contexts", default=("512",), help="tokens of all documents, such as 512,1024 (default: 512)", **listed
    )
    parser.add_argument("--parts", default=("4",), help="numbers of documents, such as 2,4 (default: 4)", **listed)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="your own prompts instead of tasks, in JSON lines")
    parser.add_argument(
        "--gaps",
        action="store_true",
        help="ask all a second time with gaps between positions, as if half of a schema's modules were left out",
    )
    parser.add_argument("--plain", action="store_true", help="leave out the model's chat template")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens of an answer (default: {TASK_TOKENS}, with --prompts {USERS_TOKENS})",
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the counts for `serve --link-measurements`")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    add_engine_flags(parser, "--model MODEL")


def run(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Run the command with its parsed arguments. `options`: the options of the engine."""
    check_model(options)
    arms, cells, seed = _arms(args.methods), _cells(args), int(options.get("seed") or 0)
    if args.save is not None:
        _check_save(args, cells)
    console = Console(stderr=True)
    with LLM(**{**options, "allow_links": True}) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"--model {options['model']!r} has no tokenizer; measure a model that has one")
        questions = Questions(llm.tokenizer, plain=args.plain)
        tallies_of: Found = {}
        users = None if args.prompts is None else questions.read_file(args.prompts)
        if users is not None and args.save is not None:
            _check_number(sum(prompt.answer is not None for prompt in users), 'with an "answer" in a file of yours')
        for cell in cells:
            with console.status(cell.title):
                prompts = users or _drawn(questions, cell, args.questions, seed)
                placed = (prompt.with_gaps() for prompt in prompts) if cell.has_gaps else prompts
                tallies_of[cell] = tally(llm, placed, arms, _params(args, questions))
        model_id = llm.cache_identity.model_id
    failing = [cell for cell in cells if cell.fails(tallies_of[cell])]
    failed = [_failure(cell, tallies_of.pop(cell)) for cell in failing]
    report = {"model_name": options["model"], "foreword": __version__, "seed": seed, "plain": args.plain}
    report["cells"] = [_as_json(cell, tallies) for cell, tallies in tallies_of.items()]
    if args.json and tallies_of:
        print(json.dumps({"model_id": model_id, **report}))
    elif tallies_of:
        print_table(tallies_of, Console())
    is_saved = args.save is not None and not any(cell.counts or cell.is_edit for cell in failing)
    if is_saved:
        _saved(tallies_of, model_id, report).write(user_path(args.save))
    if failed:
        raise ConfigError(
            f"`all`, the plain prompt, is right in {'; '.join(failed)}, less than {LEAST_RIGHT:.0%}: nothing shows "
            "what a method loses; ask what the model can answer: other --tasks, shorter --contexts, fewer --parts, "
            f"more --max-tokens, or your own --prompts{f'; {str(args.save)!r} is written without it' * is_saved}"
        )
    return 0


def _failure(cell: Cell, tallies: Mapping[str, Tally]) -> str:
    of_all = next(iter(tallies.values()))
    return f"{of_all.num_plain_right} of {of_all.num_with_answer} prompts of {cell.title}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _arms(names: Sequence[str]) -> list[Arm]:
    try:
        arms = [Arm.of(name) for name in names]
    except InvalidRequestError as error:
        raise ConfigError(f"--methods: {error}") from error
    if not arms:
        raise ConfigError(f"--methods is empty; name methods such as {','.join(MEASURED_METHODS)}")
    return arms


def _cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments ask for. Raises ConfigError for values from which no cases can be drawn."""
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
    return [Cell(*values) for values in product(args.tasks, *sizes, with_gaps)]


def _numbers(name: str, texts: Sequence[str]) -> list[int]:
    for text in texts:
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) < 10**8:
            raise ConfigError(f"--{name}: {text!r} is no number of 1 or more; give numbers such as 512,1024")
    return [int(text) for text in texts]


def _check_save(args: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Raise ConfigError before anything runs if the results could not be saved."""
    path = user_path(args.save)
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
        if edits := sum(cell.is_edit for cell in cells):
            _check_number(args.questions * edits, f"of {EDIT}")


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
    """Greedy parameters. Without a chat template, a model goes on after an answer, so the end of a line stops it."""
    of_tasks = args.prompts is None
    limit = args.max_tokens or (TASK_TOKENS if of_tasks else USERS_TOKENS)
    return SamplingParams(max_tokens=limit, temperature=0.0, stop=("\n",) if of_tasks and questions.is_plain else ())


def _as_json(cell: Cell, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    methods = {name: counts.as_json() for name, counts in tallies.items()}
    size = {"context": cell.num_tokens, "parts": cell.num_parts}
    return {"task": cell.task, **size, "gaps": cell.has_gaps, "methods": methods}


def _saved(tallies_of: Found, model_id: str, report: dict[str, Any]) -> MeasuredLinks:
    """For a saved file, sum up the counted cells without gaps, those with gaps, and edits. Raises ConfigError."""
    counted = {cell: tallies for cell, tallies in tallies_of.items() if cell.counts}
    dense = _totals({cell: tallies for cell, tallies in counted.items() if not cell.has_gaps})
    with_gaps = _totals({cell: tallies for cell, tallies in counted.items() if cell.has_gaps})
    edits = _totals({cell: tallies for cell, tallies in tallies_of.items() if cell.is_edit})
    return MeasuredLinks(model_id, dense, with_gaps, report, edits)


def _totals(tallies_of: Found) -> dict[str, Rightness]:
    """For each method, lost and gained answers over all prompts of these cells in which the method linked tokens.

    Raises ConfigError if a method linked tokens in fewer than `LEAST_PROMPTS` prompts, which show too little.
    """
    totals: dict[str, Tally] = {}
    for cell, tallies in tallies_of.items():
        for name, counts in tallies.items():
            if name != EXACT or cell.has_gaps:
                totals[name] = totals.get(name, Tally()) + counts
    for name, counts in totals.items():
        if counts.num_linked < LEAST_PROMPTS:
            raise ConfigError(
                f"--save needs {LEAST_PROMPTS} prompts of which a method links anything, and {name!r} linked in "
                f"{counts.num_linked} of {counts.num_asked}; omit it from --methods, or give more or longer documents"
            )
    return {name: counts.beside_all(counts.num_linked) for name, counts in totals.items()}


def print_table(tallies_of: Mapping[Cell, Mapping[str, Tally]], console: Console) -> None:
    """Print a table with one row for each cell and method."""
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("task", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("asked", "right\n%", "beside all:\npoints, 95%", "same\ntext", "com-\nputed", "first\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, tallies in tallies_of.items():
        for number, (name, counts) in enumerate(tallies.items()):
            facts = counts.as_json()
            right, beside = facts["right"], "-"
            if right is not None:
                low, high = facts["difference_interval"]
                beside = f"{facts['difference']:+.0f} ({low:+.0f}..{high:+.0f})"
            table.add_row(
                "" if number else cell.title,
                name,
                f"{facts['prompts']:,}",
                "-" if right is None else f"{right:.0f}",
                beside,
                f"{facts['agreement']:.0f}%",
                f"{facts['computed_share']:.0%}",
                f"{facts['ttft_ms']:,.0f}",
            )
        table.add_section()
    console.print(table)
