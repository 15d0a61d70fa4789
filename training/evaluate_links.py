"""Measures exact match of the models that test linking, by task and length, through transformers alone.

    python training/evaluate_links.py training/link_judges/plain --questions 200

Every question belongs to a fresh case of `foreword.demo.tasks` in four parts, and comes first in its conversation.
`plain` is the model's usual attention. In `linked`, each part is computed right after the head, and its keys are
rotated to their positions in the prompt. In `not turned`, the keys keep the positions at which they were computed. An
answer counts if all its tokens and the end token have the highest logit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from foreword.demo import tasks
from link_attention import linked, use_linked_attention
from link_samples import TASK_WEIGHTS, part_bounds, parts_of
from recall_model import hidden_states

LENGTHS = (256, 512, 1024, 2048)
NUM_PARTS = 4
KINDS = ("plain", "linked", "not turned")


@torch.inference_mode()
def is_right(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, case: tasks.Case, kind: str = "plain"
) -> bool:
    """Whether greedy decoding answers the case's question to the character."""
    encode = tokenizer.backend_tokenizer.encode
    messages = case.conversation("user")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    ids, begin = encode(text).ids, len(encode(prompt).ids)
    end = ids.index(tokenizer.eos_token_id, begin)
    ids = ids[: end + 1]
    parts = torch.tensor([parts_of(part_bounds(encode, case, text), end)])
    positions = torch.arange(end)[None]
    how = None if kind == "plain" else linked(model, parts, positions, is_turned=kind == "linked")
    hidden = hidden_states(model, torch.tensor([ids[:-1]]), positions if how is None else how.positions, linked=how)
    return bool(model.lm_head(hidden[0, begin - 1 :]).argmax(-1).tolist() == ids[begin:])


def main() -> None:
    """Read the command line, evaluate, print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face folder")
    parser.add_argument("--questions", type=int, default=200, help="questions per task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    use_linked_attention(model)
    found: dict[str, dict[str, float]] = {}
    print("| task | attention | " + " | ".join(map(str, arguments.lengths)) + " |")
    print("|---|---|" + "---|" * len(arguments.lengths))
    for task in TASK_WEIGHTS:
        for kind in KINDS:
            row = found[f"{task}, {kind}"] = {}
            for length in arguments.lengths:
                rng = Random(f"{task} {length} {arguments.seed}")
                right = 0
                for _ in range(arguments.questions):
                    case = tasks.draw(rng, task, num_tokens=length - 40, num_parts=NUM_PARTS)
                    right += is_right(model, tokenizer, case, kind)
                row[str(length)] = round(100 * right / arguments.questions, 1)
            print(f"| {task} | {kind} | " + " | ".join(f"{share}%" for share in row.values()) + " |", flush=True)
    print(json.dumps({"questions": arguments.questions, "exact_match": found}))


if __name__ == "__main__":
    main()
