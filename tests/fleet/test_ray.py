"""A real local Ray: processes that are killed, replicas that come and go, a machine that dies, two fronts.

Counts and bits are compared, never times.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from events.test_sockets import free_port
from fleet.test_routed import SAMPLINGS, complete, long_prompt, streamed
from foreword.config import EngineConfig
from foreword.demo.run import embedded_model
from foreword.fleet.front import open_front
from foreword.fleet.options import FleetConfig
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerProcess, ServerThread, embedded_llm, post, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # several processes for each test
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install foreword[cluster]"),
]

OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 256, "self_check": False}
APP = "foreword-test"


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerThread]:
    with embedded_llm(num_gpu_blocks_override=256) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    import ray

    from foreword.fleet.ray_serve import RAY_SETTINGS

    os.environ.update(RAY_SETTINGS)
    ray.init(
        "local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        namespace="serve",
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def served(replicas: int, **fleet: Any) -> Iterator[tuple[ServerThread, Callable[[int], None]]]:
    """A front in this process, on the Ray that runs; and a function that changes the number of replicas."""
    import asyncio

    from ray import serve

    from foreword.fleet.ray_serve import RayLink, application
    from foreword.fleet.run import door_to

    with embedded_model() as folder:

        def scale(number: int) -> None:
            config = FleetConfig(replicas=number, **{"replica_cpus": 0.5, **fleet})
            serve.run(application(str(folder), OPTIONS, config), name=APP, route_prefix=None)

        serve.start(proxy_location="Disabled")
        scale(replicas)
        link = RayLink(APP)
        facts = asyncio.run(link.facts_of_engine())
        front = open_front(EngineConfig.from_options(str(folder), **OPTIONS), facts)
        with ServerThread(front, ServerConfig(), door_to(link)) as server:
            wait_until(lambda: ready(server.url) == replicas)
            yield server, scale
        serve.delete(APP)


def cluster_of(url: str) -> Any:
    return httpx.get(f"{url}/v1/cluster", timeout=60).json()


def ready(url: str) -> int:
    return sum(one["is_synced"] for one in cluster_of(url)["replicas"])


def assert_nothing_is_reserved(url: str) -> None:
    wait_until(lambda: all(one["open_requests"] == 0 for one in cluster_of(url)["replicas"]))


class Load:
    """Clients that ask all the time, and compare each answer with what it must be."""

    def __init__(self, url: str, expected: dict[int, Any], num_clients: int = 4) -> None:
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            topic = next(self._numbers) % len(self._expected)
            try:
                found = streamed(self._url, long_prompt(topic), **SAMPLINGS["seeded"])
            except Exception as error:
                self.wrong.append(repr(error))
                continue
            self.answers["right" if found == self._expected[topic] else "wrong"] += 1

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def stop(self) -> None:
        self.end()
        assert not self.wrong, self.wrong[:3]
        assert set(self.answers) == {"right"}, self.answers


def answers_of(url: str, topics: int = 5) -> dict[int, Any]:
    return {topic: streamed(url, long_prompt(topic), **SAMPLINGS["seeded"]) for topic in range(topics)}


def test_a_served_replica_is_killed_and_replaced(alone: ServerThread) -> None:
    """The whole command in processes of its own; kill -9 in the middle of streams of each kind."""
    options = ("--replicas", "3", "--replica-cpus", "0.5", "--num-gpu-blocks-override", "256")
    with ServerProcess(*options, start_timeout_s=300.0) as server:
        url = server.url
        wait_until(lambda: ready(url) == 3)
        for name, sampling in SAMPLINGS.items():
            expected = complete(alone.url, long_prompt(1), **sampling)["choices"]
            assert complete(url, long_prompt(1), **sampling)["choices"] == expected, name
        sampling = {**SAMPLINGS["seeded"], "max_tokens": 400}
        expected = streamed(alone.url, long_prompt(2), **sampling)
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(streamed, url, long_prompt(2), **sampling) for _ in range(6)]
            wait_until(lambda: any(one["open_requests"] for one in cluster_of(url)["replicas"]))
            time.sleep(0.3)
            kill_a_replica(url)
            assert all(one.result(timeout=120) == expected for one in running)
        assert cluster_of(url)["failover"]["deaths"] >= 1
        assert cluster_of(url)["failover"]["given_up"] == 0
        assert_nothing_is_reserved(url)
        wait_until(lambda: ready(url) == 3, timeout_s=120)
        server.terminate()
        assert server.wait() == 0


def kill_a_replica(url: str) -> None:
    """Kill the process of the replica that has most to do."""
    busiest = max(cluster_of(url)["replicas"], key=lambda one: one["open_requests"])
    os.kill(busiest["process_id"], signal.SIGKILL)


def test_hits_and_work_are_those_of_one_pool(alone: ServerThread) -> None:
    prompts = [long_prompt(topic, question) for question in range(6) for topic in range(12)]
    with local_ray(4), served(3) as (server, _):
        found = Counter[str]()
        for url in (alone.url, server.url):
            httpx.post(f"{url}/reset_prefix_cache")
            with ThreadPoolExecutor(4) as pool:
                for answer in pool.map(lambda prompt, url=url: complete(url, prompt), prompts):
                    found[url] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found[server.url] >= 0.95 * found[alone.url], found
        assert_nothing_is_reserved(server.url)


def test_replicas_come_and_go_under_load_without_a_failed_request(alone: ServerThread) -> None:
    expected = answers_of(alone.url)
    with local_ray(8), served(2) as (server, scale):
        load = Load(server.url, expected)
        scale(4)
        wait_until(lambda: ready(server.url) == 4, timeout_s=120)
        before = load.answers["right"]
        wait_until(lambda: load.answers["right"] > before + 20, timeout_s=120)
        scale(2)
        wait_until(lambda: ready(server.url) == 2, timeout_s=120)
        before = load.answers["right"]
        wait_until(lambda: load.answers["right"] > before + 20, timeout_s=120)
        load.stop()
        assert_nothing_is_reserved(server.url)


def test_a_machine_dies_and_its_streams_go_on(alone: ServerThread) -> None:
    import ray
    from ray.cluster_utils import Cluster

    from foreword.fleet.ray_serve import RAY_SETTINGS

    os.environ.update(RAY_SETTINGS)
    expected = answers_of(alone.url)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    doomed = cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        with served(2, replica_cpus=1.0) as (server, _):
            load = Load(server.url, expected)
            wait_until(lambda: load.answers["right"] > 10)
            cluster.remove_node(doomed, allow_graceful=False)
            before = load.answers["right"]
            wait_until(lambda: load.answers["right"] > before + 20, timeout_s=120)
            load.stop()
            assert_nothing_is_reserved(server.url)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_two_fronts_share_reservations_and_one_may_die(alone: ServerThread) -> None:
    """What deploy/ deploys: fronts and engines as one application, HTTP by Serve's proxy."""
    from ray import serve

    from foreword.fleet.ray_ingress import build

    expected = answers_of(alone.url)
    with local_ray(8), embedded_model() as folder:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"model": str(folder), "replicas": 2, "fronts": 2, "replica_cpus": 0.5, "served_model_name": [MODEL]}
        serve.run(build({**args, "dashboard": False, **OPTIONS}), name=APP, route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        load = Load(url, expected)
        wait_until(lambda: load.answers["right"] > 20, timeout_s=120)
        fronts: set[int] = set()
        wait_until(lambda: fronts.add(cluster_of(url)["front"]["process_id"]) or len(fronts) == 2)
        os.kill(fronts.pop(), signal.SIGKILL)  # its own clients lose their connections, as with any server
        load.end()
        assert load.answers["wrong"] == 0
        again = Load(url, expected)
        wait_until(lambda: again.answers["right"] > 20, timeout_s=120)
        again.stop()
        answer = post(url, "/v1/completions", {"model": MODEL, "prompt": long_prompt(1)})
        assert "x-foreword-route" in answer.headers
        serve.shutdown()
