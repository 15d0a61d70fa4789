"""Making a plain model fast on a CPU: modules are fused, weights packed, layers joined into programs.

Knows the order: modules are fused while their weights are plain, and layers are tried as they will run. Each part
replaces only code that gave the same bits in a trial; the rest stays transformers' own.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import DynamicCache

from foreword.model.foreign.flat_model import FlatModel
from foreword.model.fusion.chains import chain_layers, unchain_layers
from foreword.model.fusion.layers import fuse_layers
from foreword.model.fusion.modules import fuse
from foreword.model.fusion.packed import pack_linears
from foreword.model.fusion.straight_pass import StraightPass
from foreword.model.layout import LayerLayout


def accelerate(
    model: FlatModel, layers: Mapping[int, LayerLayout], has_states: bool, vocab_size: int
) -> StraightPass | None:
    """Replace parts of a model in place; returns a pass that skips the model's own code, if there is one."""
    module = model.module
    fuse(module)
    pack_linears(module)
    fuse_layers(module, layers)
    if has_states:
        unchain_layers(module)
        return None
    chains = chain_layers(module, lambda context: model.run_two_tokens(context, DynamicCache()))
    return StraightPass.find(model, chains[0], vocab_size) if len(chains) == 1 else None
