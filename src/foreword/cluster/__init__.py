"""Many replicas: what each of them holds and has to do, and which one a request goes to.

`RoutingCore` is the door. This room is pure: no sockets, threads or clocks.
"""

from foreword.cluster.decision import (
    Candidate as Candidate,
    Decision as Decision,
    Fleet as Fleet,
    Reservation as Reservation,
    RoutingRequest as RoutingRequest,
)
from foreword.cluster.mirror import EventBatch as EventBatch, ReplicaMirror as ReplicaMirror
from foreword.cluster.peers import LoadUpdate as LoadUpdate, RouterLoad as RouterLoad
from foreword.cluster.routing import (
    ReplicaSpec as ReplicaSpec,
    RoutingCore as RoutingCore,
    RoutingCounts as RoutingCounts,
    RoutingOptions as RoutingOptions,
    Rule as Rule,
)
