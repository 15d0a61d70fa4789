"""lm-eval with and without the cache, alternately in one process: equal results, and the time and tokens saved.

The script writes the tasks: sums after worked examples, once with four choices (log probabilities) and once with a
generated answer. Prints a line with and a line without the cache; the last line is JSON. Needs `pip install
lm-eval[api]`.

    .venv/bin/python benchmarks/evaluations.py --model FOLDER
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
CHOSEN = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""
ANSWERED = """
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--examples", type=int, default=24, help="worked sums before each question")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="foreword-") as folder:
        write_tasks(Path(folder), options.questions, options.examples)
        found = {use_cache: evaluate(Path(folder), options, use_cache) for use_cache in (True, False)}
    for use_cache, own in found.items():
        how = "with the cache" if use_cache else "without"
        print(
            f"{how:<15} {own['processor_s']:.2f} processor seconds, {own['tokens']} tokens computed, {own['results']}"
        )
    cached, computed = found[True], found[False]
    report = {
        "equal": cached.pop("samples") == computed.pop("samples"),
        "ratio": computed["processor_s"] / cached["processor_s"],
        "limit": computed["tokens"] / cached["tokens"],
        "cached": cached,
        "computed": computed,
    }
    print(json.dumps({**vars(options), **report}))


def write_tasks(folder: Path, num_questions: int, num_examples: int) -> None:
    """The tasks "chosen" and "answered", and their questions."""
    rng = np.random.default_rng(0)

    def sums(count: int) -> list[tuple[str, int]]:
        return [(f"Question: What is {a} plus {b}?\nAnswer:", int(a + b)) for a, b in rng.integers(2, 50, (count, 2))]

    examples = "\n\n".join(f"{question} {answer}" for question, answer in sums(num_examples))
    questions = []
    for question, answer in sums(num_questions):
        label = int(rng.integers(4))
        choices = [str(answer + at - label) for at in range(4)]
        questions.append({"text": f"{examples}\n\n{question}", "choices": choices, "label": label})
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    for name, kind in (("chosen", CHOSEN), ("answered", ANSWERED)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, folder=folder) + kind)


def evaluate(folder: Path, options: argparse.Namespace, use_cache: bool) -> dict[str, Any]:
    """Runs lm-eval once. Returns its results, every answer and log probability, and the time and tokens of the run."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from foreword.integrations.lm_eval import ForewordLM

    model = ForewordLM(options.model, use_cache=use_cache, dtype=options.dtype, max_model_len=2048, self_check=False)
    model.llm.generate("warm up", show_progress=False)  # pays what only a first request pays
    before, spent = model.llm.engine.num_computed_tokens, time.process_time()
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=["answered", "chosen"], task_manager=tasks, bootstrap_iters=0)
    processor_s = time.process_time() - spent
    assert found is not None
    results = found["results"]
    report = {
        "processor_s": processor_s,
        "tokens": model.llm.engine.num_computed_tokens - before,
        "results": {"acc": results["chosen"]["acc,none"], "exact_match": results["answered"]["exact_match,none"]},
        "samples": [[name, repr(one["resps"])] for name in sorted(found["samples"]) for one in found["samples"][name]],
    }
    model.llm.close()
    return report


if __name__ == "__main__":
    main()
