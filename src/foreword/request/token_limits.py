"""TokenLimits: the tokens that an answer's parameters allow next.

All rules that forbid tokens apply here, on the host, so that the engine notices when no token is left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from foreword.errors import InvalidRequestError
from foreword.request.sampling_params import SamplingParams

BoolArray = npt.NDArray[np.bool_]


class TokenLimits:
    """The tokens that all answers to one prompt may contain."""

    def __init__(
        self,
        vocab_size: int,
        stop_token_ids: Collection[int],
        *,
        end_token_ids: Collection[int] = (),
        allowed: Collection[int] | None = None,
        forbidden: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """`end_token_ids` are the model's, for an answer that can only end; each bad word is a sequence of tokens."""
        self._vocab_size = vocab_size
        self._stop = _ids(stop_token_ids)
        self._end = _ids(stop_token_ids or end_token_ids)
        self._allowed = None if allowed is None else _ids(allowed)
        self._forbidden = _ids([*forbidden, *(word[0] for word in bad_words if len(word) == 1)])
        self.bad_words = tuple(tuple(word) for word in bad_words if len(word) > 1)
        """Bad words of several tokens: the last token may not follow the others."""

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        vocab_size: int,
        stop_token_ids: Collection[int],
        *,
        end_token_ids: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> TokenLimits | None:
        """The limits of a request; None if only a bias and `min_tokens` apply, which need no mask.

        Raises InvalidRequestError for parameters that allow no first token.
        """
        forbidden = [token_id for token_id, bias in params.logit_bias.items() if bias == -math.inf]
        names = ("allowed_token_ids", "bad_words", "logit_bias", "stop_token_ids")
        given = [name for name in names if getattr(params, name)]
        needs_mask = params.allowed_token_ids is not None or bad_words or (forbidden and params.open_constraint)
        stops = set(stop_token_ids) if params.min_tokens else set()
        if not needs_mask and len({*forbidden, *stops}) < vocab_size:
            return None
        limits = cls(
            vocab_size,
            stop_token_ids,
            end_token_ids=end_token_ids,
            allowed=params.allowed_token_ids,
            forbidden=forbidden,
            bad_words=bad_words,
        )
        first = limits._without_answer()
        if not first.any():
            raise InvalidRequestError(f"no token is left by {' and '.join(given)}; allow at least one")
        first[list(stops)] = False
        if not first.any() and params.open_constraint is None:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} forbids the end, and nothing else is left by {' and '.join(given)}; "
                "lower min_tokens, or allow a token that does not end the answer"
            )
        if not len(limits._end):
            first[[word[-1] for word in limits.bad_words]] = False
            if not first.any():
                raise InvalidRequestError(
                    "every token that is allowed ends one of the bad_words, and the model has no end token; allow "
                    "another token, or give stop_token_ids"
                )
        return limits

    def _without_answer(self) -> BoolArray:
        """Tokens that may come anywhere in an answer, [vocab]."""
        allowed = np.ones(self._vocab_size, np.bool_)
        if self._allowed is not None:
            allowed[:] = False
            allowed[self._allowed] = True
        allowed[self._forbidden] = False
        return allowed

    def narrow(self, mask: BoolArray | None, answer: Sequence[int], *, needs_more: bool) -> BoolArray | None:
        """The tokens of `mask` (None: all) that may follow an answer, [vocab]; None if none may.

        An answer that `needs_more` tokens does not end, unless only ending tokens may follow.
        """
        allowed = self._without_answer()
        if mask is not None:
            allowed &= mask
        for word in self.bad_words:
            if tuple(answer[-len(word) + 1 :]) == word[:-1]:
                allowed[word[-1]] = False
        if needs_more:
            going_on = allowed.copy()
            going_on[self._stop] = False
            if going_on.any():
                return going_on
        return allowed if allowed.any() else None

    def only_end(self) -> BoolArray:
        """The tokens for an answer that nothing may follow: end tokens, or any token if the model has none, [vocab]."""
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[self._end if len(self._end) else slice(None)] = True
        return allowed


def _ids(token_ids: Collection[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))
