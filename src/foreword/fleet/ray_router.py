"""Ray Serve's request router: sends a call to the replica that the front has chosen, and reports running replicas.

Serve copies this module's class by value into the process of each handle. So the class uses no globals: it imports the
functions of the process's own module. The first argument of every call is the replica's id; "" means any replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

Replicas = dict[str, dict[str, Any]]
"""Names of replicas, and their metadata."""
listeners: dict[str, set[Callable[[Replicas, str], None]]] = {}
"""For each application with fronts in this process: functions to call with its replicas and a dead replica's name."""
running: dict[str, Replicas] = {}
"""The running replicas of each application, as Serve reports them."""


def note_replicas(app_name: str, replicas: Replicas, dead: str = "") -> None:
    """Pass Serve's list of running replicas to the listeners. `dead`: a replica found dead, which is not in the list.

    Any thread may call this function.
    """
    running[app_name] = replicas
    for listener in list(listeners.get(app_name, ())):
        listener(replicas, dead)


def note_dead(app_name: str, name: str) -> None:
    """Tell the listeners that a replica was found dead. Any thread may call this function."""
    note_replicas(app_name, {each: facts for each, facts in running.get(app_name, {}).items() if each != name}, name)


class ChosenReplicaRouter(RequestRouter):
    """Sends a call to the replica that the call names. `RoutingCore` has chosen this replica and reserved the work."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return only the chosen replica. If it is gone, any other replica gets the call, and refuses it at once."""
        target = pending_request.args[0] if pending_request is not None and pending_request.args else ""
        chosen = [replica for replica in candidate_replicas if replica.replica_id.unique_id == target]
        return [chosen or list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Report Serve's new list of running replicas."""
        from foreword.fleet.ray_router import note_replicas  # the module of this process, not a copy of the module

        super().update_replicas(replicas)
        facts = {replica.replica_id.unique_id: dict(replica.replica_metadata) for replica in replicas}
        note_replicas(self._deployment_id.app_name, facts)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Report that a call has found a replica dead. Serve's own list shows a death only later."""
        from foreword.fleet.ray_router import note_dead

        super().on_replica_actor_died(replica_id)
        note_dead(self._deployment_id.app_name, replica_id.unique_id)
