"""Parts that every page of ours is made of: pieces of HTML, cards, figures, and the head."""

from __future__ import annotations

from html import escape

from nicegui import ui

from foreword.server.dashboard.style import ICON, STYLE

WINDOWS_S = {60.0: "1 min", 300.0: "5 min", 900.0: "15 min", 3600.0: "1 h"}
"""Windows of time that a viewer may choose."""


class Html:
    """A piece of the page that is sent again only if it has changed."""

    def __init__(self, classes: str = "", test_id: str = "") -> None:
        self._element = ui.html("", sanitize=False).classes(classes)  # what draws escapes
        if test_id:
            self._element.props(f'data-testid="{test_id}"')

    def show(self, content: str) -> None:
        """Show this HTML, whose texts are escaped."""
        if self._element.content != content:
            self._element.content = content


class Head:
    """The page's styles and its head: our name, the name of what is shown, its state, and a switch of colours."""

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
    """A card, to be filled by a `with` statement; `keys` name what is drawn green and orange."""
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
    """A card with one large number."""
    with ui.element("div").classes("card"):
        ui.html(f'<div class="label">{escape(name)}</div>', sanitize=False)
        return Html("figure", test_id)


def window_choice() -> ui.toggle:
    """The choice of a window of time; its value has seconds."""
    return ui.toggle(WINDOWS_S, value=300.0).props(
        'no-caps unelevated dense data-testid="window" aria-label="time window"'
    )
