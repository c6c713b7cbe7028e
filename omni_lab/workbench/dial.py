"""Controls over one picture: it is drawn anew whenever one of them is moved."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from omni_lab.workbench.plot import Plot

Shown = go.Figure | ipywidgets.Widget
"""What a dial can show."""


class Dial(ipywidgets.VBox):
    """`draw`, called with the values of its controls, and what it gave.

    Each control is a widget, or what stands for one: (low, high) or (low, high, step) for a slider, a list or a map of
    labels for a menu, True or False for a tick. A figure is changed in place; any other widget takes the place of the
    one before, which is closed. A ValueError of `draw` is shown as a sentence, and the last picture stays.
    """

    def __init__(self, draw: Callable[..., Shown], dark: bool = False, **controls: Any) -> None:
        self.draw = draw
        self.dark = dark
        self.controls = {name: _control(name, given) for name, given in controls.items()}
        self.note = ipywidgets.HTML()
        self.note.layout.display = "none"
        row = ipywidgets.HBox(list(self.controls.values()), layout={"flex_flow": "row wrap"})
        self.shown: ipywidgets.Widget = ipywidgets.HTML()
        super().__init__([row, self.note, self.shown])
        for control in self.controls.values():
            control.observe(self._redraw, "value")
        self._redraw()

    def _redraw(self, _: object = None) -> None:
        try:
            found = self.draw(**{name: control.value for name, control in self.controls.items()})
        except ValueError as error:
            self.note.value = f"<em>{escape(str(error))}</em>"
            self.note.layout.display = ""
            return
        self.note.layout.display = "none"
        before = self.shown
        if isinstance(found, go.Figure):
            self.shown = before if isinstance(before, Plot) else Plot(self.dark)
            self.shown.show_figure(found)
        else:
            self.shown = found
        if self.shown is not before:
            self.children = [*self.children[:2], self.shown]
            before.close()


def _control(name: str, given: Any) -> ipywidgets.Widget:
    control = given if isinstance(given, ipywidgets.Widget) else ipywidgets.interactive.widget_from_abbrev(given)
    if control is None:
        raise ValueError(f"{name}: expected a widget, (low, high), a list, a map or a tick, got {given!r}")
    control.description = control.description or name.replace("_", " ")
    control.style.description_width = "initial"
    return control
