"""A chat that shows, turn by turn, which part of the conversation came from the cache.

Knows conversations and answers of the service. The chat is a tenant of its own if the server asks for keys, and shares
the cache with everybody if not.
"""

from __future__ import annotations

from html import escape

from nicegui import ui

from foreword.errors import ForewordError
from foreword.request import SamplingParams
from foreword.server.access.tenants import ANYBODY, DASHBOARD, Tenant
from foreword.server.dashboard import drawings as draw
from foreword.server.records import RequestRecord
from foreword.server.service import Caller, Service, new_id

MAX_TOKENS = 512
DEMO_SYSTEM = (
    "The code of the amber falcon is 4821.\n"
    "The home of the quiet lantern is Lisbon.\n"
    "The colour of the old compass is blue.\n"
)
DEMO_QUESTION = "What is the code of the amber falcon?"


class Chat:
    """The tab with the chat. Belongs to one viewer."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._messages: list[dict[str, str]] = []
        self._busy = False
        is_demo = service.model_name == "foreword-demo"
        with ui.element("div").classes("card chat"):
            ui.html(
                '<div class="title">Chat <span class="key"><i class="found"></i>from the cache</span>'
                '<span class="key"><i class="computed"></i>computed</span></div>',
                sanitize=False,
            )
            self._system = (
                ui.textarea("System message", value=DEMO_SYSTEM if is_demo else "")
                .props("outlined dense autogrow")
                .style("width:100%")
            )
            self._talk = ui.element("div").classes("talk").props('data-testid="talk"')
            with ui.element("div").classes("ask"):
                self._input = ui.input(placeholder="Say something", value=DEMO_QUESTION if is_demo else "").props(
                    'outlined dense data-testid="say"'
                )
                self._input.on("keydown.enter", self._send)
                ui.button("Send", on_click=self._send).props('unelevated data-testid="send"').classes("go")
                ui.button("New", on_click=self._begin_anew).props("flat").classes("plain")

    def _begin_anew(self) -> None:
        self._messages.clear()
        self._talk.clear()

    async def _send(self) -> None:
        said = self._input.value.strip()
        if not said or self._busy:
            return
        self._busy = True
        self._input.value = ""
        self._messages.append({"role": "user", "content": said})
        with self._talk:
            _say("user", said)
            answer = _say("assistant", "\u2026")
            turn = ui.html("", sanitize=False).classes("turn")
        try:
            text, record = await self._answer(answer)
            self._messages.append({"role": "assistant", "content": text})
            turn.content = self._reuse(record)
        except ForewordError as error:
            self._messages.pop()
            answer.content = escape(str(error))
        finally:
            self._busy = False

    async def _answer(self, shown: ui.html) -> tuple[str, RequestRecord]:
        """Have the conversation answered, and show the answer as it grows."""
        service = self._service
        head = [{"role": "system", "content": self._system.value}] if self._system.value.strip() else []
        prompt = await service.conversation([*head, *self._messages])
        tenant = Tenant(DASHBOARD if service.tenants.asks_for_keys else ANYBODY)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        stream = await service.start(Caller(tenant, "dashboard"), new_id("dash-"), [prompt], params, stream=True)
        text = ""
        try:
            async for deltas in stream.deltas():
                text += "".join(delta.text for delta in deltas)
                shown.content = escape(text) or "\u2026"
        finally:
            stream.close()
        return text, stream.jobs[0].record

    def _reuse(self, record: RequestRecord) -> str:
        return (
            f"{draw.reuse_bar(record.num_cached_tokens, record.num_prompt_tokens)}"
            f'<div class="counts"><span class="found">{draw.count(record.num_cached_tokens)} cached</span>'
            f'<span class="computed">{draw.count(record.num_computed_tokens)} computed</span>'
            f"<span>{draw.seconds(record.time_to_first_token)} to first token</span></div>"
            f"{draw.why(record, self._service.llm.tokenizer)}"
        )


def _say(role: str, text: str) -> ui.html:
    return ui.html(escape(text), sanitize=False).classes(f"said {role}")
