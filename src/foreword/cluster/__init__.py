"""Many replicas: what each of them holds and has to do, and which one a request goes to.

`RoutingCore` is the door. This room is pure: no sockets, threads or clocks.
"""

from foreword.cluster.decision import (
    Candidate as Candidate,
)
from foreword.cluster.decision import (
    Decision as Decision,
)
from foreword.cluster.decision import (
    Fleet as Fleet,
)
from foreword.cluster.decision import (
    Reservation as Reservation,
)
from foreword.cluster.decision import (
    RoutingRequest as RoutingRequest,
)
from foreword.cluster.decision import (
    Standing as Standing,
)
from foreword.cluster.explain import DecisionLog as DecisionLog
from foreword.cluster.explain import Explanation as Explanation
from foreword.cluster.explain import LogCounts as LogCounts
from foreword.cluster.explain import Reason as Reason
from foreword.cluster.follower import EventBatch as EventBatch
from foreword.cluster.holders import CopiedRun as CopiedRun
from foreword.cluster.mirror import ReplicaMirror as ReplicaMirror
from foreword.cluster.options import ReplicaLoad as ReplicaLoad
from foreword.cluster.options import ReplicaSpec as ReplicaSpec
from foreword.cluster.options import RoutingCounts as RoutingCounts
from foreword.cluster.options import RoutingOptions as RoutingOptions
from foreword.cluster.peers import LoadUpdate as LoadUpdate
from foreword.cluster.peers import RouterLoad as RouterLoad
from foreword.cluster.routing import (
    RoutingCore as RoutingCore,
)
from foreword.cluster.routing import (
    Rule as Rule,
)
