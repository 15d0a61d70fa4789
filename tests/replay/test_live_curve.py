"""The live curve against LRU itself, run block by block at every capacity."""

from collections import OrderedDict

import numpy as np
import pytest

from foreword.errors import ConfigError
from foreword.replay.curve import LiveLruCurve
from foreword.replay.keys import chain, content_ids_of_tokens

BLOCK = 4
FACTORS = (1, 1.25, 1.5, 2, 3, 4, 6, 8)


def conversations(seed: int, count: int, documents: int) -> list[tuple[np.ndarray, int]]:
    """Questions about documents of Zipf popularity, some asked on: all tokens, and those of the prompt."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 1000, rng.integers(10, 120)) for _ in range(documents)]
    popularity = 1 / np.arange(1, documents + 1) ** 0.8
    open_ones: list[np.ndarray] = []
    asked = []
    for _ in range(count):
        if open_ones and rng.random() < 0.4:
            told = open_ones.pop(rng.integers(len(open_ones)))
        else:
            told = texts[rng.choice(documents, p=popularity / popularity.sum())]
        prompt = np.concatenate((told, rng.integers(0, 1000, rng.integers(1, 12))))
        whole = np.concatenate((prompt, rng.integers(0, 1000, rng.integers(1, 20))))
        asked.append((whole, len(prompt)))
        if rng.random() < 0.5:
            open_ones.append(whole)
    return asked


def hit_rate_of_lru(asked: list[tuple[np.ndarray, int]], capacity: int) -> float:
    """A cache of so many blocks that evicts the one used longest ago, tails before heads."""
    held: OrderedDict[int, None] = OrderedDict()
    found = tokens = 0
    for whole, num_prompt in asked:
        keys = chain(content_ids_of_tokens(whole[: len(whole) // BLOCK * BLOCK], BLOCK)).tolist()
        for key in keys[: num_prompt // BLOCK]:
            if key not in held:
                break
            found += BLOCK
        tokens += num_prompt
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > capacity:
            held.popitem(last=False)
    return found / tokens


def curve_of(asked: list[tuple[np.ndarray, int]], pool: int, **options: int) -> LiveLruCurve:
    curve = LiveLruCurve([int(pool * factor) for factor in FACTORS], block_tokens=BLOCK, **options)
    for whole, num_prompt in asked:
        curve.admit(chain(content_ids_of_tokens(whole[: len(whole) // BLOCK * BLOCK], BLOCK)), num_prompt)
    return curve


def test_a_small_cache_is_followed_block_by_block_and_the_curve_is_lrus_own():
    asked = conversations(0, 2000, documents=200)
    points = curve_of(asked, pool=200).points()
    expected = [hit_rate_of_lru(asked, point.num_blocks) for point in points]
    assert [point.hit_rate for point in points] == pytest.approx(expected)
    assert expected[-1] > 1.5 * expected[0], "the workload does not tell these capacities apart"
    assert not any(point.standard_error for point in points)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1)])
def test_a_sample_is_within_a_few_of_its_standard_errors_of_lru(seed):
    asked = conversations(seed, 6000, documents=2000)
    curve = curve_of(asked, pool=2000, max_sampled_blocks=2000)
    assert curve.sampling_rate == 1 / 8
    points = curve.points()
    expected = [hit_rate_of_lru(asked, point.num_blocks) for point in points]
    for point, exact in zip(points, expected, strict=True):
        assert 0 < point.standard_error < 0.05
        assert abs(point.hit_rate - exact) < 4 * point.standard_error
    assert expected[-1] > 1.3 * expected[0]


@pytest.mark.slow
def test_the_sample_stays_within_its_size_however_long_traffic_goes_on():
    asked = conversations(1, 3000, documents=4000)
    curve = curve_of(asked, pool=100, max_sampled_blocks=400)
    assert 400 <= len(curve._stack) <= 500
    expected = [hit_rate_of_lru(asked, point.num_blocks) for point in curve.points()]
    for point, exact in zip(curve.points(), expected, strict=True):  # what was forgotten could be no hit
        assert abs(point.hit_rate - exact) <= 4 * point.standard_error


def test_old_traffic_fades():
    once = [(np.arange(number * 40, number * 40 + 40), 40) for number in range(500)]
    again = [(np.arange(40), 40)] * 500
    lasting, fading = curve_of(once + again, 100), curve_of(once + again, 100, window_blocks=1000)
    assert lasting.points()[0].hit_rate == pytest.approx(0.5, abs=0.01)
    assert fading.points()[0].hit_rate > 0.8
    fading.reset()
    assert fading.points() == []


def test_answers_can_be_found_by_later_prompts_but_are_not_looked_for():
    first, later = np.arange(16), np.arange(32)
    curve = curve_of([(first, 8), (later, 32)], 100)
    assert curve.points()[0].hit_rate == pytest.approx(16 / 40)


@pytest.mark.parametrize("options", [{"max_sampled_blocks": 0}, {"window_blocks": 0}])
def test_impossible_sizes_are_refused(options):
    with pytest.raises(ConfigError, match="at least 1"):
        LiveLruCurve([1], block_tokens=BLOCK, **options)
    for capacities in ([], [0], [2, 1]):
        with pytest.raises(ConfigError, match="ascending"):
            LiveLruCurve(capacities, block_tokens=BLOCK)
