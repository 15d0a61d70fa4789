"""Packing of a chunk's keys and values, compiled by numba: vectors of 16 tokens of keys or 16 dimensions of values."""

from __future__ import annotations

from typing import Any

from foreword.kernels.cpu.layout import IN_PAIRS, KV_PANEL, TILES, WIDENED
from foreword.kernels.kv_format import SCALE_BYTES
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.simd import (
    copy_bytes,
    interleave,
    interleave_codes,
    load_int,
    store_int,
    transpose_code_pairs,
    transpose_codes,
    transpose_widened,
    transpose_words,
    widen,
    widen_codes,
)
from foreword.kernels.runtime.compiled import inlined
from foreword.kernels.step_plan import CHUNK


@inlined
def _stage(s: Any, rows: int, start: int, stop: int, offset: int, num_bytes: int, padded_bytes: int) -> None:
    """Copy one head of some tokens, whose size is no multiple of a vector, and pad it with zeros."""
    zeros, stage = s.zeros, s.stage
    for token in range(start, stop):
        target = stage + token * padded_bytes
        copy_bytes(target, load_int(rows + 8 * token) + offset, num_bytes)
        copy_bytes(target + num_bytes, zeros, padded_bytes - num_bytes)
        store_int(s.staged_rows + 8 * token, target)


@inlined
def pack_keys(a: Any, s: Any, kv_head: int, start: int, stop: int) -> None:
    """Pack keys in panels of 64 tokens, [words, 64] each; codes are decoded to the words' type."""
    mode, dim, item_bytes, num_words = a.mode, a.key_dim, a.stored_bytes, a.key_words
    row_bytes = num_words * (2 if mode in IN_PAIRS else 1) * item_bytes
    scales, scale_offset = s.key_scales, SCALE_BYTES * kv_head
    rows, offset = s.key_rows, kv_head * dim * item_bytes
    if dim * item_bytes != row_bytes:
        _stage(s, rows, start, stop, offset, dim * item_bytes, row_bytes)
        rows, offset = s.staged_rows, 0
    packed = s.packed_keys
    for token in range(start, stop, LANES):
        panel = packed + token // KV_PANEL * num_words * 4 * KV_PANEL + token % KV_PANEL * 4
        for word in range(0, num_words, LANES):
            target = panel + word * 4 * KV_PANEL
            if item_bytes == 1 and mode in IN_PAIRS:
                transpose_code_pairs(
                    rows + 8 * token, offset + 2 * word, scales + 8 * token, scale_offset, target, 4 * KV_PANEL
                )
            elif item_bytes == 1:
                transpose_codes(rows + 8 * token, offset + word, scales + 8 * token, scale_offset, target, 4 * KV_PANEL)
            elif mode == WIDENED:
                transpose_widened(rows + 8 * token, offset + 2 * word, target, 4 * KV_PANEL)
            else:
                transpose_words(rows + 8 * token, offset + 4 * word, target, 4 * KV_PANEL)


@inlined
def pack_values(a: Any, s: Any, kv_head: int, start: int, stop: int) -> None:
    """Pack values in panels of 64 dimensions (the last may have 32), [tokens or pairs of tokens, 64] each."""
    mode, dim, item_bytes, width = a.mode, a.value_dim, a.stored_bytes, a.value_width
    rows, offset = s.value_rows, kv_head * dim * item_bytes
    if dim != width:
        _stage(s, rows, start, stop, offset, dim * item_bytes, width * item_bytes)
        rows, offset = s.staged_rows, 0
    packed = s.packed_values
    together = 2 if mode in IN_PAIRS else 1
    for first in range(0, width, KV_PANEL):
        lanes = min(KV_PANEL, width - first)
        panel = packed + first * 4 * (CHUNK // together)
        for token in range(start, stop, together):
            source = load_int(rows + 8 * token) + offset + first * item_bytes
            place = token // together
            if mode == TILES:  # as two vectors of weights become one: two pairs of each alternate
                place = place & -16 | place & 1 | (place & 6) << 1 | (place & 8) >> 2
            target = panel + place * lanes * 4
            if item_bytes == 1:
                scale = load_int(s.value_scales + 8 * token) + SCALE_BYTES * kv_head
                if together == 2:
                    other = load_int(rows + 8 * token + 8) + offset + first
                    other_scale = load_int(s.value_scales + 8 * token + 8) + SCALE_BYTES * kv_head
                    interleave_codes(source, other, scale, other_scale, target, lanes)
                else:
                    widen_codes(target, source, scale, lanes)
            elif together == 2:
                other = load_int(rows + 8 * token + 8) + offset + first * 2
                interleave(source, other, target)
                if lanes == KV_PANEL:
                    interleave(source + 64, other + 64, target + 128)
            elif mode == WIDENED:
                widen(target, source, lanes)
            else:
                copy_bytes(target, source, lanes * 4)
