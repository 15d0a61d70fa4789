"""The tree of cached prefixes: their texts, their branches, and how often each part was reused.

If the cache's index knows only keys, a list of prompts is shown instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from nicegui import events, ui

from foreword.cache import PrefixNode
from foreword.engine import Keep, Prompt
from foreword.server.cache_api import listed_prompts, node_report
from foreword.server.dashboard import drawings as draw
from foreword.server.dashboard.parts import Html, card, confirmed, told
from foreword.server.records import RequestRecord
from foreword.server.service import Service
from foreword.server.verbs import PIN, TOP_PREFIXES, UNPIN

NUM_RECENT = 1000
NUM_NODES = 400
NUM_PROMPTS = 40
REFRESH_S = 3.0
_ROW = """
<div class="prefix">
  <span class="text">{{ props.node.label }}</span>
  <span :class="props.node.reuses ? 'uses' : 'uses none'">{{ props.node.uses }}</span>
  <span class="size">{{ props.node.size }}</span>
</div>
"""
PIN_TIMES_S = {600.0: "10 min", 3600.0: "1 hour", 86400.0: "1 day"}
_NOTHING = '<div class="empty">Choose a prefix to read it.</div>'


def prompt_of_prefix(service: Service, nodes: Mapping[str, PrefixNode], chosen: str) -> Prompt | None:
    """Return the part of a recent prompt up to the end of the chosen node.

    If no recent prompt is so long, return the longest prompt that ends inside the node. If no prompt enters the node,
    return None.
    """
    node = nodes.get(chosen)
    if node is None:
        return None
    path = [node]
    while (above := nodes.get(str(path[-1].parent_id))) is not None:
        path.append(above)
    recent = service.records.recent(NUM_RECENT)
    through = [record for record in recent if record.salt == node.salt and _goes_through(record, path)]
    if node.salt is None:  # a public prefix is also part of tenants' prompts
        through = through or [record for record in recent if _goes_through(record, path)]
    if not through:
        return None
    longest = max(through, key=lambda record: min(record.num_prompt_tokens, node.start + node.num_tokens))
    prompt = service.prompt_of(longest.prompt_token_ids, longest.salt)
    return replace(prompt, token_ids=prompt.token_ids[: node.start + node.num_tokens])


def _goes_through(record: RequestRecord, path: list[PrefixNode]) -> bool:
    """Say whether a prompt reaches into `path[0]`, the deepest node, and equals the path's known tokens to its end."""
    return record.num_prompt_tokens > path[0].start and all(
        record.prompt_token_ids[node.start : node.start + len(node.token_ids)].tolist()
        == list(node.token_ids[: record.num_prompt_tokens - node.start])
        for node in path
    )


class Prefixes:
    """The tab with the tree. Belongs to one viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reports: dict[str, dict[str, Any]] = {}
        self._refreshed = 0.0
        self._nodes: dict[str, PrefixNode] = {}
        self._opened = False
        self._chosen: str | None = None
        self._sought = ""
        with ui.element("div").classes("grid"):
            with card("Cached prefixes, most reused first", "span7"):
                self._search = (
                    ui.input(placeholder="Search in these prefixes", on_change=self._seek)
                    .props('outlined dense clearable debounce=300 data-testid="search" aria-label="search"')
                    .style("width:100%")
                )
                self._empty = ui.html('<div class="empty">Nothing is cached yet.</div>', sanitize=False)
                self._tree = (
                    ui.tree([], on_select=self._select)
                    .classes("tree")
                    .props('no-connectors no-nodes-label=" " data-testid="tree"')
                )
                self._tree.add_slot("default-header", _ROW)
            with card("This prefix", "span5"):
                self._detail = Html(test_id="prefix")
                self._detail.show(_NOTHING)
                with ui.element("div").classes("pins") as self._pins:
                    self._pin_time = ui.select(PIN_TIMES_S, value=3600.0).props(
                        'outlined dense aria-label="how long" data-testid="pin-time"'
                    )
                    ui.button("Pin", on_click=self._pin).props('flat data-testid="pin"').classes("plain")
                    ui.button("Unpin", on_click=self._unpin).props('flat data-testid="unpin"').classes("plain")
                self._pins.set_visibility(False)

    async def refresh(self) -> None:
        """Read the tree again, at most every `REFRESH_S` seconds."""
        if time.monotonic() - self._refreshed < REFRESH_S:
            return
        self._refreshed = time.monotonic()
        service = self._service
        cached = await service.thread.ask(TOP_PREFIXES, NUM_NODES, "")
        if cached is None:
            nodes = [
                _listed(number, prompt)
                for number, prompt in enumerate(await listed_prompts(service, NUM_PROMPTS))
                if self._sought in _searchable(prompt)
            ]
            self._reports = {node["id"]: node["report"] for node in nodes}
        else:
            self._nodes = {str(node.node_id): node for node in cached}
            reports = [node_report(node, service.llm.tokenizer, service.owner_of(node.salt)) for node in cached]
            self._reports = {str(report["id"]): report for report in reports}
            nodes = _nested(_matching(self._reports, self._sought))
        tree = [{key: value for key, value in node.items() if key != "report"} for node in nodes]
        nothing = f"No cached prefix holds {self._sought!r}." if self._sought else "Nothing is cached yet."
        self._empty.content = f'<div class="empty">{escape(nothing)}</div>'
        self._empty.set_visibility(not tree)
        if self._tree.props["nodes"] != tree:
            self._tree.props["nodes"] = tree
            self._tree.update()
            if self._sought:
                self._tree.expand()
            elif not self._opened and tree:
                self._opened = True
                self._tree.expand([entry["id"] for node in tree for entry in (node, *node["children"])])
        if self._chosen in self._reports:  # otherwise it was evicted, and the viewer may still read it
            self._detail.show(_detail(self._reports[self._chosen]))

    def _select(self, event: events.ValueChangeEventArguments[str | None]) -> None:
        self._chosen = event.value
        report = self._reports.get(event.value or "")
        self._detail.show(_NOTHING if report is None else _detail(report))
        self._pins.set_visibility((event.value or "") in self._nodes)

    async def _seek(self, event: events.ValueChangeEventArguments[str | None]) -> None:
        self._sought = (event.value or "").strip().lower()
        self._refreshed = 0.0
        await self.refresh()

    async def _pin(self) -> None:
        prompt, seconds = self._chosen_prompt(), float(self._pin_time.value)
        if prompt is None:
            return
        question = (
            f"Keep the first {draw.tokens(len(prompt.token_ids))} of this prompt for {PIN_TIMES_S[seconds]}? "
            "They are evicted last; other prefixes go sooner."
        )
        if not await confirmed(question, "Pin"):
            return
        with told():
            entry = await self._service.thread.change(PIN, prompt, Keep(seconds))
            ui.notify(f"{draw.tokens(entry.num_kept_tokens)} pinned for {PIN_TIMES_S[seconds]}.")

    async def _unpin(self) -> None:
        prompt = self._chosen_prompt()
        if prompt is None or not await confirmed("Let this prefix be evicted like all others?", "Unpin"):
            return
        with told():
            await self._service.thread.change(UNPIN, prompt)
            ui.notify("Unpinned.")

    def _chosen_prompt(self) -> Prompt | None:
        """Return a prompt that begins with the chosen prefix. If no recent prompt does, tell the viewer."""
        prompt = prompt_of_prefix(self._service, self._nodes, self._chosen or "")
        if prompt is None:
            ui.notify("No recent request begins with this prefix; pin it with LLM.pin_prefix().", type="warning")
        return prompt


def _matching(reports: Mapping[str, Mapping[str, Any]], sought: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the reports that contain a text, and all ancestors of these reports."""
    matching_ids: set[str] = set()
    for node_id, report in reports.items():
        if sought in _searchable(report):
            above = node_id
            while above in reports and above not in matching_ids:
                matching_ids.add(above)
                above = str(reports[above]["parent"])
    return {node_id: report for node_id, report in reports.items() if node_id in matching_ids}


def _searchable(report: Mapping[str, Any]) -> str:
    """Return the text for searches, in lower case: the tenant, and a prefix's text or (without a tokenizer) ids."""
    return f"{report['tenant'] or ''} {_text(report)}".lower()


def _text(report: Mapping[str, Any]) -> str:
    """Return a prefix's text, or its token ids if it has no text."""
    text: str = report["text"] if report["text"] is not None else " ".join(map(str, report.get("token_ids") or ()))
    return text


def _nested(reports: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make the nodes of `ui.tree`, nested as in the cache."""
    nodes: dict[str, dict[str, Any]] = {}
    roots: list[dict[str, Any]] = []
    for node_id, report in reports.items():  # a parent comes before its children
        reuses = report["reuses"]
        node = {
            "id": node_id,
            "label": _one_line(report),
            "reuses": reuses,
            "uses": f"reused {draw.count(reuses)}\u00d7" if reuses else "not reused",
            "size": draw.tokens(report["tokens"]),
            "children": [],
        }
        nodes[node_id] = node
        above = nodes.get(str(report["parent"]))
        (roots if above is None else above["children"]).append(node)
    return roots


def _listed(number: int, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Make a node of `ui.tree` for a prompt in a list."""
    cached = prompt["cached_tokens"]
    return {
        "id": str(number),
        "label": _one_line(prompt),
        "reuses": cached,
        "uses": f"{draw.count(cached)} cached",
        "size": draw.tokens(prompt["tokens"]),
        "children": [],
        "report": {"start": 0, "blocks": None, "reuses": prompt["recent_uses"] - 1, "children": 0, **prompt},
    }


def _one_line(report: Mapping[str, Any]) -> str:
    """Return the beginning of a node's text in one line, with the tenant in front if the node has no parent."""
    line = _text(report).replace("\n", "\u21b5")[:160]
    return f"[{report['tenant']}] {line}" if report["tenant"] and report.get("parent") is None else line


def _detail(report: Mapping[str, Any]) -> str:
    facts = {
        "tokens": f"{draw.count(report['tokens'])}, from token {draw.count(report['start'])} of the prompt",
        "blocks": None if report["blocks"] is None else draw.count(report["blocks"]),
        "cached now": None if "cached_tokens" not in report else f"{draw.count(report['cached_tokens'])} tokens",
        "reused": f"{draw.count(report['reuses'])} times",
        "branches": draw.count(report["children"]),
        "tenant": report["tenant"] or "everybody",
    }
    rows = "".join(f"<span>{name}</span><b>{escape(value)}</b>" for name, value in facts.items() if value is not None)
    text = report["text"] if report["text"] is not None else str(report.get("token_ids"))
    more = "\n\u2026" if report["tokens"] > 256 else ""
    return f'<div class="facts">{rows}</div><div class="whole" style="margin-top:12px">{escape(text)}{more}</div>'
