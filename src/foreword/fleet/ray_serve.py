"""Replicas as actors of Ray Serve, and the link to them.

Calls Ray, but makes no decisions. Serve starts, replaces and scales the replicas; `RoutedEngines` chooses among them:

    front process                              an actor for each replica
    RoutedEngines ── RayLink ── handle ──>     EngineReplica ── Replica ── LLM
         ^             |  ChosenReplicaRouter obeys the choice
         |             note_replicas(): Serve's list of running replicas
         +──────── ZeroMQ: cache events ──────
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from foreword.cluster import ReplicaSpec
from foreword.config import Environment
from foreword.errors import ConfigError
from foreword.fleet.front import EngineFacts
from foreword.fleet.link import Members, ReplicaLostError
from foreword.fleet.messages import Refused, Told
from foreword.fleet.options import FleetConfig
from foreword.fleet.ray_router import ChosenReplicaRouter, listeners, running
from foreword.fleet.replica import Replica, ReplicaFacts
from foreword.llm import LLM

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEPLOYMENT = "engine"
ANY = ""
"""In place of a replica's id: Serve may choose any replica."""
ELSEWHERE = "replica_gone"
"""Error code of a call that reached another replica than the chosen one."""
MAX_ONGOING = 100_000
"""The most calls that Serve lets one replica have: so many that Serve rejects no choice. The server has limits, too."""
FRONT_SILENCE_S = 10.0
"""Seconds after which a silent front is no longer in the list of fronts."""
FAREWELL_S = 2.0
"""Seconds to wait for the answer of a replica that Serve no longer lists, because it may still end its answers."""
DRAIN_S = 600.0
"""Seconds that a replica may take to finish its answers when Serve stops it."""
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_port_wait_time_s": "120",  # on a busy machine, Ray needs more than its default of 30 s to start
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # an engine that stands still finishes no answers
}
"""Values for Ray's own environment variables, if the user has not set them."""


# --------------------------------------------------------------------- the replica's side


class EngineReplica:
    """One engine in an actor. The first argument of each call is the id of the replica that should get the call."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self._host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._id: str = serve.get_replica_context().replica_id.unique_id
        address = f"tcp://{self._host}:0"
        events = {"kv_events": address, "kv_events_snapshot": address, "kv_events_hashes": "bytes"}
        is_caching = options.get("enable_prefix_caching", True)
        self._replica = Replica(LLM(model, **{**options, **(events if is_caching else {})}))
        self._is_started = False

    def _start(self) -> Replica:
        if not self._is_started:
            self._is_started = True
            self._replica.start()
        return self._replica

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return the facts that Serve gives to every router."""
        facts = self._start().facts(self._host)
        return {"spec": asdict(facts.spec), "events": facts.events, "process_id": facts.process_id}

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has failed or stands still; Serve then replaces the replica."""
        if (complaint := self._replica.complaint()) is not None:
            raise RuntimeError(complaint)

    async def generate(self, target: str, data: bytes) -> AsyncGenerator[list[Told]]:
        """Answer a submission."""
        if target != self._id:
            yield [Refused(503, f"replica {target} is gone", "server_error", None, ELSEWHERE)]
            return
        async for messages in self._start().generate(data):
            yield messages

    async def call(self, target: str, data: bytes) -> bytes | None:
        """Run a verb on the engine's thread. Returns None if the call was meant for another replica."""
        return await self._start().call(data) if target == self._id else None

    async def complaint(self, target: str) -> str | None:
        """Return why this replica must get no requests, or "" if it may. None: the call is for another replica."""
        return self._replica.complaint() or "" if target == self._id else None

    async def facts_of_engine(self, target: str) -> bytes:
        """Return the pickled facts with which a front checks requests. They are the same for all replicas."""
        return pickle.dumps(self._replica.facts_of_engine())

    async def __del__(self) -> None:
        await self._replica.stop()


def application(model: str, options: Mapping[str, Any], fleet: FleetConfig) -> serve.Application:
    """Make the application of Ray Serve that runs the replicas. `options` are the engine's options."""
    number: dict[str, Any] = {"num_replicas": fleet.replicas}
    if fleet.max_replicas is not None:
        scaling = AutoscalingConfig(min_replicas=fleet.replicas, max_replicas=fleet.max_replicas)
        number = {"autoscaling_config": scaling}
    threads = str(Environment.read().num_threads or max(1, round(fleet.replica_cpus)))
    router = RequestRouterConfig(request_router_class=ChosenReplicaRouter)  # type: ignore[arg-type]
    deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={
            "num_cpus": fleet.replica_cpus,
            "num_gpus": fleet.replica_gpus,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads}},
        },
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=1.0,
        max_surge_percent=100,  # start a new replica before the old one stops, so that caches stay
        request_router_config=router,
        **number,
    )(EngineReplica)
    return deployment.bind(model, dict(options))


# --------------------------------------------------------------------- the front's side


class RayLink:
    """The link to the replicas of one application, through its handle."""

    def __init__(self, app_name: str, handle: Any = None) -> None:
        """`handle` is the handle of the replicas; None: get it from Serve."""
        self._app_name = app_name
        self._handle = serve.get_deployment_handle(DEPLOYMENT, app_name) if handle is None else handle
        self._members: Members | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone: dict[str, asyncio.Future[bool]] = {}
        """For each present replica, a future that ends when it leaves. The result says whether it was found dead."""

    def start(self, members: Members) -> None:
        self._members, self._loop = members, asyncio.get_running_loop()
        listeners.setdefault(self._app_name, set()).add(self.note_replicas)
        self._take(running.get(self._app_name, {}))

    async def stop(self) -> None:
        listeners[self._app_name].discard(self.note_replicas)

    def note_replicas(self, replicas: dict[str, dict[str, Any]], dead: str = "") -> None:
        """Take Serve's list of replicas. Any thread may call this method."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended before Serve
                self._loop.call_soon_threadsafe(self._take, replicas, dead)

    def _take(self, replicas: Mapping[str, dict[str, Any]], dead: str = "") -> None:
        assert self._members is not None
        for name in self._gone.keys() - replicas.keys():
            self._members.leave(name)
            self._gone.pop(name).set_result(name == dead)
        for name, metadata in replicas.items():
            if name in self._gone or not metadata:  # a replica without metadata is not ready yet
                continue
            try:
                facts = ReplicaFacts(ReplicaSpec(**metadata["spec"]), metadata["events"], metadata["process_id"])
            except (TypeError, KeyError) as error:
                logger.warning("replica %s is of another version and gets no requests: %s", name, error)
                continue
            self._gone[name] = asyncio.get_running_loop().create_future()
            self._members.join(name, facts)

    async def facts_of_engine(self) -> EngineFacts:
        """Get the facts of the engines from any replica. Waits until a replica is ready."""
        facts: EngineFacts = pickle.loads(await self._handle.facts_of_engine.remote(ANY))
        return facts

    @property
    def host(self) -> str:
        """The address at which other machines of the cluster reach this machine."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return host

    async def find_fronts(self, address: str) -> list[str]:
        """Add a front's address to the list of this application's fronts, and return the list.

        Raises ConnectionError.
        """
        name = f"fronts of {self._app_name}"
        options = {"name": name, "get_if_exists": True, "lifetime": "detached", "namespace": "serve", "num_cpus": 0}
        board: Any = ray.remote(_Board).options(**options).remote()
        try:
            addresses: list[str] = await board.meet.remote(address)
        except RayError as error:
            raise ConnectionError(_brief(error)) from error
        return addresses

    async def generate(self, replica: str, data: bytes) -> AsyncGenerator[list[Told]]:
        gone = self._leaving(replica)
        response: Any = self._handle.options(stream=True, method_name="generate").remote(replica, data)
        try:
            first = await _unless(gone, anext(response), f"replica {replica} left before it began")
            if isinstance(first[0], Refused) and first[0].code == ELSEWHERE:
                raise ReplicaLostError(first[0].message, died=False)
            yield first
            async for messages in response:
                yield messages
        except (RayError, RayServeException, StopAsyncIteration) as error:
            raise _lost(replica, error) from error
        finally:
            response.cancel()

    async def call(self, replica: str, data: bytes) -> bytes:
        result: bytes = await self._ask(replica, self._handle.call, data)
        return result

    async def complaint(self, replica: str) -> str | None:
        complaint: str = await self._ask(replica, self._handle.complaint)
        return complaint or None

    async def _ask(self, replica: str, method: Any, *args: Any) -> Any:
        """Call a method of a replica and return its result. Raises ReplicaLostError."""
        gone = self._leaving(replica)
        response = method.remote(replica, *args)
        try:
            result = await _unless(gone, response, f"replica {replica} left before it answered")
        except (RayError, RayServeException) as error:
            raise _lost(replica, error) from error
        finally:
            response.cancel()
        if result is None:  # another replica has answered
            raise ReplicaLostError(f"replica {replica} is gone", died=False)
        return result

    def _leaving(self, replica: str) -> asyncio.Future[bool]:
        if (gone := self._gone.get(replica)) is None:
            raise ReplicaLostError(f"replica {replica} is gone", died=False)
        return gone


def _lost(replica: str, error: Exception) -> ReplicaLostError:
    died = isinstance(error, ActorDiedError)  # other RayActorErrors say that the actor cannot be reached
    what = "ended" if died else "cannot be reached"
    return ReplicaLostError(f"replica {replica} {what}: {_brief(error)}", died=died, may_be_healthy=not died)


async def _unless(gone: asyncio.Future[bool], answer: Awaitable[T], lost: str) -> T:
    """Wait for a replica's answer. Raises ReplicaLostError if it leaves first, because Serve would wait forever."""
    coming = asyncio.ensure_future(answer)
    try:
        await asyncio.wait((coming, gone), return_when=asyncio.FIRST_COMPLETED)
        if not coming.done() and not gone.result():
            await asyncio.wait((coming,), timeout=FAREWELL_S)
        if coming.done():
            return coming.result()
        raise ReplicaLostError(lost, died=gone.result())
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)


class _Board:
    """The list of running fronts. If it is lost, all fronts report to a new one within a second."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def meet(self, address: str) -> list[str]:
        now = time.monotonic()
        self._seen[address] = now
        self._seen = {each: seen for each, seen in self._seen.items() if now - seen < FRONT_SILENCE_S}
        return list(self._seen)


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


# --------------------------------------------------------------------- Ray itself


@contextmanager
def replicas_of(model: str, options: Mapping[str, Any], fleet: FleetConfig, app_name: str) -> Iterator[RayLink]:
    """Run replicas, and yield the link to them. A local Ray ends with the context.

    Raises ConfigError if Ray does not answer, or if the replicas do not start.
    """
    _connect(fleet)
    try:
        serve.start(proxy_location="Disabled")
        try:
            serve.run(application(model, options, fleet), name=app_name, route_prefix=None)
        except RuntimeError as error:
            raise ConfigError(f"the replicas of {model!r} did not start: {error}") from error
        yield RayLink(app_name)
    finally:
        if fleet.ray_address is not None:
            serve.delete(app_name)
        else:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def _connect(fleet: FleetConfig) -> None:
    """Join a running Ray, or start a local one. Raises ConfigError for an address that does not answer.

    The kernel ends a local Ray when the calling thread ends for any reason. Ray's workers end with it.
    """
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)  # noqa: TID251  # Ray reads them nowhere else
    if ray.is_initialized():
        return
    if fleet.ray_address is not None:
        try:
            ray.init(fleet.ray_address, log_to_driver=False, namespace="serve")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray_address={fleet.ray_address!r} cannot be reached: {_brief(error)}; give the address of a running "
                "Ray, or leave it out for a local one"
            ) from error
        return
    max_replicas = fleet.max_replicas or fleet.replicas
    try:
        ray.init(
            "local",  # start a Ray, even if one runs on this machine
            num_cpus=max(2, round(max_replicas * fleet.replica_cpus) + 1),  # logical CPUs: they only place actors
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            namespace="serve",
            _node_ip_address="127.0.0.1",
        )
    except Exception as error:  # Ray raises plain exceptions too, for a process that did not start in time
        raise ConfigError(
            f"the local Ray did not start: {_brief(error)}; its logs lie in ray/session_latest/logs of the folder for "
            "temporary files; give the address of a running one as ray_address"
        ) from error
