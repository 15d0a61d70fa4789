"""A runner whose results come late, for tests of what the engine does meanwhile."""

from __future__ import annotations

from foreword.batch import Batch, BatchResult
from hash_runner import HashRunner

VOCAB_SIZE = 50


class LaunchedStep:
    """Computed when its result is asked for."""

    def __init__(self, runner: LateRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self._draws = runner.inner.plan(batch)

    def is_ready(self) -> bool:
        return self._runner.always_ready

    def result(self) -> BatchResult:
        self._runner.log.append("result")
        self._runner.num_in_flight -= 1
        return self._runner.compute(self._batch, self._draws)


class LateRunner:
    """Computes a batch as late as it may, as a device does at the worst."""

    def __init__(self, inner: HashRunner) -> None:
        self.inner = inner
        self.always_ready = False
        self.log: list[str] = []
        self.num_in_flight = 0
        self.fail_at: int | None = None
        self.refuses = False
        self.num_computed = 0
        self.num_behind = 0
        """Batches that were launched before the tokens that they expect were known."""

    def execute(self, batch: Batch) -> BatchResult:
        raise AssertionError("the engine launches if it can")

    def launch(self, batch: Batch) -> LaunchedStep:
        assert self.num_in_flight < 2, "one batch is computed, and one waits for it"
        if self.refuses:
            raise RuntimeError("out of memory")
        self.num_in_flight += 1
        self.log.append("launch")
        self.num_behind += bool(len(batch.expected))
        return LaunchedStep(self, batch)

    def compute(self, batch: Batch, draws: list[tuple[int, int] | None]) -> BatchResult:
        self.num_computed += 1
        if self.num_computed == self.fail_at:
            raise RuntimeError("device-side assert")
        return self.inner.compute(batch, draws)
