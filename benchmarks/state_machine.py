"""Runs a million steps of hypothesis state machines over the whole cache manager, and counts steps per second.

    python benchmarks/state_machine.py [--steps 1000000]

tests/cache_world.py says what a step is, and what is checked after each. The same machines run shorter in
`make test` and `make test-slow`. A failure prints the shortest sequence of steps that hypothesis can find.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cache")]

from test_state_machine import run_machine  # noqa: E402

from cache_world import KINDS, Happened  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    num_steps = parser.parse_args().steps
    happened, begun, told = Happened(), time.monotonic(), 0.0
    while happened.steps < num_steps:
        happened.add(run_machine(KINDS, 50, 200))
        elapsed = time.monotonic() - begun
        if elapsed - told > 30:
            told = elapsed
            print(f"{happened.steps:>9,} steps, {happened.steps / elapsed:,.0f} a second", flush=True)
    elapsed = time.monotonic() - begun
    print(f"{happened.steps:,} steps in {elapsed:,.0f} s, each followed by check_integrity; nothing was found")
    figures = {"steps_per_second": round(happened.steps / elapsed), "seconds": round(elapsed), **vars(happened)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
