"""Parts that all pages share: pieces of HTML, cards, figures, and the head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

from nicegui import ui

from foreword.errors import ForewordError

STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><rect x="2" y="4" width="20" height="4" rx="2" '
    'fill="#14a87c"/><rect x="2" y="10" width="13" height="4" rx="2" fill="#14a87c"/><rect x="2" y="16" width="8" '
    'height="4" rx="2" fill="#14a87c"/><rect x="17" y="10" width="5" height="4" rx="2" fill="#e0892b"/><rect x="12" '
    'y="16" width="10" height="4" rx="2" fill="#e0892b"/></svg>'
)
FORM_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --ink: #1b2430; --edge: #d7dce3; }
@media (prefers-color-scheme: dark) { :root { --page: #0f141b; --card: #171e28; --ink: #e6ebf2; --edge: #273140; } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
form { background: var(--card); border: 1px solid var(--edge); border-radius: 14px; padding: 30px;
  width: min(300px, 80vw); display: grid; gap: 10px; }
svg { width: 40px; }
h1 { margin: 0 0 8px; font-size: 22px; letter-spacing: -0.02em; }
p { margin: 0; color: #d43d51; min-height: 1.5em; }
input, button { font: inherit; padding: 10px 12px; border-radius: 8px; border: 1px solid var(--edge);
  background: var(--page); color: inherit; }
button { background: #119a72; border: 0; color: #fff; font-weight: 600; cursor: pointer; }
"""
WINDOWS_S = {60.0: "1 min", 300.0: "5 min", 900.0: "15 min", 3600.0: "1 h"}
"""Windows of time that a viewer may choose: seconds -> name."""


class Html:
    """A piece of the page that is sent again only if it has changed."""

    def __init__(self, classes: str = "", test_id: str = "") -> None:
        self._element = ui.html("", sanitize=False).classes(classes)  # callers escape their texts
        if test_id:
            self._element.props(f'data-testid="{test_id}"')

    def show(self, content: str) -> None:
        """Show this HTML, whose texts are escaped."""
        if self._element.content != content:
            self._element.content = content


class Head:
    """The page's styles and head: foreword's name, the shown engine's name and state, and a switch of colours."""

    def __init__(self, name: str) -> None:
        ui.add_css(STYLE)
        ui.colors(primary="#119a72")
        self._dark = ui.dark_mode(None)
        with ui.header(fixed=True).classes("top"):
            ui.html(f'<div class="brand">{ICON}foreword</div>', sanitize=False)
            ui.html(f'<div class="model">{escape(name)}</div>', sanitize=False).style("min-width:0")
            with ui.element("div").style("margin-left:auto"):
                self._state = Html(test_id="state")
            ui.button(icon="contrast", on_click=self._switch_colours).props(
                'flat round dense aria-label="light or dark" data-testid="colours"'
            ).classes("plain")

    def show_state(self, words: str, *, is_bad: bool) -> None:
        """Show a state with a green or a red mark."""
        self._state.show(f'<div class="state{" bad" if is_bad else ""}"><i></i>{escape(words)}</div>')

    async def _switch_colours(self) -> None:
        if self._dark.value is None:
            self._dark.value = not await ui.run_javascript("document.body.classList.contains('body--dark')")
        else:
            self._dark.value = not self._dark.value


def card(title: str, span: str, keys: tuple[str, str] | None = None) -> ui.element:
    """Make a card that a `with` statement fills. `keys` name the green and the orange parts of its drawing."""
    element = ui.element("div").classes(f"card {span}")
    marks = ""
    if keys is not None:
        marks = "".join(
            f'<span class="key"><i class="{kind}"></i>{key}</span>'
            for kind, key in zip(("found", "computed"), keys, strict=True)
        )
    with element:
        ui.html(f'<div class="title">{escape(title)}{marks}</div>', sanitize=False)
    return element


def figure(name: str, test_id: str) -> Html:
    """Make a card with one large number."""
    with ui.element("div").classes("card"):
        ui.html(f'<div class="label">{escape(name)}</div>', sanitize=False)
        return Html("figure", test_id)


def window_choice() -> ui.toggle:
    """Make the control by which a viewer chooses a window of time, in seconds."""
    return ui.toggle(WINDOWS_S, value=300.0).props(
        'no-caps unelevated dense data-testid="window" aria-label="time window"'
    )


@contextmanager
def told() -> Iterator[None]:
    """Show the viewer the ForewordError that the `with` statement's block raises, if any."""
    try:
        yield
    except ForewordError as error:
        ui.notify(str(error), type="negative")


async def confirmed(question: str, action: str) -> bool:
    """Ask the viewer and return whether they chose the action. Closing the question means no."""
    with ui.dialog() as dialog, ui.element("div").classes("ask-first").props('role="alertdialog"'):
        ui.html(escape(question), sanitize=False)
        with ui.element("div").classes("choices"):
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat").classes("plain")
            ui.button(action, on_click=lambda: dialog.submit(True)).props('unelevated data-testid="confirm"').classes(
                "go"
            )
    answer = await dialog
    dialog.delete()
    return bool(answer)
