"""Finds the prompt for a prefix of the tree, so that the prefix can be pinned.

Knows nodes of the tree, which show only the first tokens of each part, and recent requests, which have all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from foreword.cache import PrefixNode
from foreword.engine import Prompt
from foreword.server.records import RequestRecord
from foreword.server.service import Service

NUM_RECENT = 1000


def prompt_of_prefix(service: Service, nodes: Mapping[str, PrefixNode], chosen: str) -> Prompt | None:
    """The beginning of a recent prompt, up to the end of the chosen node, or less if no prompt reaches that far.

    None if no recent prompt passes through the node.
    """
    node = nodes.get(chosen)
    if node is None:
        return None
    path = [node]
    while (above := nodes.get(str(path[-1].parent_id))) is not None:
        path.append(above)
    recent = service.records.recent(NUM_RECENT)
    through = [record for record in recent if record.salt == node.salt and _goes_through(record, path)]
    if node.salt is None:  # a public prefix is also part of tenants' prompts
        through = through or [record for record in recent if _goes_through(record, path)]
    if not through:
        return None
    longest = max(through, key=lambda record: min(record.num_prompt_tokens, node.start + node.num_tokens))
    prompt = service.prompt_of(longest.prompt_token_ids, longest.salt)
    return replace(prompt, token_ids=prompt.token_ids[: node.start + node.num_tokens])


def _goes_through(record: RequestRecord, path: list[PrefixNode]) -> bool:
    """Whether a prompt begins like all nodes of a path, as far as both are known, and reaches the first node."""
    return record.num_prompt_tokens > path[0].start and all(
        record.prompt_token_ids[node.start : node.start + len(node.token_ids)].tolist()
        == list(node.token_ids[: record.num_prompt_tokens - node.start])
        for node in path
    )
