"""Joining fused layers that follow each other into one program.

Knows fused layers and programs; `neighbours.py` finds out which layers follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from foreword.model.cpu.layer_program import LayerChain, LayerOperations, Workspace
from foreword.model.foreign.trial import attempt
from foreword.model.fusion.fused_layer import FusedForward
from foreword.model.fusion.neighbours import Neighbours


def chain_layers(module: nn.Module, run: Callable[[Any], object]) -> list[LayerChain]:
    """Let fused layers that follow each other run as one program; returns all programs.

    `run` runs the model with a stand-in for a step's context. If that fails, each layer gets its own program.
    """

    def chains() -> list[list[LayerOperations]]:
        neighbours = Neighbours()
        with neighbours:
            run(neighbours)
        return neighbours.chains()

    return _put_in_chains(module, attempt(chains, "the operations between the layers are not known") or [])


def unchain_layers(module: nn.Module) -> None:
    """Let each layer run by itself."""
    _put_in_chains(module, [])


def _put_in_chains(module: nn.Module, chains: list[list[LayerOperations]]) -> list[LayerChain]:
    """Make a program of each chain, and of each layer outside all chains."""
    forwards = {
        forward.operations: forward
        for layer in module.modules()
        if isinstance(forward := layer.forward, FusedForward) and forward.operations is not None
    }
    workspace, chained = Workspace(), {layer for chain in chains for layer in chain}
    for layer in forwards:
        workspace.widen(*layer.sizes())
    made = []
    for layers in (*chains, *([layer] for layer in forwards if layer not in chained)):
        chain = LayerChain(layers, workspace)
        made.append(chain)
        for layer in layers:
            forwards[layer].chain = chain
        following = forwards[layers[-1]].following
        if following is not None and following.operations is not None:
            layers[-1].hand_to(following.operations)
    return made
