"""Names of linked tokens in block keys: whose KV they hold, and how it was turned.

A block that holds linked tokens has keys of its own, like a block that holds an image: a plain prompt never finds it,
and all keys after it in the chain differ too. So approximate KV cannot mix with exact KV. A run's name says
everything on which its KV depends besides the model, the salt and the tokens before it:

    SHA-256( key of the source's block in which the run ends | first, number of tokens, position )

The source's key stands for all of the source up to there, and for its salt. Tokens that are computed in the prompt need
no name: their KV depends on the tokens before them, which the chain knows, and on their own positions. Where positions
leave a gap, the token after the gap has a name.
"""

from __future__ import annotations

import hashlib

from foreword.cache.keys.hashing import BlockHash, KeyedSpan


def linked_span(source_key: BlockHash, first: int, num_tokens: int, *, index: int, position: int) -> KeyedSpan:
    """The name of a run of `num_tokens` tokens at `index`, from the source's token number `first` on."""
    content = b"%b|%d|%d|%d" % (source_key, first, num_tokens, position)
    return KeyedSpan("link", hashlib.sha256(content).hexdigest(), index, num_tokens)


def jump_span(token_id: int, *, index: int, position: int) -> KeyedSpan:
    """The name of a computed token whose position does not follow that of the token before it.

    It includes the token id: an index of tokens has the span's number in the token's place.
    """
    return KeyedSpan("jump", f"{position}:{token_id}", index, 1)
