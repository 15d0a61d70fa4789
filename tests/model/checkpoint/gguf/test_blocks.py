"""Every type's values are gguf-py's, bit for bit, for any bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from foreword.model.checkpoint.gguf.blocks import BLOCKS


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_gguf_py(kind: int) -> None:
    blocks, rng = BLOCKS[kind], np.random.default_rng(kind)
    assert blocks.name == gguf.GGMLQuantizationType(kind).name
    assert (blocks.num_values, blocks.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    raw = rng.integers(0, 256, (256, blocks.num_bytes * 2), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind))
        found = blocks.expand(raw.reshape(-1, blocks.num_bytes)).reshape(256, -1)
    both_are_none = np.isnan(expected) & np.isnan(found)
    assert ((expected.view(np.uint32) == found.view(np.uint32)) | both_are_none).all()
    assert not both_are_none.all()
