"""What the fake device must do for the tests on it to mean anything."""

from __future__ import annotations

import pytest
import torch

from fake_device import FakeDevice


def test_what_reads_results_while_it_is_recorded_is_refused_as_by_cuda() -> None:
    values = torch.arange(3.0)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        FakeDevice().capture(lambda: print(values.sum().item()))


def test_a_graph_reads_its_memory_and_not_what_the_host_had() -> None:
    """What the fake device must do for the other tests to mean anything."""
    source, target = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def work() -> None:
        target.copy_((source * 10).view(1, 2)[0] + 1)

    graph = FakeDevice().capture(work)
    source.copy_(torch.tensor([5.0, 6.0]))
    graph.replay()
    assert target.tolist() == [51.0, 61.0]
