"""Host memory below a device's: prefixes that the pool has given away come back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from foreword.cache import KVCacheManager
from foreword.engine import TierDirector
from foreword.model.loader import LoadedModel
from foreword.model.storage import BlockBytes, KVStorage
from foreword.tiers.host.host_tier import HostTier
from model.gpu.device_case import Setup, answers, random_work

NAMESPACE = b"of a fake device"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_small_pool_over_host_memory_answers_as_a_large_one(
    plain_model: Callable[[str], LoadedModel], family: str
) -> None:
    model, work = plain_model(family), random_work(3, 12)
    wanted = answers(Setup(model).engine, work)
    made: list[HostTier] = []

    def make_tiers(manager: KVCacheManager, storage: KVStorage) -> TierDirector:
        memory = BlockBytes(storage)
        place_bytes = max(memory.payload_bytes(group_id) for group_id in range(len(manager.groups)))
        made.append(HostTier(np.zeros(512 * place_bytes, np.uint8), place_bytes))
        return TierDirector(made, memory, manager, NAMESPACE)

    setup = Setup(model, num_blocks=48, max_num_seqs=2, make_tiers=make_tiers)
    for _ in range(2):
        assert answers(setup.engine, work) == wanted
        while setup.engine.store_on():
            pass
        setup.engine.manager.evict_blocks(range(setup.engine.manager.num_blocks))
    report = setup.engine.report_tiers()
    assert report.tiers[0].loads.num_loads > 5
    assert report.tiers[0].loads.num_tokens > 50
    setup.engine.check_integrity()
    made[0].check_integrity()
    setup.engine.close()
