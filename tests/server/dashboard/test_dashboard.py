"""The dashboard in a real browser: numbers move, the tree opens, the chat answers; and only operators get in.

Screenshots go to build/dashboard, where continuous integration collects them.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import numpy as np
import pytest

from foreword.cache import BlockState, LoadFailure, LookupExplanation, MissReason
from foreword.cache.index.prefix_index import MAX_SHOWN_TOKENS
from foreword.engine import Keep, TierReport, TiersReport
from foreword.engine.tiering.loads import LoadCounts
from foreword.engine.tiering.offers import StoreCounts
from foreword.request import DraftCounts
from foreword.server.dashboard import drawings
from foreword.server.dashboard.drawings import MOST_ROWS, draft_rows, session_rows, tier_rows
from foreword.server.dashboard.page import RATE_S, compared, parting, tokens_per_second
from foreword.server.dashboard.prefixes import prompt_of_prefix
from foreword.server.options import ServerConfig
from foreword.server.records import Records, RequestRecord
from foreword.server.service import Service
from foreword.tiers.tier import TierStats
from live_server import ServerProcess, ServerThread, embedded_llm, post

BUILD = Path(__file__).parents[3] / "build" / "dashboard"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_has_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
DOCUMENT = "".join(f"The code of the amber falcon {number} is {4821 + number}.\n" for number in range(20))


def needs_browser(test):
    """Marks a test that drives Chromium: slow, and skipped where there is none."""
    return pytest.mark.slow(_has_chromium(test))


def ask(url: str, question: str, document: str = DOCUMENT, **options: object) -> None:
    messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    post(url, "/v1/chat/completions", {"messages": messages, "max_tokens": 4}, **options).raise_for_status()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def watched() -> Iterator[ServerProcess]:
    """A server of its own, so that its numbers are this module's."""
    with ServerProcess() as process:
        yield process


def open_dashboard(browser, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light", **options):
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.goto(f"{url}/dashboard/")
    page.get_by_test_id("pool").locator("img").wait_for()
    return page


@needs_browser
def test_numbers_move_when_requests_run(browser, watched):
    page = open_dashboard(browser, watched.url)
    before = {name: page.get_by_test_id(name).inner_text() for name in ("hit-rate", "saved", "latest")}
    for question in ("What is the first code?", "What is the second code?", "What is the first code?"):
        ask(watched.url, question)
    page.wait_for_function(
        "before => document.querySelector('[data-testid=saved]').innerText != before", arg=before["saved"]
    )
    page.get_by_test_id("latest").get_by_text("chat.completions").nth(2).wait_for()
    after = {name: page.get_by_test_id(name).inner_text() for name in before}
    assert all(after[name] != before[name] for name in before)
    assert "cached" in after["latest"]
    assert "new text" in page.get_by_test_id("reasons").inner_text()
    assert "p95" in page.get_by_test_id("first-token").inner_text()
    assert float(page.get_by_test_id("rate").inner_text().split()[0].replace(",", "")) > 0
    page.get_by_test_id("window").get_by_text("15 min").click()
    page.get_by_text("15 min ago").first.wait_for()
    page.context.close()


@needs_browser
def test_before_the_first_request_the_page_shows_the_model_and_how_to_send_one(browser):
    with ServerProcess("--dtype", "float32") as server:
        page = open_dashboard(browser, server.url)
        model = page.get_by_test_id("model").inner_text()
        assert all(fact in model for fact in ("foreword-demo", "float32", "2 full attention", "8,192 tokens", "blocks"))
        assert f"curl {server.url}/v1/chat/completions" in page.get_by_test_id("waiting").inner_text()
        assert not page.get_by_test_id("hit-rate").is_visible()
        BUILD.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=BUILD / "waiting-desktop-light.png")
        ask(server.url, "What is it?")
        page.get_by_test_id("hit-rate").wait_for(state="visible")
        assert not page.get_by_test_id("waiting").is_visible()
        page.context.close()


@needs_browser
def test_drafted_tokens_have_a_card_once_there_are_any(browser):
    with ServerProcess("--draft-tokens", "8") as server:
        page = open_dashboard(browser, server.url)
        body = {"prompt": "The code of the amber falcon is", "max_tokens": 60, "ignore_eos": True, "seed": 1}
        post(server.url, "/v1/completions", body)
        post(server.url, "/v1/completions", body)
        page.get_by_test_id("drafts").get_by_text("cache").wait_for()
        assert re.search(r"\d+%\s*[\d,]+ of [\d,]+ tokens", page.get_by_test_id("drafts").inner_text())
        BUILD.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=BUILD / "drafts-desktop-light.png", full_page=True)
        page.context.close()


@needs_browser
def test_a_tier_has_a_row_that_says_what_it_holds_and_loaded(browser, tmp_path):
    options = ("--cache-dir", str(tmp_path / "cache"))
    with ServerProcess(*options) as server:
        ask(server.url, "What is the first code?")
        server.terminate()
        assert server.wait() == 0
    with ServerProcess(*options) as server:
        page = open_dashboard(browser, server.url)
        assert "0 tokens" in page.get_by_test_id("tiers").inner_text()
        ask(server.url, "What is the first code?")
        page.get_by_test_id("tiers").get_by_text(re.compile(r"^[1-9]\d* tokens$")).wait_for()
        shown = page.get_by_test_id("tiers").inner_text()
        assert all(word in shown for word in ("disk", "GiB", "works", "stored today"))
        BUILD.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=BUILD / "tiers-desktop-light.png", full_page=True)
        page.context.close()


@needs_browser
def test_prefixes_are_searched_pinned_and_forgotten_and_each_change_is_confirmed(browser, watched):
    ask(watched.url, "Which falcon?")
    ask(watched.url, "Which falcon?", "The home of the quiet lantern is Lisbon.\n" * 8)
    page = open_dashboard(browser, watched.url)
    page.get_by_role("tab", name="Prefixes").click()
    prefixes = page.get_by_test_id("tree").locator(".prefix:visible")
    prefixes.filter(has_text="amber falcon").first.wait_for()
    page.get_by_test_id("search").fill("quiet LANTERN")
    page.wait_for_function("() => !document.querySelector('[data-testid=tree]').innerText.includes('amber falcon 3')")
    prefixes.filter(has_text="quiet lantern").first.click()
    page.get_by_test_id("pin").click()
    page.get_by_role("button", name="Cancel").click()
    assert httpx.get(f"{watched.url}/v1/cache").json()["statistics"]["blocks"]["pinned"] == 0
    page.get_by_test_id("pin").click()
    page.get_by_test_id("confirm").click()
    page.get_by_text("pinned for 1 hour").wait_for()
    assert httpx.get(f"{watched.url}/v1/cache").json()["statistics"]["blocks"]["pinned"] > 0
    page.get_by_role("tab", name="Overview").click()
    page.get_by_test_id("reset").click()
    page.get_by_test_id("confirm").click()
    page.get_by_text("The cache is empty.").wait_for()
    assert httpx.get(f"{watched.url}/v1/cache").json()["statistics"]["blocks"]["cached"] == 0
    page.context.close()


@needs_browser
def test_the_tree_opens_and_shows_text_and_reuse(browser, watched):
    for document in (DOCUMENT, DOCUMENT, DOCUMENT.replace("4825", "9999")):
        ask(watched.url, "Which falcon?", document)
    page = open_dashboard(browser, watched.url)
    page.get_by_role("tab", name="Prefixes").click()
    first = page.get_by_test_id("tree").locator(".prefix").first
    first.wait_for()
    assert "<|im_start|>system" in first.inner_text()
    assert "reused" in first.inner_text()
    num_shown = page.get_by_test_id("tree").locator(".prefix:visible").count()
    page.get_by_test_id("tree").locator(".q-tree__arrow").first.click()  # the first levels are open: close one
    page.wait_for_function(
        "count => [...document.querySelectorAll('.prefix')].filter(e => e.offsetParent).length < count", arg=num_shown
    )
    first.click()
    page.get_by_test_id("prefix").get_by_text("reused").wait_for()
    assert "amber falcon" in page.get_by_test_id("prefix").inner_text() + page.get_by_test_id("tree").inner_text()
    before = page.get_by_test_id("prefix").inner_text()
    ask(watched.url, "Which falcon?")
    page.wait_for_function(
        "before => document.querySelector('[data-testid=prefix]').innerText != before", arg=before
    )  # it is counted as it is reused
    page.context.close()


@needs_browser
def test_the_chat_shows_reuse_turn_by_turn(browser, watched):
    page = open_dashboard(browser, watched.url, width=390, height=844)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_test_id("send").click()
    page.get_by_test_id("talk").locator(".counts").nth(0).wait_for()
    assert "4821" in page.get_by_test_id("talk").inner_text()
    page.get_by_test_id("say").fill("What is the home of the quiet lantern?")
    page.get_by_test_id("send").click()
    second = page.get_by_test_id("talk").locator(".counts").nth(1)
    second.wait_for()
    assert int(second.locator(".found").inner_text().split()[0]) >= 32
    assert "Lisbon" in page.get_by_test_id("talk").inner_text()
    page.context.close()


@needs_browser
def test_a_click_says_why_recent_prompts_part_early(browser):
    with ServerProcess() as server:
        for minute in range(6):
            ask(server.url, f"What is code {minute}?", f"It is 2026-11-24 10:{minute:02d}.\n{DOCUMENT}")
        page = open_dashboard(browser, server.url)
        page.get_by_role("tab", name="Requests").click()
        page.get_by_test_id("parting-button").click()
        page.get_by_test_id("parting").get_by_text("A date or time").wait_for()
        shown = page.get_by_test_id("parting").inner_text()
        assert all(text in shown for text in ("6 requests", "computed again", "Write it after what stays the same"))
        BUILD.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=BUILD / "parting-desktop-light.png", full_page=True)
        page.context.close()


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_every_tab_fits_desktop_and_phone_in_light_and_dark(browser, watched, device, scheme):
    ask(watched.url, "What is it?")
    ask(watched.url, "What is it?", DOCUMENT.replace("4825", "9999"))
    ask(watched.url, "What is it?", "Today is Monday.\n" + DOCUMENT)
    size = {"width": 1280, "height": 900} if device == "desktop" else {"width": 390, "height": 844}
    page = open_dashboard(browser, watched.url, **size, scheme=scheme)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    BUILD.mkdir(parents=True, exist_ok=True)
    for tab, content in (("Overview", "latest"), ("Prefixes", "tree"), ("Requests", "requests"), ("Chat", "talk")):
        page.get_by_role("tab", name=tab).click()
        page.get_by_test_id(content).wait_for(state="attached")
        page.wait_for_timeout(1500)
        page.screenshot(path=BUILD / f"{tab.lower()}-{device}-{scheme}.png", full_page=tab == "Overview")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], (
            "the page is wider than the screen"
        )
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(part => part < 60)")
    assert is_dark is (scheme == "dark")
    assert problems == []
    page.context.close()


@needs_browser
def test_nothing_is_loaded_from_elsewhere(browser, watched):
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{watched.url}/dashboard/")
    page.get_by_test_id("pool").locator("img").wait_for()
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith((watched.url, "data:", "blob:"))] == []
    context.close()


@needs_browser
def test_with_keys_the_browser_asks_for_the_operators_key(browser):
    with ServerProcess("--api-key", "sk-all", "--operator-key", "sk-operator") as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{server.url}/dashboard/")
        for key, gets_in in (("sk-all", False), ("sk-operator", True)):
            page.get_by_label("Operator's key").fill(key)
            page.get_by_role("button", name="Open the dashboard").click()
            if gets_in:
                page.get_by_test_id("pool").locator("img").wait_for()
            else:
                page.get_by_text("not the operator's key").wait_for()
        assert next(c for c in context.cookies() if c["name"] == "foreword_operator")["httpOnly"]
        server.terminate()  # an open dashboard does not hold up the end
        assert server.wait() == 0
        context.close()


def test_without_the_key_neither_page_nor_socket_nor_files_open(locked_server):
    server, _ = locked_server
    socket = "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    for path in ("/dashboard/", "/dashboard/_nicegui/x/static/nicegui.css", socket):
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer sk-all"}, 403),
            ({"Cookie": "foreword_operator=x"}, 401),
        ):
            assert httpx.get(f"{server.url}{path}", headers=headers).status_code == status
    shown = httpx.get(f"{server.url}/dashboard/", headers={"Authorization": "Bearer sk-operator"})
    assert shown.status_code == 200
    stolen = {"Authorization": "Bearer sk-operator", "Origin": "http://evil.example"}
    assert httpx.get(f"{server.url}/dashboard/", headers=stolen).status_code == 403


@pytest.mark.slow
def test_a_server_without_dashboard_has_none(linking_server):
    server, _ = linking_server
    assert httpx.get(f"{server.url}/dashboard/").status_code == 404


# ------------------------------------------------------- prompts that part early


def test_recent_prompts_of_one_namespace_are_compared_and_what_clients_sent_is_escaped():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        for minute in range(4):
            for salt in ({}, {"cache_salt": "s"})[: 1 + minute % 2]:
                document = f"<b>10:{minute:02d}</b>\n{DOCUMENT}"
                messages = [{"role": "system", "content": document}, {"role": "user", "content": f"What is {minute}?"}]
                post(server.url, "/v1/chat/completions", {"messages": messages, "max_tokens": 1, **salt})
        records = compared(server.service.records.recent(100))
        assert [record.salt for record in records] == [records[0].salt] * 4
        assert records == sorted(records, key=lambda record: record.created)
        drawn = parting(records, server.service.tokenizer)
        assert "A date or time</b> at token" in drawn
        assert "<b>10" not in drawn
        assert "&lt;b&gt;10:" in drawn
        assert "No prompts part early among 1 request" in parting(records[:1], server.service.tokenizer)
        assert "0 requests" in parting(compared([]), server.service.tokenizer)


# ------------------------------------------------------------------------ pins


def test_a_part_of_the_tree_is_pinned_with_all_that_is_before_it():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        for question in ("What is the first code?", "What is the second code?", "Tell me the third code."):
            ask(server.url, question)
        found = server.ask(lambda engine: engine.manager.top_prefixes(100))
        nodes = {str(node.node_id): node for node in found}
        assert max(node.num_tokens for node in found) > MAX_SHOWN_TOKENS  # the tree shows not all of its tokens
        for name, node in nodes.items():
            prompt = prompt_of_prefix(server.service, nodes, name)
            assert prompt is not None
            assert node.start < len(prompt.token_ids) <= node.start + node.num_tokens
            num_pinned = server.ask(
                lambda engine, prompt=prompt: engine.entries.pin(prompt, Keep(60.0)).num_kept_tokens
            )
            assert len(prompt.token_ids) // 16 * 16 <= num_pinned + 16
        assert prompt_of_prefix(server.service, nodes, "none") is None


# -------------------------------------------------------------------- drawings


def record(prompt_tokens: int, cached: int, *, ttft: float = 0.1) -> RequestRecord:
    now = time.monotonic()
    made = RequestRecord("r", "r-0", "<b>alice</b>", "completions", np.arange(prompt_tokens, dtype=np.int32))
    made.first_scheduled_time, made.token_times, made.finished_time = now, [made.arrival_time + ttft], now
    made.num_cached_tokens = cached
    return made


def test_what_clients_chose_is_escaped():
    rows = drawings.request_rows([record(10, 5)], None, with_tenants=True)
    assert "<b>alice" not in rows
    assert "&lt;b&gt;alice" in rows


def test_sessions_are_listed_the_newest_first_with_what_they_found():
    records = Records()
    service = cast(Service, SimpleNamespace(records=records, tenants=SimpleNamespace(asks_for_keys=True)))
    assert session_rows(service) == ""
    names = [f"run-{number}" for number in range(MOST_ROWS)] + ["<i>" + "x" * 250, "run-7"]
    for number, name in enumerate(names):
        made = record(100, 50 if name == "run-7" else 0)
        made.request_id, made.session_id = f"r-{number}", name
        records.open(made)
        records.close(made, "finished")
    first, *others = session_rows(service).split('<div class="model-facts">')[1:]
    assert "<b>run-7</b>" in first
    assert "<span>turns</span><b>2</b>" in first
    assert "50% of 200 tokens" in first
    assert "&lt;b&gt;alice" in first
    assert "<i>" not in others[0]
    assert len(others[0]) < 800
    assert len(others) == MOST_ROWS - 1
    assert "has more" in others[-1]


def test_a_pool_of_any_size_becomes_a_map():
    for num_blocks in (1, 7, 4096, 4097, 100_000):
        states = np.arange(num_blocks, dtype=np.uint8) % len(BlockState)
        drawn = drawings.pool_map(states)
        assert "data:image/png;base64," in drawn
        assert len(drawn) < 20_000


def test_a_source_of_drafts_has_a_bar_of_what_was_right():
    drawn = draft_rows(DraftCounts({"own": 30, "<b>": 1}, {"own": 10, "answers": 20}))
    assert "<b>75%</b><small>30 of 40 tokens</small>" in drawn
    assert "<b>0%</b><small>0 of 20 tokens</small>" in drawn
    assert "<span>&lt;b&gt;</span><b>100%</b>" in drawn
    assert drawn.index(">own<") < drawn.index(">answers<")
    assert not draft_rows(DraftCounts())


def test_the_row_of_a_tier_shows_loads_in_vain_and_a_server_that_is_left_alone():
    loads = LoadCounts(num_loads=3, saved_s=-0.25, num_declined=2, blocks_by_outcome=Counter(corrupt=4))
    tier = TierReport("store", TierStats(num_blocks=7, budget_bytes=1 << 30, breaker="open"), loads)
    drawn = tier_rows(TiersReport((tier,), StoreCounts(), 0, 5, 0))
    for words in ("<b>store</b>", "<b>7</b>", "-250 ms", "2 declined, 4 blocks damaged", "left alone", "5 sequences"):
        assert words in drawn


def test_a_request_that_waited_for_a_tier_in_vain_says_so():
    made = record(20, 5)
    made.explanation = LookupExplanation(20, 5, MissReason.NEVER_SEEN, load_failure=LoadFailure.TIER_SLOW)
    assert "did not answer in time" in drawings.request_rows([made], None, with_tenants=False)
    made.explanation = LookupExplanation(20, 5, MissReason.NEVER_SEEN)
    assert "new text" in drawings.request_rows([made], None, with_tenants=False)


def test_charts_hold_empty_and_extreme_values():
    now = time.monotonic()
    for records in ([], [record(0, 0)], [record(5_000_000, 1), record(3, 3, ttft=900.0), record(3, 3, ttft=0.0)]):
        prompts = [(now, one.num_cached_tokens, one.num_computed_tokens) for one in records]
        assert "nan" not in drawings.token_bars(prompts, now + 1, 300.0)
        assert "nan" not in drawings.ttft_dots(records, now + 1, 300.0)


def test_new_text_is_not_shown_as_a_miss_that_could_be_avoided():
    new = drawings.miss_reasons({"never_seen": 900, "partial_block": 5}, {"never_seen": 3, "partial_block": 2})
    assert "905 tokens" in new
    assert "Nothing was missed that a cache could have found" in new
    assert "computed" not in new
    both = drawings.miss_reasons({"never_seen": 900, "evicted": 64}, {"never_seen": 3, "evicted": 1})
    assert "could have been found: evicted" in both
    assert "Nothing was missed" not in both


def test_tokens_per_second_are_those_of_the_last_seconds():
    now = time.monotonic()
    lately, before = record(1000, 0), record(1000, 0)
    lately.token_times, lately.num_output_tokens = [now - 2.0, now - 1.0, now - 0.5, now], 4
    before.token_times, before.num_output_tokens = [now - 60.0, now - 59.0, now - 1.0, now], 4
    assert tokens_per_second([lately, before], now) == ((4 + 2) / RATE_S, 1000 / RATE_S)


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (99_999, "99,999"), (123_456, "123 k"), (12_345_678, "12.3 M")])
def test_counts_are_short(number, text):
    assert drawings.count(number) == text
