"""Drawings of the dashboard: turns records and snapshots into HTML, SVG and PNG.

Every text that comes from a prompt is escaped here. Colours are CSS variables (style.css), so that a drawing fits the
light and the dark page.
"""

from __future__ import annotations

import base64
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape

import numpy as np
import numpy.typing as npt

from foreword.cache import BlockState, CacheEntry, EvictionCause
from foreword.engine import Snapshot, TierReport, TiersReport
from foreword.replay.curve import CurvePoint
from foreword.request import DraftCounts
from foreword.server.observe.explanations import IN_WORDS, LOAD_FAILURES_IN_WORDS, NEW_TEXT, text_of
from foreword.server.observe.metrics import mostly_found
from foreword.server.records import RequestRecord, SessionStats
from foreword.server.service import Service
from foreword.text import Tokenizer

NUM_BINS = 60
MAX_CELLS = 4096
"""Limit of the cells in the pool's map. In a larger pool, each cell stands for several blocks."""

STATES = {
    BlockState.IN_USE: ("in use", (99, 102, 241)),
    BlockState.CACHED: ("cached", (20, 168, 124)),
    BlockState.PINNED: ("pinned", (217, 70, 160)),
    BlockState.FREE: ("free", (148, 158, 172)),
}
MOST_ROWS, MOST_LETTERS = 20, 40
"""Limits of a card's rows, and of the characters of a session's id."""


def count(number: float) -> str:
    """Write a number: "12,345" or "1.2 M"."""
    if number < 100_000:
        return f"{number:,.0f}"
    return f"{number / 1e3:,.0f} k" if number < 1e6 else f"{number / 1e6:,.1f} M"


def tokens(number: int, what: str = "token") -> str:
    """Write a number of tokens: "1 token", "12 tokens"."""
    return f"{count(number)} {what}{'' if number == 1 else 's'}"


requests = partial(tokens, what="request")
"""Writes a number of requests: "1 request", "12 requests"."""


def seconds(value: float | None) -> str:
    """Write a time: "12 ms", "1.2 s" or "3 min"."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1e3 * value:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def size(num_bytes: float) -> str:
    """Write a size: "3.8 MiB", "64 MiB" or "1.5 GiB"."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return f"{num_bytes / 2**20:.{0 if num_bytes >= 10 * 2**20 else 1}f} MiB"


# --------------------------------------------------------------------- charts


def token_bars(prompts: Iterable[tuple[float, int, int]], now: float, window_s: float) -> str:
    """Draw the prompt tokens of the last `window_s` seconds as `NUM_BINS` bars: found tokens below, computed above.

    `prompts`: for each prompt, the time of its end (on the clock of `now`), and its found and computed tokens.
    """
    width = window_s / NUM_BINS
    bins = np.zeros((NUM_BINS, 2))
    for ended, *counts in prompts:
        if 0 <= now - ended < window_s:
            bins[max(0, NUM_BINS - 1 - int((now - ended) / width))] += counts
    top = _round_up(bins.sum(axis=1).max())
    shapes = []
    for at, (found, computed) in enumerate(bins.tolist()):
        x = 100 * at / NUM_BINS + 0.2
        low, high = 100 * found / top, 100 * computed / top
        shapes.append(_rect(x, 100 - low, 100 / NUM_BINS - 0.4, low, "found"))
        shapes.append(_rect(x, 100 - low - high, 100 / NUM_BINS - 0.4, high, "computed"))
    return chart("".join(shapes), [f"{count(top)}", f"{count(top / 2)}", "0"], "prompt tokens", _times(window_s))


def ttft_dots(records: Sequence[RequestRecord], now: float, window_s: float) -> str:
    """Draw the time to first token of each request of the last `window_s` seconds, on a logarithmic scale."""
    dots = []
    for record in records:
        age = now - (record.finished_time or now)
        value = record.time_to_first_token
        if value is not None and 0 <= age < window_s:
            dots.append((100 * (1 - age / window_s), max(value, 1e-4), mostly_found(record)))
    values = [value for _, value, _ in dots] or [0.01, 0.1]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))
    shapes = []
    for x, value, hit in dots:
        y = 100 * (high - math.log10(value)) / (high - low)
        kind = "found" if hit else "computed"
        shapes.append(f'<path class="dot stroke-{kind}" d="M{min(x, 99.5):.2f} {min(97.0, max(3.0, y)):.2f}h0"/>')
    labels = [seconds(10.0**power) for power in range(high, low - 1, -1)]
    return chart("".join(shapes), labels, "time to first token", _times(window_s))


def chart(shapes: str, labels: Sequence[str], title: str, below: str) -> str:
    """Draw shapes in a stretched area of 100 by 100 units. `labels` stand at its side, the top first; `below`: HTML."""
    lines = "".join(
        f'<path class="gridline" d="M0 {100 * at / (len(labels) - 1):.2f}H100"/>' for at in range(len(labels))
    )
    marks = "".join(f"<span>{escape(label)}</span>" for label in labels)
    return (
        f'<div class="chart" role="img" aria-label="{escape(title)}"><div class="marks">{marks}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{lines}{shapes}</svg>'
        f"{below}</div>"
    )


def _times(window_s: float) -> str:
    return f'<div class="times"><span>{round(window_s / 60)} min ago</span><span>now</span></div>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    if height <= 0:
        return ""
    return f'<rect class="fill-{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>'


def _round_up(value: float) -> float:
    """Return the smallest of 10, 20, 50, 100, ... that is not below the value."""
    if value <= 10:
        return 10.0
    power = 10.0 ** math.floor(math.log10(value))
    return float(next(step * power for step in (1, 2, 5, 10) if step * power >= value))


# ----------------------------------------------------------------------- pool


def pool_map(states: npt.NDArray[np.uint8]) -> str:
    """Draw the blocks as cells, in the order of block ids."""
    per_cell = -(-len(states) // MAX_CELLS)
    cells = _most_common(states, per_cell) if per_cell > 1 else states
    columns = min(len(cells), max(16, round(math.sqrt(2.6 * len(cells)))))
    rows = -(-len(cells) // columns)
    image = _png(cells, columns, rows)
    legend = "".join(
        f'<span><i style="background:rgb{colour}"></i>{name} <b>{count(int((states == state).sum()))}</b></span>'
        for state, (name, colour) in STATES.items()
    )
    each = "a cell is one block" if per_cell == 1 else f"a cell is {per_cell} blocks, in the state of most"
    return (
        f'<div class="pool" style="aspect-ratio:{columns}/{rows}" role="img" aria-label="pool occupancy">'
        f'<img alt="" src="data:image/png;base64,{image}"/>'
        f'<div class="mesh" style="background-size:{100 / columns:.5f}% {100 / rows:.5f}%"></div></div>'
        f'<div class="legend">{legend}</div><div class="hint">{each}</div>'
    )


def _most_common(states: npt.NDArray[np.uint8], per_cell: int) -> npt.NDArray[np.uint8]:
    padded = np.concatenate((states, np.repeat(states[-1:], -len(states) % per_cell))).reshape(-1, per_cell)
    tallies = np.stack([(padded == state).sum(axis=1) for state in range(len(BlockState))])
    commonest: npt.NDArray[np.uint8] = tallies.argmax(axis=0).astype(np.uint8)
    return commonest


def _png(cells: npt.NDArray[np.uint8], columns: int, rows: int) -> str:
    """Return an indexed PNG of one pixel per cell, in base64. Pixels beyond the last cell are transparent."""
    nothing = len(BlockState)
    pixels = np.full(columns * rows, nothing, np.uint8)
    pixels[: len(cells)] = cells
    lines = np.concatenate((np.zeros((rows, 1), np.uint8), pixels.reshape(rows, columns)), axis=1)
    palette = b"".join(bytes(STATES[state][1]) for state in BlockState) + bytes(3)
    opacity = bytes([70, 255, 255, 255, 0])  # in the order of BlockState; free blocks stay in the background

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    image = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0))
        + chunk(b"PLTE", palette)
        + chunk(b"tRNS", opacity)
        + chunk(b"IDAT", zlib.compress(lines.tobytes()))
        + chunk(b"IEND", b"")
    )
    return base64.b64encode(image).decode()


# ------------------------------------------------------------------- requests


def reuse(record: RequestRecord, tokenizer: Tokenizer | None, scale: float = 1.0, more: str = "") -> str:
    """Draw a prompt's found and computed tokens as a bar of `scale` times the full width, and why tokens were missed.

    `more`: HTML after the counts of tokens.
    """
    num_cached, num_tokens = record.num_cached_tokens, record.num_prompt_tokens
    percent = 100 * num_cached / max(1, num_tokens)
    title = f"{num_cached} of {num_tokens} prompt tokens found in the cache"
    return (
        f'<div class="bar" title="{title}"><div style="width:{max(2.0, 100 * scale):.1f}%">'
        f'<i class="found" style="width:{percent:.2f}%"></i><i class="computed" style="width:{100 - percent:.2f}%"></i>'
        f'</div></div><div class="counts"><span class="found">{count(num_cached)} cached</span>'
        f'<span class="computed">{count(record.num_computed_tokens)} computed</span>{more}'
        f"<span>{seconds(record.time_to_first_token)} to first token</span></div>{why(record, tokenizer)}"
    )


def request_rows(records: Sequence[RequestRecord], tokenizer: Tokenizer | None, *, with_tenants: bool) -> str:
    """Draw requests as rows: the found tokens, the time to the first token, and why the other tokens were missed."""
    if not records:
        return '<div class="empty">No requests yet. Send one, or use the chat.</div>'
    longest = max(record.num_prompt_tokens for record in records)
    return "".join(_request_row(record, tokenizer, longest, with_tenants) for record in records)


def _request_row(record: RequestRecord, tokenizer: Tokenizer | None, longest: int, with_tenants: bool) -> str:
    if record.first_scheduled_time is None:
        how = f'<div class="counts"><span>{count(record.num_prompt_tokens)} prompt tokens</span></div>'
    else:
        more = f"<span>{record.num_output_tokens} out</span>"
        how = reuse(record, tokenizer, record.num_prompt_tokens / longest, more)
    when = time.strftime("%H:%M:%S", time.localtime(record.created))
    who = f'<span class="tenant">{escape(record.tenant)}</span>' if with_tenants else ""
    stage = "waiting" if record.first_scheduled_time is None else "running"
    ends = f'<span class="outcome">{escape(record.outcome or stage)}</span>'
    return (
        f'<div class="request"><div class="what"><b>{escape(record.endpoint)}</b>{who}<time>{when}</time>{ends}</div>'
        f'<div class="how">{how}</div></div>'
    )


def why(record: RequestRecord, tokenizer: Tokenizer | None) -> str:
    """Write, as HTML, why a prompt was not found to its end, and the texts where the prompt and the cache differ."""
    explanation = record.explanation
    if explanation is None or explanation.reason is None:
        return ""
    if explanation.load_failure is not None:
        words = escape(LOAD_FAILURES_IN_WORDS[explanation.load_failure])
        return f'<div class="why"><span class="chip">{words}</span></div>'
    is_new = explanation.reason in NEW_TEXT
    name = "new text" if is_new else str(explanation.reason).replace("_", " ")
    story = f'<span class="chip {explanation.reason}">{name}</span>'
    eviction = explanation.eviction
    if eviction is not None:
        ago = seconds(max(0.0, (record.first_scheduled_time or eviction.time) - eviction.time))
        cause = "its memory was needed" if eviction.cause is EvictionCause.REUSED else str(eviction.cause)
        story += f" <span>{cause} {ago} before, {eviction.pool_usage:.0%} of the pool in use</span>"
    divergence = explanation.divergence
    if divergence is None or not divergence.theirs:
        words = "" if eviction or is_new else f"<span>{escape(IN_WORDS[explanation.reason])}</span>"
        return f'<div class="why">{story}{words}</div>'
    if eviction is not None:
        story += "<span>\u00b7</span>"
    before = record.prompt_token_ids[max(0, divergence.position - 8) : divergence.position].tolist()
    sides = (before, divergence.ours[:8], divergence.theirs[:8])
    head, ours, theirs = (escape((text_of(side, tokenizer) or "").replace("\n", "\u21b5")) for side in sides)
    return (
        f'<div class="why">{story}<span>differs at token {divergence.position}:</span> <code>{head}</code>'
        f'<code class="ours">{ours}</code><span>cached:</span><code class="theirs">{theirs}</code></div>'
    )


def miss_reasons(missed_tokens: Mapping[str, int], misses: Mapping[str, int]) -> str:
    """Draw the computed prompt tokens: first new text, then tokens that a cache could have found, by reason."""
    new = sum(missed for reason, missed in missed_tokens.items() if reason in NEW_TEXT)
    num_new = sum(requests for reason, requests in misses.items() if reason in NEW_TEXT)
    avoidable = {reason: missed for reason, missed in missed_tokens.items() if reason not in NEW_TEXT and missed}
    top = max((new, *avoidable.values(), 1))
    rows = [
        _reason("could have been found: " + reason.replace("_", " "), "computed", missed, misses.get(reason, 0), top)
        for reason, missed in sorted(avoidable.items(), key=lambda item: -item[1])
    ]
    if not rows:
        rows = ['<div class="note">Nothing was missed that a cache could have found.</div>']
    return _reason("new text, which no cache can find", "new", new, num_new, top) + "".join(rows)


def _reason(name: str, kind: str, num_tokens: int, num_requests: int, top: int) -> str:
    return row(name, tokens(num_tokens), requests(num_requests), {kind: num_tokens / top})


def row(name: str, number: str, more: str, shares: Mapping[str, float]) -> str:
    """Draw a name, a number, more words in small letters, and a bar. `shares`: fractions of its width, by kind."""
    parts = "".join(f'<i class="{kind}" style="width:{100 * share:.1f}%"></i>' for kind, share in shares.items())
    return (
        f'<div class="reason"><div><span>{escape(name)}</span><b>{number}</b><small>{more}</small></div>'
        f'<div class="bar"><div style="width:100%">{parts}</div></div></div>'
    )


def facts_row(facts: Iterable[tuple[str, object]]) -> str:
    """Write names and values in a row."""
    return f'<div class="model-facts">{pairs(facts)}</div>'


def pairs(facts: Iterable[tuple[str, object]]) -> str:
    """Write names and values as HTML."""
    return "".join(f"<div><span>{escape(name)}</span><b>{escape(str(value))}</b></div>" for name, value in facts)


def memory_curve(look: Snapshot, curve: Sequence[CurvePoint], block_bytes: int, seconds_per_token: float) -> str:
    """Draw the card about more memory. A block has `block_bytes`, and a hit token saves `seconds_per_token`."""
    if not curve and not look.stats.requests:
        return '<div class="empty">No curve yet: it is drawn from requests that have ended.</div>'
    return drawn_curve(curve, lambda num_blocks: size(num_blocks * block_bytes)) + _of_ghosts(
        look, block_bytes, seconds_per_token
    )


def drawn_curve(points: Sequence[CurvePoint], size: Callable[[int], str]) -> str:
    """Draw the hit rate at each size of the pool, the present size first. `size` writes a number of blocks as text."""
    if not points:
        return ""
    width = 100 / len(points)
    places = [
        (width * (at + 0.5), 100 - 100 * point.hit_rate, 200 * point.standard_error) for at, point in enumerate(points)
    ]
    band = [f"{x:.2f} {max(0.0, y - error):.2f}" for x, y, error in places]
    band += [f"{x:.2f} {min(100.0, y + error):.2f}" for x, y, error in reversed(places)]
    line = [f"{x:.2f} {y:.2f}" for x, y, _ in places]
    shapes = f'<path class="level" d="M{line[0]}H100"/>'  # the curve's part above this line is the gain
    shapes += f'<path class="band" d="M{"L".join(band)}Z"/><path class="line" d="M{"L".join(line)}"/>'
    shapes += "".join(f'<path class="dot stroke-found" d="M{at}h0"/>' for at in line)
    sizes = "".join(_size(point, points[0], size) for point in points)
    columns = f"grid-template-columns:repeat({len(points)},minmax(0,1fr))"
    below = f'<div class="sizes" style="{columns}">{sizes}</div>'
    return chart(shapes, ["100%", "50%", "0%"], "estimated hit rate over memory", below)


def _size(point: CurvePoint, pool: CurvePoint, size: Callable[[int], str]) -> str:
    factor = point.num_blocks / pool.num_blocks
    name = "now" if point is pool else f"\u00d7{factor:.3g}"
    error = f"<small>\u00b1{100 * point.standard_error:.1f}</small>" if point.standard_error else ""
    return (
        f"<div><b>{name}</b><span>{escape(size(point.num_blocks))}</span>"
        f'<span class="found">{100 * point.hit_rate:.0f}%</span>{error}</div>'
    )


def _of_ghosts(look: Snapshot, block_bytes: int, seconds_per_token: float) -> str:
    """Write the number of tokens that were computed again, and that a pool of twice the blocks would have kept."""
    stats = look.stats
    note = "Estimated for the lru policy and whole blocks, from the requests since the last reset. "
    if not look.has_ledger:
        return f'<div class="note">{note}</div>'
    if not stats.ghost_hits:
        return f'<div class="note">{note}No token was computed again that twice the blocks would have held.</div>'
    saved = seconds(stats.ghost_hits * seconds_per_token)
    return (
        f'<div class="note">{note}Counted: <b>+{size(look.num_blocks * block_bytes)}</b>, twice the blocks, would '
        f"have kept {count(stats.ghost_hits)} tokens from being computed again, about {saved} of prefill: "
        f"{stats.hit_rate:.0%} \u2192 {stats.hit_rate_with_twice_the_blocks:.0%}.</div>"
    )


def model_card(service: Service, num_blocks: int) -> str:
    """Write the facts of the model's card, for a pool of `num_blocks` blocks."""
    llm = service.llm
    layout, block_size = llm.layout, llm.layout.block_size
    facts = {
        "model": service.model_name,
        "dtype": llm.dtype,
        "KV": layout.kv_format.name,
        "layers": ", ".join(f"{number} {kind}" for kind, number in layout.layers_by_kind().items()),
        "context": tokens(service.max_model_len),
        "pool": f"{size(num_blocks * llm.kv_block_bytes)}, {tokens(layout.tokens_in(num_blocks))}",
        "blocks": f"{count(num_blocks)} of {block_size} tokens",
        "eviction": llm.config.cache.eviction_policy,
        "index": llm.config.cache.prefix_index or "radix",
    }
    return pairs(facts.items())


def entry_rows(look: Snapshot, *, with_tenants: bool) -> str:
    """Draw the card of kept entries: broken entries first, then the entries that keep the most tokens."""
    entries = sorted(look.entries, key=lambda entry: (entry.is_whole, -entry.num_kept_tokens))
    broken = sum(not entry.is_whole for entry in look.entries)
    note = f"{count(len(entries))} entries, {count(broken)} of them not whole."
    if len(entries) > MOST_ROWS:
        note += f" The first {MOST_ROWS} are shown; GET /v1/cache/entries has all."
    rows = "".join(_entry_row(entry, look.clock, with_tenants) for entry in entries[:MOST_ROWS])
    return f'{rows}<div class="note">{note}</div>'


def _entry_row(entry: CacheEntry, now: float, with_tenants: bool) -> str:
    facts = {
        "kept": f"{entry.num_kept_tokens:,} of {tokens(entry.num_tokens)}",
        "by": entry.source,
        "for": seconds(max(0.0, entry.until - now)) + (" from its last use" if entry.refresh_s else ""),
        "state": "whole" if entry.is_whole else "not in memory" if not entry.num_kept_tokens else "broken",
        **({"tenant": entry.owner or "-"} if with_tenants else {}),
    }
    return facts_row(facts.items())


def session_rows(service: Service) -> str:
    """Draw the card of the sessions whose requests ended last; empty if no request named a session."""
    sessions = service.records.sessions(MOST_ROWS + 1)
    with_tenants = service.tenants.asks_for_keys
    rows = "".join(_session_row(*session, with_tenants) for session in sessions[:MOST_ROWS])
    more = "" if len(sessions) <= MOST_ROWS else f" The newest {MOST_ROWS} are shown; GET /v1/cache/sessions has more."
    return rows and f'{rows}<div class="note">Requests that have ended, since a session was last closed.{more}</div>'


def _session_row(tenant: str, session_id: str, stats: SessionStats, with_tenants: bool) -> str:
    facts = {
        "session": session_id if len(session_id) <= MOST_LETTERS else f"{session_id[:MOST_LETTERS]}…",
        "turns": count(stats.requests),
        "found": f"{stats.hit_rate:.0%} of {tokens(stats.queried_tokens)}",
        "answered": tokens(stats.output_tokens),
        "last": f"{seconds(max(0.0, time.time() - stats.last_time))} ago",
        **({"tenant": tenant} if with_tenants else {}),
    }
    return facts_row(facts.items())


def tier_rows(report: TiersReport) -> str:
    """Draw the card of the tiers."""
    queue = f"{count(report.num_waiting_stores)} sequences wait to be stored"
    note = f'<div class="note">{size(report.bytes_today)} stored today; {queue}.</div>'
    return "".join(map(_tier_row, report.tiers)) + note


def _tier_row(tier: TierReport) -> str:
    stats, loads = tier.stats, tier.loads
    damaged = loads.blocks_by_outcome["corrupt"]
    facts = {
        "tier": tier.name,
        "blocks": count(stats.num_blocks),
        "in use": f"{size(stats.shared_bytes)} of {size(stats.budget_bytes)}",
        "loads": count(loads.num_loads),
        "loaded": tokens(loads.num_tokens),
        "saved": ("-" if loads.saved_s < 0 else "") + seconds(abs(loads.saved_s)),  # below 0 if loads were in vain
        "computed instead": f"{count(loads.num_declined)} declined, {count(damaged)} blocks damaged",
        "state": "works" if stats.breaker == "closed" else f"left alone after failures ({stats.breaker})",
    }
    return facts_row(facts.items())


def draft_rows(drafts: DraftCounts) -> str:
    """Draw the card of drafted tokens, the source with most drafts first; empty if no token was drafted."""
    largest, rows = max(drafts.by_source().values(), default=1), []
    for source, drafted in sorted(drafts.by_source().items(), key=lambda item: (-item[1], item[0])):
        accepted = drafts.accepted.get(source, 0)
        shares = {"found": accepted / largest, "computed": (drafted - accepted) / largest}
        rows.append(row(source, f"{accepted / drafted:.0%}", f"{count(accepted)} of {tokens(drafted)}", shares))
    return "".join(rows)
