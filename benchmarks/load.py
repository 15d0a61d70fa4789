"""Seconds and memory that `foreword generate` takes until its first token, beyond those of `import torch`.

Each command runs in its own process, one after the other, in a new order each round. Wall time lasts from the start of
the process to the first byte that the process writes. Processor time is that of all threads of the whole process, and
memory is the largest resident size. Without `--model`, the script makes a checkpoint of Qwen2-0.5B's shape with random
weights and a tokenizer of 32,000 tokens. A first round is not counted: it fills the page cache and compiles what is
compiled once per machine, including Python modules, even where the environment forbids Python to keep these.
`--against` also measures foreword from the `src` folder of another checkout.

    python benchmarks/load.py [--rounds 7] [--model FOLDER|FILE.gguf] [--against OTHER/src] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Costs = tuple[float, float, float]
"""Seconds to the first byte of output, processor seconds of the whole process, and most resident megabytes."""
MAKE = """
import sys
from pathlib import Path
from foreword.model.checkpoint.random_weights import QWEN2_0_5B, save_random_model
from made_tokenizer import save_tokenizer
save_random_model(Path(sys.argv[1]), QWEN2_0_5B)
save_tokenizer(Path(sys.argv[1]), QWEN2_0_5B.vocab_size)
"""
KINDS = "wall_s", "cpu_s", "peak_mb"
TORCH, OURS, OTHER = "torch", "foreword", "against"
GENERATE = ("--prompt-token-ids", "5,17,9", "--max-tokens", "1", "--kv-cache-memory-bytes", str(2**26))


@contextmanager
def checkpoint(given: Path | None) -> Iterator[Path]:
    """Yields the given folder, or one that exists only during the measurement."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        # A separate process makes the model, because a child's peak memory begins with the resident size of its parent.
        subprocess.run([sys.executable, "-c", MAKE, folder], check=True, cwd=Path(__file__).parent)
        yield Path(folder)


def start(command: list[str], sources: Path | None) -> Costs:
    """The costs of a Python process that imports modules from `sources`."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if sources is not None:
        environment["PYTHONPATH"] = str(sources)
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - started
    process.stdout.read()
    process.stdout.close()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not first or process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


def measure(folder: Path, rounds: int, against: Path | None) -> dict[str, list[Costs]]:
    """Every contender's costs, round by round."""
    generate = ["-m", "foreword.cli", "generate", str(folder), *GENERATE]
    ours = Path(__file__).resolve().parents[1] / "src"
    commands = {TORCH: (["-c", "import torch; print()"], None), OURS: (generate, ours)}
    if against is not None:
        commands[OTHER] = (generate, against.resolve())
    found: dict[str, list[Costs]] = {name: [] for name in commands}
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        for name in shuffle.sample(list(commands), len(commands)):
            costs = start(*commands[name])
            if number:
                found[name].append(costs)
    return found


def report(found: dict[str, list[Costs]]) -> dict[str, dict[str, float]]:
    """Medians and minima; beyond torch, the median of the rounds' differences and the difference of the minima."""
    result = {}
    for name in found:
        row = {}
        for number, kind in enumerate(KINDS):
            own, torch = ([costs[number] for costs in found[key]] for key in (name, TORCH))
            row |= {kind: statistics.median(own), f"least_{kind}": min(own)}
            if name != TORCH:
                beyond = [mine - theirs for mine, theirs in zip(own, torch, strict=True)]
                row[f"beyond_torch_{kind}"] = statistics.median(beyond)
                row[f"least_beyond_torch_{kind}"] = min(own) - min(torch)
        result[name] = {key: round(value, 3) for key, value in row.items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--against", type=Path, metavar="SRC")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is too few; run at least 1")
    if args.against is not None and not args.against.is_dir():
        parser.error(f"--against {str(args.against)!r} is no folder; name one that exists")
    if args.model is not None and not args.model.exists():
        parser.error(f"--model {str(args.model)!r} does not exist; name a folder or a GGUF file")
    with checkpoint(args.model) as folder:
        result = report(measure(folder, args.rounds, args.against))
    if not args.json:
        for name, row in result.items():
            costs = (
                f"  {key.rpartition('_')[0].replace('_', ' ')} {value:.2f} {key.rpartition('_')[2]}"
                for key, value in row.items()
            )
            print(f"{name:9}" + "".join(costs).replace("mb", "MB"))
    print(json.dumps({"rounds": args.rounds, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
