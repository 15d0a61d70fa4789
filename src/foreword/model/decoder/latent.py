"""Attention over one vector a token, from which the keys and values of all heads could be made (arXiv 2405.04434).

Nothing makes them. A head's query is multiplied by the transposed product that would make its keys, so that it meets
the vector itself, and its mixture of vectors by the product that would make its values:

    query . (up_key latent, turned)  =  (up_key^T query, turned query) . (latent, turned)
    sum of weight * (up_value latent)  =  up_value (sum of weight * latent)

So attention sees one KV head, whose values are the first elements of its keys. Prompts and single tokens are computed
alike: a row's bits depend on no other row, as everywhere (docs/decisions/0057-latent-kv.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foreword.model.decoder.linear import HeadLinear, Linear
from foreword.model.decoder.network import Take
from foreword.model.spec import DecoderSpec

RowFunction = Callable[[Tensor], Tensor]


class LatentHeads:
    """A layer's products between its projection and attention, and after attention."""

    def __init__(self, spec: DecoderSpec, up: Tensor, take: Take, norm: Callable[[str, float], RowFunction]) -> None:
        """`up`: the weight `LatentSpec.up`; `norm`: makes a norm of its name and epsilon."""
        assert spec.latent is not None
        own = self._own = spec.latent
        self._norm, self._query_norm, self._query_up = norm(own.norm, own.epsilon), None, None
        if own.query_rank is not None:
            self._query_norm, self._query_up = norm(own.query_norm, own.epsilon), Linear(*take(own.query_up))
        keys, values = torch.split(up.view(spec.num_heads, -1, own.size), [own.plain, own.value], 1)
        self._to_vectors, self._to_values = HeadLinear(keys.transpose(1, 2)), HeadLinear(values)

    @property
    def products(self) -> tuple[Linear | HeadLinear, ...]:
        queries = () if self._query_up is None else (self._query_up,)
        return *queries, self._to_vectors, self._to_values

    def split(self, projected: Tensor, turn: RowFunction) -> tuple[Tensor, Tensor]:
        """Queries [rows, heads, width] and vectors [rows, 1, width] of projections; `turn`: turns heads."""
        own = self._own
        sizes = [projected.shape[1] - own.width, own.size, own.turned]
        queries, latent, key_end = torch.split(projected, sizes, 1)
        if self._query_up is not None:
            assert self._query_norm is not None
            queries = self._query_up(self._query_norm(queries.contiguous()))
        heads = torch.unflatten(queries, 1, (-1, own.plain + own.turned))
        plain, query_ends = torch.split(heads, [own.plain, own.turned], -1)
        ends = turn(torch.cat((query_ends, key_end[:, None]), 1))
        found = projected.new_empty(*plain.shape[:2], own.width)
        self._to_vectors(plain, found[..., : own.size])
        found[..., own.size :] = ends[:, :-1]
        return found, torch.cat((self._norm(latent.contiguous())[:, None], ends[:, -1:]), -1)

    def values(self, mixed: Tensor) -> Tensor:
        """Mixtures of vectors [rows, heads, size] to mixtures of values [rows, heads, value]."""
        found = mixed.new_empty(*mixed.shape[:2], self._own.value)
        self._to_values(mixed, found)
        return found
