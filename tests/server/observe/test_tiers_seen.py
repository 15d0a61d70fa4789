"""What people see of the tiers below the pool: in usage, metrics and explanations of a server that starts again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from foreword.server.options import ServerConfig
from live_server import FALCON, ServerThread, embedded_llm, post, wait_until

REPOSITORY = Path(__file__).parents[3]
PROMPT = "".join(f"The code of the amber falcon {number} is 4821.\n" for number in range(20))


@contextmanager
def serving(folder: Path | None, **options: Any) -> Iterator[ServerThread]:
    """A server above a folder of cached prefixes; a second one on the same folder is a restart."""
    with embedded_llm(cache_dir=folder, **options) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


def complete(server: ServerThread, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, **more}
    return post(server.url, "/v1/completions", body).raise_for_status().json()


def details(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["usage"]["prompt_tokens_details"]


# ----------------------------------------------------------------------- usage


def test_usage_says_from_which_tier_cached_tokens_came(tmp_path: Path) -> None:
    chat = {"messages": FALCON, "max_tokens": 3}
    with serving(tmp_path / "cache") as server:
        cold = details(complete(server))
        post(server.url, "/v1/chat/completions", chat).raise_for_status()
    with serving(tmp_path / "cache") as server:
        loaded, again = details(complete(server)), details(complete(server))
        both = details(complete(server, prompt=[PROMPT, PROMPT]))
        response = post(server.url, "/v1/responses", {"input": FALCON, "max_output_tokens": 3}).raise_for_status()
        lines = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={**chat, "stream": True, "stream_options": {"include_usage": True}},
            timeout=60,
        ).text
    assert cold["cached_tokens_by_tier"] == {"memory": 0, "disk": 0}
    assert loaded["cached_tokens"] > 100
    assert loaded["cached_tokens_by_tier"] == {"memory": 0, "disk": loaded["cached_tokens"]}
    assert again["cached_tokens_by_tier"] == {"memory": again["cached_tokens"], "disk": 0}
    assert sum(both["cached_tokens_by_tier"].values()) == both["cached_tokens"] > again["cached_tokens"]
    of_response = response.json()["usage"]["input_tokens_details"]
    assert of_response["cached_tokens_by_tier"]["disk"] > 0
    assert sum(of_response["cached_tokens_by_tier"].values()) == of_response["cached_tokens"]
    assert '"cached_tokens_by_tier"' in lines
    assert "cache_exact" not in loaded


def test_usage_without_tiers_names_none() -> None:
    with serving(None, cache_exact=False) as server:
        assert details(complete(server)) == {"cached_tokens": 0, "cache_write_tokens": 0, "audio_tokens": 0}


def test_usage_says_that_another_arithmetic_may_have_computed_the_cache(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", cache_exact=False) as server:
        assert details(complete(server))["cache_exact"] is False


# --------------------------------------------------------------------- metrics


def samples(server: ServerThread) -> dict[tuple[str, str, str], float]:
    """(name, tier, outcome) -> value, of all metrics about tiers."""
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text
    return {
        (sample.name, sample.labels.get("tier", ""), sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("foreword_tier_")
    }


def test_metrics_of_tiers_are_what_the_engine_counted(tmp_path: Path) -> None:
    with serving(tmp_path / "cache") as server:
        complete(server)
    with serving(tmp_path / "cache") as server:
        usage = details(complete(server))
        complete(server, prompt="another" + PROMPT)
        wait_until(lambda: not server.ask(lambda engine: engine.store_on()))
        found, report = samples(server), server.ask(lambda engine: engine.report_tiers())
    [disk] = report.tiers
    block_bytes = disk.loads.num_bytes // disk.loads.blocks_by_outcome["done"]
    expected = {
        "blocks": disk.stats.num_blocks,
        "bytes": disk.stats.shared_bytes,
        "budget_bytes": disk.stats.budget_bytes,
        "breaker_open": 0,
        "seconds_saved": disk.loads.saved_s,
        "loads_total": 1,
        "loaded_tokens_total": usage["cached_tokens"],
        "loaded_bytes_total": usage["cached_tokens"] // 16 * block_bytes,
        "load_seconds_total": disk.loads.seconds,
        "declined_total": disk.loads.num_declined,
        "regretted_total": disk.loads.num_regretted,
        "cancelled_total": 0,
        "lookups_total": disk.stats.num_looked_up,
        "found_total": disk.stats.num_found,
        "written_bytes_total": disk.stats.written_bytes,
    }
    assert {name: found[f"foreword_tier_{name}", "disk", ""] for name in expected} == expected
    assert min(expected[name] for name in ("blocks", "bytes", "written_bytes_total", "load_seconds_total")) > 0
    assert found["foreword_tier_load_blocks_total", "disk", "done"] == disk.loads.blocks_by_outcome["done"] > 0
    assert found["foreword_tier_load_blocks_total", "disk", "corrupt"] == 0
    assert found["foreword_tier_store_blocks_total", "disk", "done"] == disk.stats.num_written > 0
    assert found["foreword_tier_written_bytes_today", "", ""] == report.bytes_today > 0
    assert found["foreword_tier_store_queue", "", ""] == report.num_waiting_stores == 0


def test_metrics_that_the_documentation_names_exist(tmp_path: Path) -> None:
    """Those of a server; a router and `foreword watch` have their own. `foreword_tier_...` stands for some."""
    of_others = re.compile("foreword_(cache$|replica_|routing_|failover_|watch_)")
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"foreword_\w+", page.read_text())}
    named = {name for name in named if not of_others.match(name)}
    assert len(named) > 12
    with serving(tmp_path / "cache") as server:
        complete(server)
        metrics = httpx.get(f"{server.url}/metrics").text
    missing = {
        name for name in named if not re.search(f"^# HELP {name}{'' if name.endswith('_') else ' '}", metrics, re.M)
    }
    assert missing == set()


def test_without_tiers_there_are_no_metrics_of_them() -> None:
    with serving(None) as server:
        complete(server)
        assert samples(server) == {}


# ---------------------------------------------------------------- explanations


def test_a_report_says_what_was_loaded_and_why_no_more_was(tmp_path: Path) -> None:
    extra = {"foreword": {"cache": True}}
    with serving(tmp_path / "cache") as server:
        cold = complete(server, **extra)["foreword"]["cache"]
    with serving(tmp_path / "cache") as server:
        whole = complete(server, **extra)["foreword"]["cache"]
    [segment] = (tmp_path / "cache").rglob("*.fwseg")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 4
    segment.write_bytes(content)
    with serving(tmp_path / "cache") as server:
        damaged = complete(server, **extra)["foreword"]["cache"]
    assert "loaded_tokens" not in cold
    assert "load_failure" not in cold
    assert whole["loaded_tokens"] == {"disk": whole["hit_tokens"]}
    assert "load_failure" not in whole
    assert 0 < damaged["hit_tokens"] < whole["hit_tokens"]
    assert damaged["loaded_tokens"] == {"disk": damaged["hit_tokens"]}
    assert (damaged["reason"], damaged["load_failure"]) == ("never_seen", "tier_corrupt")
    assert damaged["in_words"] == "what a tier below the pool had of it was damaged"
