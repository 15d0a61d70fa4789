"""Many replicas: their caches and loads, and the choice of a replica for a request.

Callers use `RoutingCore`. The modules of this package use no sockets, threads or clocks.
"""

from foreword.cluster.decision import (
    Decision as Decision,
    DecisionLog as DecisionLog,
    Fleet as Fleet,
    Reason as Reason,
    Reservation as Reservation,
    RoutingRequest as RoutingRequest,
    Standing as Standing,
)
from foreword.cluster.follower import EventBatch as EventBatch
from foreword.cluster.holders import CopiedRun as CopiedRun
from foreword.cluster.mirror import ReplicaMirror as ReplicaMirror
from foreword.cluster.options import ReplicaSpec as ReplicaSpec, RoutingOptions as RoutingOptions
from foreword.cluster.peers import LoadUpdate as LoadUpdate, RouterLoad as RouterLoad
from foreword.cluster.routing import RoutingCore as RoutingCore, Rule as Rule
