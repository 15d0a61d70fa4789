"""A real local Ray: processes that are killed or stopped, replicas that come and go, a machine that dies, two fronts.

Counts and bits are compared, never times.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.local_ray import descendants, left_of, local_machines, local_ray
from fleet.test_routed import SAMPLINGS, complete, long_prompt, streamed
from foreword.config import EngineConfig
from foreword.demo.run import embedded_model
from foreword.engine import Snapshot
from foreword.errors import ModelLoadError
from foreword.fleet.front import open_front
from foreword.fleet.options import FleetConfig
from foreword.server.options import ServerConfig
from foreword.server.verbs import SNAPSHOT
from free_ports import free_port
from live_server import MODEL, ServerProcess, ServerThread, embedded_llm, post, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,  # several processes for each test
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install foreword[cluster]"),
]

patiently = partial(wait_until, timeout_s=300.0)
"""Several processes share a machine that may be slow; time is not what these tests are about."""
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 256, "self_check": False}
APP = "foreword-test"


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerThread]:
    with embedded_llm(num_gpu_blocks_override=256) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


@contextmanager
def served(replicas: int, **fleet: Any) -> Iterator[tuple[ServerThread, Callable[[int], None]]]:
    """A front in this process, on the Ray that runs; and a function that changes the number of replicas."""
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
            patiently(lambda: ready(server.url) == replicas)
            yield server, scale
        serve.delete(APP)


def cluster_of(url: str) -> Any:
    return httpx.get(f"{url}/v1/cluster", timeout=60).json()


def ready(url: str) -> int:
    return sum(one["is_synced"] for one in cluster_of(url)["replicas"])


def assert_nothing_is_reserved(url: str) -> None:
    patiently(lambda: all(one["open_requests"] == 0 for one in cluster_of(url)["replicas"]))


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
            thread.join(300)

    def stop(self) -> None:
        self.end()
        assert not self.wrong, self.wrong[:3]
        assert set(self.answers) == {"right"}, self.answers


def answers_of(url: str, topics: int = 5) -> dict[int, Any]:
    return {topic: streamed(url, long_prompt(topic), **SAMPLINGS["seeded"]) for topic in range(topics)}


def test_served_replicas_are_killed_and_replaced(alone: ServerThread) -> None:
    """The whole command in processes of its own; kill -9 in the middle of streams of each kind, then of all that are
    left: requests wait until Serve has replaced them.
    """
    options = ("--replicas", "2", "--replica-cpus", "0.5", "--num-gpu-blocks-override", "256")
    with ServerProcess(*options, start_timeout_s=300.0) as server:
        url = server.url
        patiently(lambda: ready(url) == 2)
        for name, sampling in SAMPLINGS.items():
            expected = complete(alone.url, long_prompt(1), **sampling)["choices"]
            assert complete(url, long_prompt(1), **sampling)["choices"] == expected, name
        sampling = {**SAMPLINGS["seeded"], "max_tokens": 800}
        expected = streamed(alone.url, long_prompt(2), **sampling)
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(streamed, url, long_prompt(2), **sampling) for _ in range(6)]
            patiently(lambda: any(is_generating(one) for one in cluster_of(url)["replicas"]))
            os.kill(busiest(url), signal.SIGKILL)
            assert all(one.result(timeout=300) == expected for one in running)
            failover = cluster_of(url)["failover"]
            assert failover["deaths"] >= 1
            for one in cluster_of(url)["replicas"]:
                os.kill(one["process_id"], signal.SIGKILL)
            waiting = [pool.submit(streamed, url, long_prompt(2), **sampling) for _ in range(6)]
            assert all(one.result(timeout=300) == expected for one in waiting)
        assert cluster_of(url)["failover"]["given_up"] == 0
        assert_nothing_is_reserved(url)
        patiently(lambda: ready(url) == 2)
        server.terminate()
        assert server.wait() == 0


def is_generating(replica: dict[str, Any]) -> bool:
    """Whether all of its prompts are computed, and it answers some."""
    return bool(replica["open_requests"]) and not replica["waiting_tokens"]


def busiest(url: str) -> int:
    """The process of the replica that has most to do."""
    found: int = max(cluster_of(url)["replicas"], key=lambda one: one["open_requests"])["process_id"]
    return found


class TestOneFleet:
    """What one Ray and its replicas show, one after the other, in any order."""

    @pytest.fixture(scope="class")
    def started(self) -> Iterator[tuple[ServerThread, Callable[[int], None]]]:
        with local_ray(8), served(3) as found:
            yield found

    @pytest.fixture
    def scale(self, started: tuple[ServerThread, Callable[[int], None]]) -> Callable[[int], None]:
        def scale(number: int) -> None:
            if ready(started[0].url) != number:
                started[1](number)
                patiently(lambda: ready(started[0].url) == number)

        return scale

    @pytest.fixture
    def three(self, started: tuple[ServerThread, Any], scale: Callable[[int], None]) -> ServerThread:
        scale(3)
        return started[0]

    def test_hits_and_work_are_those_of_one_pool(self, three: ServerThread, alone: ServerThread) -> None:
        prompts = [long_prompt(topic, question) for question in range(6) for topic in range(12)]
        found = Counter[str]()
        for url in (alone.url, three.url):
            httpx.post(f"{url}/reset_prefix_cache")
            with ThreadPoolExecutor(4) as pool:
                for answer in pool.map(lambda prompt, url=url: complete(url, prompt), prompts):
                    found[url] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found[three.url] >= 0.95 * found[alone.url], found
        assert_nothing_is_reserved(three.url)

    def test_clients_that_leave_stop_the_replicas_work_for_them(self, three: ServerThread) -> None:
        clients, max_tokens = 8, 3000
        body = {"model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}

        def leave_after(num_lines: int) -> None:
            asked = {**body, "prompt": long_prompt(num_lines)}
            with httpx.stream("POST", f"{three.url}/v1/completions", json=asked, timeout=300) as answer:
                assert answer.status_code == 200
                next(each for at, each in enumerate(answer.iter_lines()) if at >= num_lines)

        def look() -> Snapshot:
            return three.start(three.service.thread.ask(SNAPSHOT)).result(300)

        before = look().num_computed_tokens
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(leave_after, range(clients)))
        assert_nothing_is_reserved(three.url)
        patiently(lambda: (found := look()).num_running == found.num_waiting == 0)
        computed = look().num_computed_tokens - before
        assert computed < clients * max_tokens / 2, "somebody computed on for clients that had left"

    def test_streams_of_a_stopped_replica_go_on_and_it_is_taken_back(
        self, three: ServerThread, alone: ServerThread
    ) -> None:
        """SIGSTOP long before Serve notices; after SIGCONT nobody hears what it had in hand."""
        url, sampling = three.url, {**SAMPLINGS["seeded"], "max_tokens": 800}
        expected = streamed(alone.url, long_prompt(2), **sampling)
        deaths = cluster_of(url)["failover"]["deaths"]
        with ThreadPoolExecutor(7) as pool:
            running = [pool.submit(streamed, url, long_prompt(2), **sampling) for _ in range(6)]
            patiently(lambda: any(is_generating(one) for one in cluster_of(url)["replicas"]))
            stopped = busiest(url)
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert all(one.result(timeout=300) == expected for one in running)
                patiently(lambda: [one["process_id"] for one in cluster_of(url)["replicas"] if one["complaint"]])
                assert complete(url, long_prompt(3))["choices"]
            finally:
                os.kill(stopped, signal.SIGCONT)
        patiently(lambda: not any(one["complaint"] for one in cluster_of(url)["replicas"]))
        patiently(lambda: ready(url) == 3)
        assert stopped in {one["process_id"] for one in cluster_of(url)["replicas"]}, "Serve has replaced it"
        assert cluster_of(url)["failover"]["deaths"] == deaths
        assert_nothing_is_reserved(url)

    def test_replicas_come_and_go_under_load_without_a_failed_request(
        self, three: ServerThread, alone: ServerThread, scale: Callable[[int], None]
    ) -> None:
        load = Load(three.url, answers_of(alone.url))
        for number in (4, 2):
            scale(number)
            before = load.answers["right"]
            patiently(lambda before=before: load.answers["right"] > before + 20)
        load.stop()
        assert_nothing_is_reserved(three.url)


def test_a_machine_dies_and_its_streams_go_on(alone: ServerThread) -> None:
    expected = answers_of(alone.url)
    with local_machines(2, 1, 1) as (cluster, (doomed, _)), served(2, replica_cpus=1.0) as (server, _):
        load = Load(server.url, expected)
        patiently(lambda: load.answers["right"] > 10)
        cluster.remove_node(doomed, allow_graceful=False)
        before = load.answers["right"]
        patiently(lambda: load.answers["right"] > before + 20)
        load.stop()
        assert_nothing_is_reserved(server.url)


def test_a_server_that_is_killed_leaves_no_process() -> None:
    """The local Ray, its replicas and whatever Ray starts beside them; two agents take a minute."""
    options = ("--replicas", "1", "--replica-cpus", "0.5", "--num-gpu-blocks-override", "256")
    with ServerProcess(*options, start_timeout_s=300.0) as server:
        patiently(lambda: ready(server.url) == 1)
        started = descendants(server.pid)
        of_replicas = {one["process_id"] for one in cluster_of(server.url)["replicas"]}
        assert of_replicas <= {one.pid for one in started}
        os.kill(server.pid, signal.SIGKILL)
        assert not left_of(started, 300.0)


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
        patiently(lambda: load.answers["right"] > 20)
        fronts: set[int] = set()
        patiently(lambda: fronts.add(cluster_of(url)["front"]["process_id"]) or len(fronts) == 2)
        os.kill(fronts.pop(), signal.SIGKILL)  # its own clients lose their connections, as with any server
        load.end()
        assert load.answers["wrong"] == 0
        again = Load(url, expected)
        patiently(lambda: again.answers["right"] > 20)
        again.stop()
        answer = post(url, "/v1/completions", {"model": MODEL, "prompt": long_prompt(1)})
        assert "x-foreword-route" in answer.headers
        serve.shutdown()


def test_a_path_without_a_model_is_refused_before_ray_starts(tmp_path: Path, monkeypatch) -> None:
    from foreword.fleet.run import serve_replicas

    monkeypatch.setattr("foreword.fleet.run.replicas_of", lambda *_: pytest.fail("Ray was started"))
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        serve_replicas(str(tmp_path), {}, ServerConfig(), FleetConfig(replicas=2))
