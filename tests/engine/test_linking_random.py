"""The random driver with linked prompts among plain ones: every answer is what its composition and method say.

Half of the episodes draft. The runner stores a number for each token. A linked token's is that of its source, moved; so
a copy from a block that was given away, a link to another tenant's source, or a plain prompt that finds linked tokens
changes an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from drafters import draft_as_told, random_guess
from foreword.cache import ExtraKeys
from foreword.engine import Prompt
from foreword.errors import RequestTooLargeError
from foreword.request import LinkedRun, Links
from lanes import more_seeds
from random_driver import MAX_MODEL_LEN, VOCAB_SIZE, Driver, Submitted

NUM_EPISODES = 8
NUM_OPERATIONS = 300


@dataclass
class Seen:
    """That what is rare happened at all, over all episodes."""

    linked: int = 0
    copied: int = 0
    found_composed: int = 0
    with_gaps: int = 0
    several_runs_of_a_part: int = 0
    too_large: int = 0
    drafted: int = 0


SEEN = Seen()


@dataclass
class LinkingDriver(Driver):
    """Half of its prompts are made of modules, of which there are few."""

    modules: list[list[int]] = field(default_factory=list)
    earlier: list[tuple[list[int], Links]] = field(default_factory=list)

    def start(self) -> None:
        self.modules = [self.rng.integers(0, VOCAB_SIZE, int(self.rng.integers(1, 10))).tolist() for _ in range(4)]
        while True:
            super().start()
            if self.parts.manager.enable_prefix_caching:
                break
        if self.rng.random() < 0.5:
            draft_as_told(self.parts.engine, random_guess(self.rng, VOCAB_SIZE), int(self.rng.integers(1, 9)))

    def submit(self) -> Any:
        if len(self.live) > 12 or self.rng.random() < 0.5:
            return super().submit()
        if not self.earlier or self.rng.random() < 0.5:
            self.earlier = [*self.earlier[-3:], self._composed()]
        prompt, links = self.earlier[int(self.rng.integers(len(self.earlier)))]
        params = self._params(MAX_MODEL_LEN - int(links.positions[-1]) - 1)
        salt = str(self.rng.choice(["red", "blue"])) if self.rng.random() < 0.2 else None
        request_id = f"request-{self.num_submitted}"
        self.num_submitted += 1
        owner = str(self.rng.choice(["ada", "bob"])) if self.rng.random() < 0.5 else None
        asked = Prompt(
            np.array(prompt, np.int32), None, ExtraKeys(salt=salt), int(self.rng.integers(3)), links=links, owner=owner
        )
        try:
            output = self.parts.engine.add_request(request_id, asked, params)
        except RequestTooLargeError:
            SEEN.too_large += 1
            return None
        SEEN.linked += 1
        SEEN.with_gaps += links.has_gaps
        SEEN.several_runs_of_a_part += len(links.runs) > len(links.spans)
        whole = links.in_whole_blocks(self.parts.manager.block_size)
        self.live[request_id] = Submitted(prompt, params, salt, output, whole)
        return None

    def _composed(self) -> tuple[list[int], Links]:
        """Modules and text in random order, with gaps; some modules stand behind another one in their source."""
        tokens: list[int] = []
        positions: list[int] = []
        runs: list[LinkedRun] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for _ in range(int(self.rng.integers(1, 4))):
            text = self.rng.integers(0, VOCAB_SIZE, int(self.rng.integers(0, 3))).tolist()
            module = self.modules[int(self.rng.integers(len(self.modules)))]
            scaffold = self.modules[0][: int(self.rng.integers(3))] if self.rng.random() < 0.3 else []
            begin, gap = len(tokens) + len(text), int(self.rng.choice([0, 0, 2]))
            tokens += text + module
            positions += [*range(at, at + len(text)), *range(at + len(text) + gap, at + len(text) + gap + len(module))]
            at = positions[-1] + 1
            spans.append((begin, len(tokens)))
            first = int(self.rng.integers(0, 3))
            if first < len(module):
                source = np.array(scaffold + module, np.int32)
                runs.append(LinkedRun(begin + first, len(tokens), source, len(scaffold) + first))
        tokens.append(int(self.rng.integers(VOCAB_SIZE)))
        positions.append(at)
        links = Links("first-k", tuple(runs), np.array(positions, np.int32), tuple(spans))
        if self.rng.random() < 0.4:
            links = links.without(self.rng.random(len(tokens)) < 0.3)
        return tokens, links

    def step(self) -> None:
        before = dict(self.live)
        super().step()
        for submitted in before.values():
            report = submitted.output.link
            if report is not None and submitted.output.finished:
                self._check_report(submitted)

    def _check_report(self, submitted: Submitted) -> None:
        report, links = submitted.output.link, submitted.links
        assert report is not None
        assert links is not None
        told = report.linked_tokens + report.recomputed_tokens + report.computed_tokens + report.cached_tokens
        assert told == len(submitted.prompt)
        assert report.linked_tokens == links.num_linked_tokens
        SEEN.copied += report.copied_tokens > 0
        SEEN.found_composed += report.copied_tokens < report.linked_tokens
        SEEN.drafted += any(one.drafts.num_accepted > 0 for one in submitted.output.outputs)


@pytest.mark.parametrize("seed", range(NUM_EPISODES))
def test_every_linked_answer_is_right_whatever_happens_around_it(seed: int) -> None:
    LinkingDriver(seed).run(NUM_OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", more_seeds(2000, 10))
def test_every_linked_answer_is_right_in_many_more_episodes(seed: int) -> None:
    LinkingDriver(seed).run(2 * NUM_OPERATIONS)


def test_the_episodes_covered_what_is_rare() -> None:
    if SEEN.linked < 10 * NUM_EPISODES:
        pytest.skip("only meaningful after all episodes")
    rare = {name: count for name, count in vars(SEEN).items() if count < 15}
    assert not rare, "hardly ever happened"
