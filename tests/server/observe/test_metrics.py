"""Metrics and traces say what requests did, to the token."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword.server.engine_thread import PrefillSpeed
from foreword.server.options import ServerConfig
from foreword.server.records import Listener
from live_server import MODEL, ServerProcess, ServerThread, embedded_llm, post, wait_until

REPOSITORY = Path(__file__).parents[3]


def facts(name: str) -> str:
    return "".join(f"The code of the {name} falcon {number} is 4821.\n" for number in range(20))


def ask(url: str, prompt: str, **more: object) -> dict:
    answer = post(url, "/v1/completions", {"prompt": prompt, "max_tokens": 3, "temperature": 0, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


def samples(url: str) -> dict[tuple[str, str], float]:
    """(name, the label that is not the model's) -> value."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "le")}
            if "le" not in sample.labels:
                found[sample.name, next(iter(labels.values()), "")] = sample.value
    return found


def total(usages: list[dict], name: str) -> int:
    if name == "cached_tokens":
        return sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return sum(usage[name] for usage in usages)


def test_counters_equal_what_the_answers_said():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        usages = [ask(server.url, facts(name)) for name in ("a", "b", "a", "a", "b")]
        usages.append(ask(server.url, facts("a"), skip_reading_prefix_cache=True))
        wait_until(lambda: len(server.service.records.recent(10)) == 6)
        found = samples(server.url)
        prompt, cached = total(usages, "prompt_tokens"), total(usages, "cached_tokens")
        assert found["foreword_prefix_cache_queries_total", ""] == prompt
        assert found["foreword_prefix_cache_hits_total", ""] == cached > 0
        assert found["foreword_prefix_cache_computed_tokens_total", ""] == prompt - cached
        assert found["foreword_prefix_cache_hit_rate", ""] == cached / prompt
        assert found["foreword_prefix_cache_preempted_requests_total", ""] == 0
        assert found["foreword_prompt_tokens_total", ""] == prompt
        assert found["foreword_generation_tokens_total", ""] == total(usages, "completion_tokens")
        assert found["foreword_prefix_cache_requests_total", "hit"] == 3
        assert found["foreword_prefix_cache_requests_total", "miss"] == 3
        assert found["foreword_prefix_cache_misses_total", "never_seen"] == 2
        assert found["foreword_prefix_cache_misses_total", "lookup_skipped"] == 1
        ended = [value for (name, _), value in found.items() if name == "foreword_request_success_total"]
        assert sum(ended) == 6
        assert found["foreword_tenant_hit_tokens_total", "default"] == cached
        assert found["foreword_prefix_cache_prefill_seconds_saved_total", ""] > 0
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            for kind in ("hit", "miss"):
                assert found[f"foreword_{name}_seconds_count", kind] == 3
        gaps = total(usages, "completion_tokens") - len(usages)
        between = [found["foreword_inter_token_latency_seconds_count", kind] for kind in ("hit", "miss")]
        assert sum(between) == gaps
        assert found["foreword_time_to_first_token_seconds_sum", "hit"] > 0


def test_tails_are_counted_and_their_counters_survive_a_reset():
    with embedded_llm(kv_cache_memory_bytes=2 * 2**20) as llm, ServerThread(llm, ServerConfig()) as server:
        for name in ("a", "a", *"bcdefgh"):
            ask(server.url, facts(name))
        wait_until(lambda: samples(server.url)["foreword_num_requests_running", ""] == 0)
        found = samples(server.url)
        stats = llm.engine.manager.stats
        assert found["foreword_prefix_cache_tail_hits_total", ""] == stats.tail_hits > 0
        assert found["foreword_prefix_cache_tail_evictions_total", ""] == stats.tail_evictions > 0
        assert found["foreword_kv_cache_tail_blocks", ""] == llm.engine.manager.get_num_tails() > 0
        told = httpx.get(f"{server.url}/v1/cache").json()["statistics"]
        assert told["tail_hit_tokens"] == stats.tail_hits < told["hit_tokens"]
        assert (told["tails"], told["tail_evictions"]) == (llm.engine.manager.get_num_tails(), stats.tail_evictions)
        post(server.url, "/reset_prefix_cache", None).raise_for_status()
        after = samples(server.url)
        assert after["foreword_kv_cache_tail_blocks", ""] == 0
        for name in ("hits", "evictions"):
            counter = f"foreword_prefix_cache_tail_{name}_total", ""
            assert after[counter] == found[counter]


def test_the_pool_and_the_queue_are_shown_as_they_are():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        ask(server.url, facts("a"))
        endless = {"prompt": facts("b"), "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data")
            found = samples(server.url)
            assert found["foreword_num_requests_running", ""] == 1
            assert found["foreword_num_requests_waiting", ""] == 0
            assert found["foreword_kv_cache_usage_perc", ""] > 0
            assert found["foreword_kv_cache_blocks", "in_use"] > 0
            assert found["foreword_kv_cache_blocks", "cached"] > 0
        wait_until(lambda: samples(server.url)["foreword_num_requests_running", ""] == 0)
        found = samples(server.url)
        assert found["foreword_kv_cache_usage_perc", ""] == 0
        blocks = sum(value for (name, _), value in found.items() if name == "foreword_kv_cache_blocks")
        assert blocks == llm.engine.manager.num_blocks


def test_counters_do_not_go_back_when_the_cache_is_reset():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        ask(server.url, facts("a"))
        ask(server.url, facts("a"))
        wait_until(lambda: samples(server.url)["foreword_num_requests_running", ""] == 0)
        before = samples(server.url)
        post(server.url, "/reset_prefix_cache", None).raise_for_status()
        after = samples(server.url)
        for name in ("queries", "hits", "computed_tokens"):
            assert after[f"foreword_prefix_cache_{name}_total", ""] == before[f"foreword_prefix_cache_{name}_total", ""]
        usage = ask(server.url, facts("a"))
        queries = samples(server.url)["foreword_prefix_cache_queries_total", ""]
        assert queries == before["foreword_prefix_cache_queries_total", ""] + usage["prompt_tokens"]


def test_evictions_are_counted_by_cause():
    with embedded_llm(kv_cache_memory_bytes=2 * 2**20) as llm, ServerThread(llm, ServerConfig()) as server:
        for number in range(8):
            ask(server.url, facts(str(number)))
        found = samples(server.url)
        assert found["foreword_prefix_cache_evictions_total", "reused"] == llm.engine.manager.stats.evictions > 0
        ask(server.url, facts("4"))
        assert samples(server.url)["foreword_prefix_cache_misses_total", "evicted"] >= 1


def test_a_real_process_serves_metrics_under_vllms_names(server: ServerProcess):
    ask(server.url, facts("process"))
    names = {name for name, _ in samples(server.url)}
    assert {
        "foreword_prefix_cache_queries_total",
        "foreword_prefix_cache_hits_total",
        "foreword_kv_cache_usage_perc",
        "foreword_num_requests_running",
        "foreword_num_requests_waiting",
        "foreword_time_to_first_token_seconds_count",
        "foreword_inter_token_latency_seconds_count",
        "foreword_e2e_request_latency_seconds_count",
    } <= names


def test_the_grafana_dashboard_asks_for_metrics_that_exist(server: ServerProcess):
    ask(server.url, facts("grafana"))
    text = httpx.get(f"{server.url}/metrics").text
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / "foreword.json").read_text())
    asked = {
        word
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for word in target["expr"].replace("(", " ").replace("{", " ").replace("[", " ").split()
        if word.startswith("foreword_")
    }
    assert len(asked) > 10
    assert [name for name in asked if f"\n{name}" not in text] == []


def test_only_steps_that_are_mostly_prefill_tell_the_speed_of_prefill():
    speed = PrefillSpeed()
    assert speed.seconds_per_token == 0
    speed.note_step(num_tokens=8, num_running=8, seconds=1.0)
    assert speed.seconds_per_token == 0
    speed.note_step(num_tokens=100, num_running=2, seconds=1.0)
    speed.note_step(num_tokens=300, num_running=2, seconds=1.0)
    assert speed.seconds_per_token == pytest.approx(2 / 400)


# ---------------------------------------------------------------------- traces


def test_a_request_is_a_span_with_what_the_cache_found():
    sdk = pytest.importorskip("opentelemetry.sdk.trace.export")
    in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from foreword.server.observe.tracing import Tracing

    exporter = in_memory.InMemorySpanExporter()
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        tracing = Tracing(MODEL, sdk.SimpleSpanProcessor(exporter))
        server.service.records.on_finished(Listener("traces", tracing.record))
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        body = {"prompt": facts("traced"), "max_tokens": 2}
        usages = [post(server.url, "/v1/completions", body, headers=headers).json()["usage"] for _ in range(2)]
        wait_until(lambda: len(exporter.get_finished_spans()) == 2)
        cold, warm = exporter.get_finished_spans()
        assert f"{cold.context.trace_id:032x}" == trace_id
        assert cold.attributes["foreword.cache.miss_reason"] == "never_seen"
        for span, usage in zip((cold, warm), usages, strict=True):
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == cached
            assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
            assert span.start_time < span.events[0].timestamp <= span.events[1].timestamp <= span.end_time
        tracing.close()


def test_spans_go_to_the_endpoint_that_is_named():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(otlp_traces_endpoint=endpoint)) as server:
        ask(server.url, facts("sent"))
    collector.shutdown()
    assert any(b"completions" in body for body in bodies), "what was left is sent when the server ends"
