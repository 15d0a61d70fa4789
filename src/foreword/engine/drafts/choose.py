"""Whether an engine drafts, and from what."""

from __future__ import annotations

import logging

from foreword.cache import KVCacheManager, MambaSpec
from foreword.config import DraftTokens
from foreword.engine.drafts.drafter import Drafter
from foreword.engine.drafts.drafting import Drafting
from foreword.engine.drafts.sources import CachedPaths, OwnText, Predicted, RecentAnswers

logger = logging.getLogger(__name__)


def choose_drafting(
    draft_tokens: DraftTokens, manager: KVCacheManager, vocab_size: int, *, launches: bool, inexactness: str | None
) -> Drafting | None:
    """Drafting from a request's own text, the cache, and earlier answers; None, and a line in the log, if it cannot be.

    `launches`: whether the runner is one that computes while the host goes on. `inexactness`: why this machine breaks
    the promise of equal bits, if it does: drafts would change answers there.
    """
    if draft_tokens == 0:
        return None
    reason = None
    if any(isinstance(group, MambaSpec) for group in manager.groups):
        reason = "its recurrent layers cannot go back behind a wrong token"
    elif launches and draft_tokens == "auto":
        reason = "on a GPU, steps with drafts were never timed; draft_tokens=N drafts there"
    elif inexactness is not None and draft_tokens == "auto":
        reason = f"results are not bit-exact here ({inexactness}); draft_tokens=N drafts all the same"
    if reason is not None:
        logger.info("no tokens are drafted with this model: %s", reason)
        return None
    drafters: list[Drafter] = [Predicted(), OwnText(), RecentAnswers()]
    if manager.enable_prefix_caching:
        drafters.append(CachedPaths(manager))
    return Drafting(drafters, vocab_size, draft_tokens)
