"""Trains the two models that test linking, on one CPU thread each, and writes Hugging Face folders.

    python training/train_links.py --output plain
    python training/train_links.py --output linked --linked-share 0.5

Both models see the same data in the same steps. From the step `--linked-from` on, in a `--linked-share` of the batches,
the parts of a document do not see each other (after Block-Attention, Ma et al., 2024). Each part is computed right
after the head, and its keys are rotated to their positions for the tokens after the parts, as linking does
(`link_attention`). The schedule counts steps, never seconds.

The task of two hops is trained first, alone. When it was trained with other tasks from the start, layer 3 learnt to
look for the question's attribute, and never learnt to look for the person.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from foreword.demo import recall
from link_attention import use_linked_attention
from link_model import make_link_model
from link_samples import TASK_WEIGHTS, Batch, LinkSampleMaker
from muon import MuonWithAdamW
from recall_tokenizer import END, build_tokenizer, word_classes
from train_recall import judged_loss, rate_factor, save

LENGTHS = (128, 256, 512, 1024, 2048)
TOKENS_PER_BATCH = 2048
MAX_POSITION = 4096
GAP_SHARE = 1 / 3
MUON_RATE = 0.004
ADAMW_RATE = 1e-3
HOPS_RATE = 0.5
"""The factor of the learning rates while two hops are learnt alone. 0.15 works too; 1 was not tried."""


def link_words(tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    """The token ids of the word classes that the draft of the circuit distinguishes."""
    known = word_classes(tokenizer)
    outer = recall.NUMBER_ATTRIBUTES + recall.CITY_ATTRIBUTES
    classes = dict(zip(("attribute", "adjective", "noun"), known.keys, strict=True))
    classes["value"] = known.values
    for flag, words in (
        ("name", recall.NAMES),
        ("outer", [f" {word}" for word in outer]),
        ("after_place", [":", "?", END]),
    ):
        classes[flag] = [tokenizer.encode(word)[0] for word in words]
    return classes


class Progress:
    """Running means of token accuracy, by task and mask."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def observe(self, batch: Batch, right: torch.Tensor, rows: torch.Tensor, kind: str) -> None:
        for task in TASK_WEIGHTS:
            own = right[torch.tensor([name == task for name in batch.tasks])[rows]]
            if len(own):
                name = f"{task}{kind}"
                self.counts[name] = self.counts.get(name, 0) + 1
                mean = self.means.get(name, 0.0)
                self.means[name] = mean + (own.float().mean().item() - mean) / min(self.counts[name], 25)


def draw_length(rng: Random, step: int, grow: list[int]) -> int:
    """Draws a length. The longest allowed one is used in half of the steps. It grows at the steps `grow`."""
    level = 2 + sum(step >= at for at in grow)
    longest = LENGTHS[: level + 1]
    return longest[-1] if rng.random() < 0.5 else rng.choice(longest)


def train(arguments: argparse.Namespace) -> None:
    """The whole run: tokenizer, model, steps, saved folder."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng, mask_rng = Random(arguments.seed), Random(f"masks {arguments.seed}")
    tokenizer = build_tokenizer()
    model = make_link_model(tokenizer, link_words(tokenizer))
    use_linked_attention(model)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    samples = LinkSampleMaker(tokenizer, rng, MAX_POSITION, GAP_SHARE)
    optimizer = MuonWithAdamW(model)
    progress, started = Progress(), time.monotonic()
    for step in range(arguments.steps):
        length = draw_length(rng, step, arguments.grow)
        alone = step < arguments.hops_first
        batch = samples.link_batch(length, TOKENS_PER_BATCH // length, {"hops": 1} if alone else TASK_WEIGHTS)
        is_linked = mask_rng.random() < arguments.linked_share and step >= arguments.linked_from
        batch = batch.linked(model) if is_linked else batch
        loss, right, rows = judged_loss(model, batch.tensors, linked=batch.how)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = rate_factor(step, arguments.steps, arguments.decay_steps) * (HOPS_RATE if alone else 1.0)
        optimizer.step(MUON_RATE * factor, ADAMW_RATE * factor)
        progress.observe(batch, right, rows, " linked" if is_linked else "")
        if step % 25 == 24:
            means = {name: round(mean, 3) for name, mean in sorted(progress.means.items())}
            print(
                json.dumps(
                    {"step": step + 1, "s": round(time.monotonic() - started), "loss": round(loss.item(), 3)} | means
                ),
                flush=True,
            )
        if step % 100 == 99:
            save(model, tokenizer, arguments.output)
    save(model, tokenizer, arguments.output)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--decay-steps", type=int, default=800)
    parser.add_argument("--hops-first", type=int, default=150, help="number of first steps, which teach two hops alone")
    parser.add_argument("--grow", type=int, nargs="*", default=[500, 1000])
    parser.add_argument("--linked-share", type=float, default=0.0, help="share of the later batches that are linked")
    parser.add_argument("--linked-from", type=int, default=800, help="step from which on batches are linked")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: give at least 1")
    if not 0.0 <= arguments.linked_share <= 1.0:
        parser.error(f"--linked-share {arguments.linked_share}: give a share from 0 to 1")
    train(arguments)


if __name__ == "__main__":
    main()
