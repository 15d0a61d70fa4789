"""A question to the viewer before a change that affects everybody."""

from __future__ import annotations

from html import escape

from nicegui import ui


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
