"""`foreword bench trace`: runs recorded traffic, and compares the reuse with the reuse that the recording allows.

Mooncake publishes such recordings, and `serve --record` writes them. A recording names the content of every block by an
id. So the reuse that a recording allows can be computed from ids alone, and compared with the engine's count. A
recording is scaled down for a small machine: blocks of 512 tokens become blocks of 16 tokens, and lengths shrink by the
same factor, so requests share the same parts. Blocks of 16 tokens stay as they are:

    recorded   |-- id 0: 512 tokens --|-- id 7: 512 tokens --|- id 9: 102 -|    input_length 1126
    scaled     |-- id 0:  16 tokens --|-- id 7:  16 tokens --|- id 9:   4 -|    36 prompt tokens

If a recorded request has no id for its partial last block, this block gets a new id, which no other request has.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from foreword.config.flags import Flags
from foreword.config.option import options_of
from foreword.errors import ConfigError, PromptTooLongError, RequestTooLargeError, TraceError
from foreword.replay.lines import parse_json_line, parse_mooncake_record

if TYPE_CHECKING:
    from foreword import LLM, RequestOutput

BLOCK_TOKENS = 16
FIRST_OWN_ID = 2**256
"""The first id for blocks without a recorded id. Recorded ids have 64 bits, so they are smaller."""
MOSTLY_FOUND = 0.5
"""A request counts as a hit in the report if at least this share of its prompt was found."""
DEFINITIONS = (
    "Closed loop: a request is added when another has ended; the trace's arrival times are not simulated. "
    "Time to first token runs from add_request() to the first token, so it holds the wait for requests before it. "
    "A hit reused at least half of its prompt, a miss less."
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request, scaled down."""

    timestamp_ms: float
    block_ids: tuple[int, ...]
    """The id of each block of `BLOCK_TOKENS` prompt tokens; the last block may be partial."""
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def full_block_ids(self) -> tuple[int, ...]:
        return self.block_ids[: self.num_prompt_tokens // BLOCK_TOKENS]


def read_trace(file: Path, *, max_requests: int, max_output_tokens: int) -> list[TraceRequest]:
    """The first requests of a Mooncake-style JSONL file, in order of arrival.

    Raises TraceError, which names the line, for other files. Does not read beyond the last wanted request.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            requests = [
                _parse_line(line, number, f"line {number} of trace {str(file)!r}", max_output_tokens)
                for number, line in islice(filled, max_requests)
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {str(file)!r} cannot be read: {error}; give a JSONL file") from error
    if not requests:
        raise TraceError(f"trace {str(file)!r} holds no requests; give a file with one JSON object per line")
    return sorted(requests, key=lambda request: request.timestamp_ms)


def _parse_line(line: str, number: int, where: str, max_output_tokens: int) -> TraceRequest:
    record = parse_mooncake_record(parse_json_line(line, where), where)
    ids, size = record.content_ids.tolist(), record.block_tokens
    if len(ids) * size < record.num_prompt_tokens:
        ids.append(FIRST_OWN_ID + number)
    assert record.timestamp_ms is not None
    return TraceRequest(
        record.timestamp_ms,
        tuple(ids),
        _scaled(record.num_prompt_tokens, size),
        max(1, min(_scaled(record.num_output_tokens, size), max_output_tokens)),
    )


def _scaled(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens * BLOCK_TOKENS // block_tokens)


def prompt_token_ids(request: TraceRequest, vocab_size: int, seed: int) -> npt.NDArray[np.int32]:
    """The tokens of a prompt. A block id has the same tokens in all prompts; a partial block has the first of these."""
    blocks = [
        np.random.default_rng((seed, block_id)).integers(vocab_size, size=BLOCK_TOKENS)
        for block_id in request.block_ids
    ]
    return np.concatenate(blocks)[: request.num_prompt_tokens].astype(np.int32)


class UnlimitedCache:
    """The reuse of a prefix cache that never evicts, for requests that come one after the other."""

    def __init__(self) -> None:
        self._node_of: dict[tuple[int, int], int] = {}  # (node of the blocks before, block id) -> node

    def admit(self, request: TraceRequest) -> int:
        """Add the next request. Returns the number of tokens that it can reuse.

        From now on, later requests can reuse its full blocks.

        Blocks that another request is still computing count, because a request waits for them. A prompt's last token is
        always computed.
        """
        node, num_known = 0, 0
        for depth, block_id in enumerate(request.full_block_ids):
            if (node, block_id) in self._node_of:
                num_known = depth + 1
            node = self._node_of.setdefault((node, block_id), len(self._node_of) + 1)
        return min(num_known * BLOCK_TOKENS, request.num_prompt_tokens - 1)


# ---------------------------------------------------------------------------------- options, report


@dataclass(frozen=True, slots=True)
class TraceBenchOptions:
    """The recording, the model and the limits of a run."""

    file: Path
    """Recording in Mooncake's format."""
    model: str | None = None
    """Folder or hub id; None: a random model of about 0.1B parameters, made for this run."""
    max_requests: int = 300
    """Requests taken from the beginning of the trace."""
    max_in_flight: int = 8
    """Most requests in the engine at a time, running or waiting."""
    max_output_tokens: int = 64
    """Most tokens of an answer, after scaling; longer answers are cut."""
    kv_cache_memory_bytes: int | None = None
    """Memory for KV blocks. None: the engine's default."""
    enable_prefix_caching: bool = True
    """Keep the KV of computed tokens and reuse it for equal prefixes."""
    prefix_index: Literal["radix", "hash"] = "radix"
    """How prefixes are found; "hash" finds whole blocks only."""
    seed: int = 0
    """Seed of the tokens for block ids, and of the random model's weights."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_in_flight", "max_output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is too small; use at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is too small; use at least 0")


@dataclass(frozen=True, slots=True)
class Latency:
    """Time to first token of one kind of requests: hits, or misses."""

    requests: int
    median_prompt_tokens: float | None
    median_ms: float | None
    p90_ms: float | None

    @classmethod
    def of(cls, outputs: list[RequestOutput]) -> Latency:
        if not outputs:
            return cls(0, None, None, None)
        waits = [output.metrics.time_to_first_token_ms for output in outputs]
        lengths = [len(output.prompt_token_ids) for output in outputs]
        median, p90 = np.percentile(np.array(waits, np.float64), (50, 90)).round(2).tolist()
        return cls(len(outputs), float(np.median(lengths)), median, p90)


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The results of a run."""

    file: str
    model: str
    requests: int
    requests_skipped: int
    """Requests that are too long for the model or the pool; they were not submitted."""
    prompt_tokens: int
    tokens_reused: int
    """Prompt tokens that the engine reports as found in the cache."""
    tokens_reused_beyond: int
    """Reused tokens of partly matching blocks, which block ids do not show. Two blocks may begin with equal tokens by
    chance, or a partial last block may come again after an answer has filled it."""
    tokens_reusable: int
    """Prompt tokens that a cache with unlimited memory could reuse, according to the trace's block ids."""
    tokens_computed: int
    """Tokens that went through the model, decoding included."""
    equal: bool
    """Whether each request reused as much as the trace allows (or less than a block more), and every other token was
    computed exactly once."""
    evictions: int
    """Cached blocks whose memory was given to other content."""
    preemptions: int
    explanation: str
    """Why the engine reused another number of tokens than the trace allows; empty if both numbers are equal, or if the
    reason is unknown."""
    hit_rate: float
    """Share of the prompt tokens that were reused, 0.0 to 1.0."""
    ttft_hits: Latency
    ttft_misses: Latency
    generated_tokens: int
    wall_s: float
    """Seconds from the first request's start to the last request's end; loading the model is not counted."""
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    """Prompt tokens served per second, including reused ones."""
    max_in_flight: int
    seed: int


# ---------------------------------------------------------------------------------------------- run


def run_trace(options: TraceBenchOptions, console: Console) -> TraceReport:
    """Drive the engine with a trace, showing progress on `console`.

    Raises TraceError for a malformed trace, before a model is loaded, and the errors of LLM.
    """
    from foreword import LLM

    requests = read_trace(options.file, max_requests=options.max_requests, max_output_tokens=options.max_output_tokens)
    with (
        _model(options) as model,
        LLM(
            model,
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=options.enable_prefix_caching,
            prefix_index=options.prefix_index,
            kv_cache_memory_bytes=options.kv_cache_memory_bytes,
            self_check=False,
            draft_tokens=0,  # wrong drafts are computed too, and tokens are counted here
        ) as llm,
    ):
        started = time.monotonic()
        served = _drive(llm, requests, options, console)
        wall_s = time.monotonic() - started
        return _report(options, llm, served, len(requests) - len(served), wall_s)


Served = list[tuple[TraceRequest, "RequestOutput"]]


@contextmanager
def _model(options: TraceBenchOptions) -> Iterator[str]:
    if options.model is not None:
        yield options.model
        return
    from foreword.model.checkpoint.random_weights import DEMO_SHAPE, save_random_model

    with TemporaryDirectory(prefix="foreword-") as folder:
        save_random_model(Path(folder), DEMO_SHAPE, seed=options.seed)
        yield folder


def _drive(llm: LLM, requests: list[TraceRequest], options: TraceBenchOptions, console: Console) -> Served:
    """Serve the requests in order, at most `max_in_flight` at a time. Leaves out requests that can never fit."""
    from foreword import SamplingParams
    from foreword.engine import progress_bar

    served: Served = []
    upcoming = iter(requests)
    in_flight = 0
    with progress_bar(console) as bar:
        task = bar.add_task("requests", total=len(requests))
        while True:
            while in_flight < options.max_in_flight and (following := next(upcoming, None)) is not None:
                limits = llm.engine.limits
                token_ids = limits.without_pictures(prompt_token_ids(following, limits.vocab_size, options.seed))
                params = SamplingParams(max_tokens=following.num_output_tokens, temperature=0.0, ignore_eos=True)
                try:
                    served.append((following, llm.add_request({"prompt_token_ids": token_ids}, params)))
                    in_flight += 1
                except (PromptTooLongError, RequestTooLargeError):
                    bar.advance(task)
            if not llm.engine.has_unfinished_requests():
                return served
            num_ended = sum(output.finished for output in llm.engine.step())
            in_flight -= num_ended
            bar.advance(task, num_ended)


def _report(options: TraceBenchOptions, llm: LLM, served: Served, num_skipped: int, wall_s: float) -> TraceReport:
    unlimited, after = UnlimitedCache(), llm.engine.snapshot()
    in_order = sorted(served, key=lambda pair: pair[1].metrics.first_scheduled_time or 0.0)
    outputs = [output for _, output in served]
    reusable = [unlimited.admit(request) for request, _ in in_order]
    beyond = [output.num_cached_tokens - allowed for (_, output), allowed in zip(in_order, reusable, strict=True)]
    reused = sum(output.num_cached_tokens for output in outputs)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    most_beyond = BLOCK_TOKENS - 1 if options.prefix_index == "radix" else 0
    # A request's last generated token is not fed back into the model.
    computed_once = after.num_computed_tokens == prompt_tokens - reused + generated - len(served)
    equal = computed_once and all(0 <= tokens <= most_beyond for tokens in beyond)
    by_hit: dict[bool, list[RequestOutput]] = {True: [], False: []}
    for output in outputs:
        by_hit[output.num_cached_tokens >= MOSTLY_FOUND * len(output.prompt_token_ids)].append(output)
    return TraceReport(
        file=options.file.name,
        model="random weights, 0.1B parameters" if options.model is None else options.model,
        requests=len(served),
        requests_skipped=num_skipped,
        prompt_tokens=prompt_tokens,
        tokens_reused=reused,
        tokens_reused_beyond=sum(max(0, tokens) for tokens in beyond),
        tokens_reusable=sum(reusable),
        tokens_computed=after.num_computed_tokens,
        equal=equal,
        evictions=after.stats.evictions,
        preemptions=after.num_preemptions,
        explanation="" if equal else _explain(options, after.stats.evictions, after.num_preemptions),
        hit_rate=reused / prompt_tokens if prompt_tokens else 0.0,
        ttft_hits=Latency.of(by_hit[True]),
        ttft_misses=Latency.of(by_hit[False]),
        generated_tokens=generated,
        wall_s=round(wall_s, 3),
        generated_tokens_per_s=round(generated / wall_s, 2),
        prompt_tokens_per_s=round(prompt_tokens / wall_s, 2),
        max_in_flight=options.max_in_flight,
        seed=options.seed,
    )


def _explain(options: TraceBenchOptions, num_evictions: int, num_preemptions: int) -> str:
    """The known reasons why the engine did not reuse as many tokens as the trace allows; may be empty."""
    reasons = []
    if not options.enable_prefix_caching:
        reasons.append("prefix caching is off")
    if num_evictions:
        reasons.append(f"{num_evictions} cached blocks were evicted for want of memory")
    if num_preemptions:
        reasons.append(f"{num_preemptions} requests were preempted and computed tokens again")
    return "; ".join(reasons)


# ------------------------------------------------------------------------------------- command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `foreword bench trace`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="requests in Mooncake's JSONL format")
    _flags().add_to(parser)
    parser.add_argument("--json", action="store_true", help="end with one JSON line; all else goes to stderr")


def _flags() -> Flags:
    return Flags({"benchmark": options_of(TraceBenchOptions, without=("file",))}, {})


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments. Returns 1 if the reuse is not what the trace allows, and no reason is known."""
    console = Console(stderr=args.json)
    options = TraceBenchOptions(file=args.file, **_flags().given(args))
    report = run_trace(options, console)
    _print_report(report, console)
    if args.json:
        print(json.dumps({"benchmark": "trace", **asdict(report)}))
    return 0 if report.equal or report.explanation else 1


def _print_report(report: TraceReport, console: Console) -> None:
    table = Table(title=f"{report.file} on {report.model}", show_header=False, title_justify="left")
    skipped = f", {report.requests_skipped} skipped as too long" if report.requests_skipped else ""
    table.add_row("requests", f"{report.requests:,}{skipped}, {report.max_in_flight} in flight")
    table.add_row("prompt tokens", f"{report.prompt_tokens:,}")
    table.add_row("reused", f"{report.tokens_reused:,} (hit rate {report.hit_rate:.1%})")
    table.add_row("the trace allows", f"{report.tokens_reusable:,}: {_verdict(report)}")
    table.add_row("computed", f"{report.tokens_computed:,} (decoding included)")
    table.add_row("time to first token, hits", _latency_text(report.ttft_hits))
    table.add_row("time to first token, misses", _latency_text(report.ttft_misses))
    table.add_row(
        "tokens per second",
        f"{report.generated_tokens_per_s:,.1f} generated, {report.prompt_tokens_per_s:,.0f} of prompts served",
    )
    console.print(table)
    console.print(DEFINITIONS, style="dim")


def _verdict(report: TraceReport) -> str:
    if report.equal:
        beyond = f", {report.tokens_reused_beyond:,} beyond whole blocks" if report.tokens_reused_beyond else ""
        return f"equal, {report.evictions} evictions{beyond}"
    return f"not equal: {report.explanation or 'the reason is unknown; please report this'}"


def _latency_text(latency: Latency) -> str:
    if not latency.requests:
        return "none"
    return (
        f"median {latency.median_ms:,.0f} ms, p90 {latency.p90_ms:,.0f} ms "
        f"({latency.requests} requests, median prompt {latency.median_prompt_tokens:,.0f} tokens)"
    )
