"""Models that foreword implements itself, beside the same models in another checkout: first token and decoding.

transformers makes a small model with random weights for each family. Each checkout runs in its own process, one after
the other, in a new order each round. Figures are processor time of one thread, so that a busy machine matters little.
`ratio` is the other checkout's time divided by ours; above 1, ours is faster.

    python benchmarks/families.py --against OTHER/src [--families gemma3,phi3] [--rounds 3] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

SIZES = {"vocab_size": 32_000, "num_hidden_layers": 12, "max_position_embeddings": 4096}
WIDE = {**SIZES, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
GEMMA = {"hidden_size": 640, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
FAMILIES = {
    "gemma3": ("Gemma3TextConfig", {**SIZES, **GEMMA, "num_hidden_layers": 18, "head_dim": 256, "sliding_window": 512}),
    "granite": ("GraniteConfig", {**WIDE, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}),
    "olmo2": ("Olmo2Config", WIDE),
    "phi3": ("Phi3Config", {**WIDE, "pad_token_id": 0}),
}
PROMPT, ANSWER = 512, 64
MAKE = """
import json, sys, torch, transformers
torch.manual_seed(0)
config = getattr(transformers, sys.argv[2])(**json.loads(sys.argv[3]))
transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
"""
MEASURE = """
import json, random, sys, time
from foreword import LLM, SamplingParams
folder, dtype, prompt, answer = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
llm = LLM(folder, dtype=dtype, kv_cache_memory_bytes=2**28)
draw = random.Random(0)

def seconds(tokens_in, tokens_out):
    prompt = {"prompt_token_ids": [draw.randrange(5, 30_000) for _ in range(tokens_in)]}
    begin = time.process_time()
    llm.generate([prompt], SamplingParams(max_tokens=tokens_out, temperature=1, seed=0, ignore_eos=True))
    return time.process_time() - begin

seconds(prompt, 2)
first = min(seconds(prompt, 1) for _ in range(3))
short, long = (min(seconds(32, number) for _ in range(4)) for number in (1, answer))
decode = (long - short) / (answer - 1)
print(json.dumps({"first_token_ms": 1e3 * first, "decode_ms": 1e3 * decode}))
"""


def measure(sources: Path, folder: Path, dtype: str) -> dict[str, float]:
    """Milliseconds of processor time of one checkout, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(folder), dtype, str(PROMPT), str(ANSWER)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def compare(family: str, sources: dict[str, Path], rounds: int, dtype: str) -> dict[str, dict[str, float]]:
    """For each figure, the medians of both checkouts, and the ratio of the medians."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with TemporaryDirectory() as folder:
        config, sizes = FAMILIES[family]
        subprocess.run([sys.executable, "-c", MAKE, folder, config, json.dumps(sizes)], check=True, capture_output=True)
        for round_number in range(rounds):
            for name in sorted(sources, reverse=round_number % 2 == 1):
                figures[name].append(measure(sources[name], Path(folder), dtype))
    found = {}
    for figure in ("first_token_ms", "decode_ms"):
        medians = {name: round(statistics.median(run[figure] for run in runs), 2) for name, runs in figures.items()}
        found[figure] = {**medians, "ratio": round(medians["against"] / medians["foreword"], 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="the src folder of another checkout")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    sources = {"foreword": Path(__file__).parents[1] / "src", "against": args.against}
    found = {}
    for family in args.families.split(","):
        found[family] = compare(family, sources, args.rounds, args.dtype)
        print(family, found[family], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
