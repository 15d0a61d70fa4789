"""The models that judge linking answer the tasks that they were trained on, with the plain prompt."""

from __future__ import annotations

import importlib
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from foreword.demo import tasks

NUM_QUESTIONS = 40
LEAST = {"independent": 0.95, "order": 0.8, "scope": 0.9, "hops": 0.95}
"""Least shares of right answers: below the model card's figures by about two standard deviations or more."""


@pytest.mark.slow
@pytest.mark.parametrize("judge", ["plain", "linked"])
def test_a_judge_answers_as_well_as_its_card_says(request: pytest.FixtureRequest, judge: str) -> None:
    folder = request.config.rootpath / "training/link_judges" / judge
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.config.rootpath / "training")
        is_right = importlib.import_module("evaluate_links").is_right
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for task, least in LEAST.items():
        rng = Random(f"test {task}")
        right = sum(
            is_right(model, tokenizer, tasks.draw(rng, task, num_tokens=472, num_parts=4)) for _ in range(NUM_QUESTIONS)
        )
        assert right >= least * NUM_QUESTIONS, f"{task}: {right} of {NUM_QUESTIONS}"
