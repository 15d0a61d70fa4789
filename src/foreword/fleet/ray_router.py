"""Ray Serve's request router: it sends a call to the replica that the front has chosen, and reports who is there.

Serve copies this module's class into the process of each handle by value, so it has no globals of its own. The first
argument of every call is the replica's id; "" is any.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ChosenReplicaRouter(RequestRouter):
    """Obeys the choice that a call carries. `RoutingCore` has made it, and has reserved the work."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica alone. One that is gone is replaced by any other, which refuses the call at once."""
        wanted = pending_request.args[0] if pending_request is not None and pending_request.args else ""
        chosen = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        return [chosen or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list of running replicas has changed."""
        from foreword.fleet.ray_serve import note_replicas  # the module of this process, not a copy of it

        super().update_replicas(replicas)
        note_replicas(
            self._deployment_id.app_name, {one.replica_id.unique_id: dict(one.replica_metadata) for one in replicas}
        )

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """A call has found that a replica is dead; Serve's own list says so only later."""
        from foreword.fleet.ray_serve import note_dead

        super().on_replica_actor_died(replica_id)
        note_dead(self._deployment_id.app_name, replica_id.unique_id)
