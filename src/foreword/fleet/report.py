"""What operators see of a fleet: its replicas, and why a request went to the one that answered it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foreword.server.engine_door import Number

if TYPE_CHECKING:
    from foreword.fleet.routed import RoutedEngines


def report(door: RoutedEngines) -> dict[str, Any]:
    """The replicas, and what routing has done since the start."""
    return {
        "front": {"name": door.core.router, "process_id": os.getpid()},
        "replicas": replicas(door),
        "routing": asdict(door.core.counts),
        "reasons": {reason.value: asdict(counts) for reason, counts in door.log.counts.items()},
        "failover": asdict(door.counts),
    }


def decisions(door: RoutedEngines, request_id: str | None, limit: int) -> list[dict[str, Any]]:
    """Explanations of decisions. `request_id`: a response's id, or that of one of its prompts."""
    if request_id is None:
        return [one.as_dict() for one in list(door.log)[:limit]]
    found = [one for one in door.log if one.reservation.request_id.rpartition("-")[0] == request_id]
    return [one.as_dict() for one in (found or door.log.of_request(request_id))[:limit]]


def replicas(door: RoutedEngines) -> list[dict[str, Any]]:
    """Each replica: what is known of its cache, and what it has to do."""
    loads = door.core.loads()
    return [
        {
            "name": name,
            "is_synced": door.core.mirror(name).is_synced,
            "cached_blocks": len(door.core.mirror(name).parents),
            "blocks": load.num_blocks,
            "open_requests": load.num_open,
            "waiting_tokens": load.waiting_tokens,
            "tokens_per_s": load.tokens_per_s,
            "process_id": door.facts[name].process_id,
            "complaint": door.pulse.still.get(name),
        }
        for name, load in loads.items()
    ]


def numbers(door: RoutedEngines) -> list[Number]:
    """The same for metrics."""
    shown, counts = replicas(door), door.core.counts
    of = {key: {one["name"]: float(one[key]) for one in shown} for key in (*_GAUGES, "is_synced")}
    gauges = [Number(f"replica_{key}", meaning, of[key], "replica") for key, meaning in _GAUGES.items()]
    still = {one["name"]: float(one["complaint"] is not None) for one in shown}
    reasons = {reason.value: float(one.decisions) for reason, one in door.log.counts.items()}
    tokens = {name: float(getattr(counts, f"{name}_tokens")) for name in ("predicted", "delivered", "overcredited")}
    failed = {name: float(value) for name, value in asdict(door.counts).items()}
    return [
        *gauges,
        Number("replica_synced", "1 where the replica's cache is known.", of["is_synced"], "replica"),
        Number("replica_still", "1 where the replica does not answer, or its engine makes no step.", still, "replica"),
        Number("routing_decisions", "Choices of a replica, by what decided.", reasons, "reason", True),
        Number("routing_tokens", "Prompt tokens that choices counted on, and got.", tokens, "what", True),
        Number("failover", "Requests whose replica died, and what followed.", failed, "what", True),
    ]


_GAUGES = {
    "cached_blocks": "Blocks that the replica has cached, as far as its events say.",
    "open_requests": "Requests that were sent there and have not ended.",
    "waiting_tokens": "Prompt tokens that it has to compute.",
}
