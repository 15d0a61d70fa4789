"""What adapters add to rows: the right numbers, and bits that depend on no other row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foreword.model.adapters.rows import AdaptedRows
from foreword.model.adapters.weights import AdapterWeights, LowRank, places
from foreword.model.spec import DecoderSpec, LayerSpec, NormSpec, RotarySpec

Q, V, OUT = (f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj"))


def spec_of(hidden: int, heads: int, head_dim: int) -> DecoderSpec:
    return DecoderSpec(
        "llama",
        hidden,
        32,
        heads,
        heads,
        head_dim,
        64,
        (LayerSpec(),),
        (RotarySpec(1e4, head_dim),),
        NormSpec(1e-6),
        1.0,
    )


def adapter(spec: DecoderSpec, names: list[str], rank: int, seed: int) -> tuple[AdapterWeights, dict[str, LowRank]]:
    rng, found = np.random.default_rng(seed), places(spec)
    changes = {
        name: LowRank(
            rng.standard_normal((rank, found[name].inputs), np.float32),
            rng.standard_normal((found[name].width, rank), np.float32),
            0.5 * rank,
            b"",
        )
        for name in names
    }
    return AdapterWeights(spec, changes, None), changes


# The second has widths that fill no vector: parts begin and end inside one.
@pytest.mark.parametrize("shape", [(64, 4, 16), (52, 3, 12)])
def test_each_part_gets_its_product(shape: tuple[int, int, int]) -> None:
    spec = spec_of(*shape)
    width = shape[1] * shape[2]
    adapters, changes = zip(*(adapter(spec, names, rank, rank) for names, rank in (([Q, V], 3), ([V], 8))), strict=True)
    rows, result = torch.randn(7, shape[0]), torch.randn(7, 3 * width)
    numbers = [0, -1, 1, 1, 0, 0, -1]
    added = AdaptedRows(adapters, np.array(numbers)).layer(0)
    assert added.output is added.gate is added.down is None
    assert added.project is not None
    found = added.project.add(rows, result.clone())
    for row, number in enumerate(numbers):
        wanted = result[row].double().numpy()
        for name, change in changes[number].items() if number >= 0 else ():
            first = {Q: 0, V: 2 * width}[name]
            delta = change.scale * (change.up.astype(np.float64) @ (change.down.astype(np.float64) @ rows[row].numpy()))
            wanted[first : first + width] += delta
        np.testing.assert_allclose(found[row].numpy(), wanted, rtol=1e-5, atol=1e-4)
        if number < 0:
            assert torch.equal(found[row], result[row])


def test_a_rows_bits_depend_on_no_other_row_and_no_other_adapter() -> None:
    spec = spec_of(576, 9, 64)
    adapters = [adapter(spec, [Q, V], rank, seed)[0] for seed, rank in enumerate((16, 5, 1))]
    rows, result = torch.randn(511, 576), torch.randn(511, 3 * 576)
    numbers = np.random.default_rng(1).integers(-1, 3, 511)
    alone = torch.cat(
        [
            AdaptedRows(adapters, numbers[row : row + 1])
            .layer(0)
            .project.add(rows[row : row + 1], result[row : row + 1].clone())  # type: ignore[union-attr]
            for row in range(511)
        ]
    )
    for count in [*range(1, 65), 100, 511]:
        added = AdaptedRows(adapters, numbers[:count]).layer(0).project
        assert added is not None
        assert torch.equal(added.add(rows[:count], result[:count].clone()), alone[:count]), f"{count} rows"
    only = AdaptedRows(adapters[:1], np.where(numbers == 0, 0, -1)).layer(0).project
    assert only is not None
    own = numbers == 0
    assert torch.equal(only.add(rows, result.clone())[own], alone[own])


def test_rows_of_another_type_are_rounded_once_and_others_keep_their_bits() -> None:
    spec = spec_of(64, 4, 16)
    weights, changes = adapter(spec, [OUT], 4, 0)
    rows, result = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    result[1, :8] = -0.0
    added = AdaptedRows([weights], np.array([0, -1, 0])).layer(0).output
    assert added is not None
    found = added.add(rows, result.clone())
    assert torch.equal(found[1].view(torch.int16), result[1].view(torch.int16))
    change = changes[OUT]
    delta = rows.float() @ torch.from_numpy(change.down).T @ torch.from_numpy(change.up).T * change.scale
    torch.testing.assert_close(found[::2], (result.float() + delta).bfloat16()[::2])
