"""Trains the demo model from scratch on one CPU thread, and writes a Hugging Face folder.

    python training/train_recall.py --output weights --seed 1

The schedule counts steps, never seconds, so a seed gives one model per machine type. In phase 1 the model learns to
look facts up in short documents. In phase 2 the documents grow whenever the model masters the present length.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from muon import MuonWithAdamW
from recall_model import MAX_POSITIONS, hidden_states, make_model
from recall_samples import SampleMaker
from recall_tokenizer import build_tokenizer, word_classes

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
TOKENS_PER_BATCH = 2048
MASTERED = 0.95
GAP_SHARE = 2 / 3
MUON_RATE = 0.004
ADAMW_RATE = 1e-3


@dataclass
class Curriculum:
    """Chooses the length of every batch. The longest length grows when the model has mastered it."""

    rng: Random
    phase1_steps: int
    max_length: int
    level: int = 1
    accuracy: float = 0.0
    batches_at_level: int = 0

    def next_length(self, step: int) -> int:
        """Phase 1: one of the two shortest lengths. Phase 2: the longest so far with probability 0.6, else any so
        far."""
        if step < self.phase1_steps:
            return self.rng.choice(LENGTHS[:2])
        if self.rng.random() < 0.6:
            return LENGTHS[self.level]
        return self.rng.choice(LENGTHS[: self.level + 1])

    def observe(self, step: int, length: int, accuracy: float) -> None:
        """Records the token accuracy of a batch, and goes on to the next length if the present one is mastered."""
        if length != LENGTHS[self.level]:
            return
        self.batches_at_level += 1
        self.accuracy += (accuracy - self.accuracy) / min(self.batches_at_level, 30)
        mastered = self.accuracy > MASTERED and self.batches_at_level >= 80
        if mastered and step >= self.phase1_steps and length < self.max_length:
            self.level += 1
            self.accuracy, self.batches_at_level = 0.0, 0


def answer_loss(model: Qwen3ForCausalLM, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, float]:
    """Weighted cross-entropy over learnt tokens, and the accuracy over the tokens with full weight."""
    loss, right, _ = judged_loss(model, batch)
    return loss, right.float().mean().item()


def judged_loss(
    model: Qwen3ForCausalLM, batch: tuple[Tensor, Tensor, Tensor, Tensor], **attention: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy over learnt tokens. For each token with full weight, whether it is right, and its row.

    `attention` goes to the attention of each layer, as in `hidden_states`.
    """
    ids, targets, weights, positions = batch
    learnt = weights > 0
    logits = functional.linear(
        hidden_states(model, ids, positions, **attention)[learnt], model.model.embed_tokens.weight
    )
    wanted = targets[learnt]
    losses = functional.cross_entropy(logits, wanted, reduction="none")
    is_hard = weights[learnt] >= 1
    right = (logits.argmax(-1) == wanted)[is_hard]
    return (losses * weights[learnt]).sum() / weights.sum(), right, learnt.nonzero()[:, 0][is_hard]


def rate_factor(step: int, num_steps: int, decay_steps: int) -> float:
    """Short warm-up, constant middle, linear decay to a twentieth over the last `decay_steps` (or none)."""
    warm = min(1.0, (step + 1) / 20)
    return warm * min(1.0, max(0.05, (num_steps - step) / max(1, decay_steps)))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 weights, configuration and tokenizer as `from_pretrained` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(torch.bfloat16) for name, p in model.state_dict().items()}
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(weights)
    copy.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    copy.save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    (folder / "model.safetensors").chmod(0o644)
    _name_for_older_readers(folder)


def _name_for_older_readers(folder: Path) -> None:
    """Adds the names that transformers 4 and programs like it look for. Newer versions read both names."""
    model_file, tokenizer_file = folder / "config.json", folder / "tokenizer_config.json"
    model_config = json.loads(model_file.read_text())
    model_config["rope_theta"] = model_config["rope_parameters"]["rope_theta"]
    tokenizer_config = json.loads(tokenizer_file.read_text())
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer_config.pop("backend", None)
    model_file.write_text(json.dumps(model_config, indent=2, sort_keys=True) + "\n")
    tokenizer_file.write_text(json.dumps(tokenizer_config, indent=2, sort_keys=True) + "\n")


def train(arguments: argparse.Namespace) -> None:
    """The whole run: tokenizer, model, steps, saved folder."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = Random(arguments.seed)
    tokenizer = build_tokenizer()
    model = make_model(tokenizer, word_classes(tokenizer))
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, vocabulary {len(tokenizer)}", flush=True)
    samples = SampleMaker(tokenizer, rng, MAX_POSITIONS, GAP_SHARE)
    curriculum = Curriculum(rng, arguments.phase1_steps, arguments.max_length)
    optimizer = MuonWithAdamW(model)
    started = time.monotonic()
    for step in range(arguments.steps):
        length = curriculum.next_length(step)
        loss, accuracy = answer_loss(model, samples.batch(length, max(1, TOKENS_PER_BATCH // length)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = rate_factor(step, arguments.steps, arguments.decay_steps)
        optimizer.step(MUON_RATE * factor, ADAMW_RATE * factor)
        curriculum.observe(step, length, accuracy)
        if step % 25 == 24:
            record = {
                "step": step + 1,
                "seconds": round(time.monotonic() - started),
                "loss": round(loss.item(), 4),
                "length": LENGTHS[curriculum.level],
                "accuracy": round(curriculum.accuracy, 4),
            }
            print(json.dumps(record), flush=True)
        if step % 500 == 499:
            save(model, tokenizer, arguments.output)
    save(model, tokenizer, arguments.output)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--phase1-steps", type=int, default=200)
    parser.add_argument("--decay-steps", type=int, default=200)
    parser.add_argument("--max-length", type=int, default=4096, choices=LENGTHS)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
