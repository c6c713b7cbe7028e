"""A figure of `omni_lab.views` on the screen, whose content can be exchanged."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import pandas as pd
import plotly.basewidget
import plotly.graph_objects as go
import traitlets
from plotly.basedatatypes import BaseTraceType

from omni_lab.views import theme


class Library(anywidget.AnyWidget):
    """plotly's module, 5 MB. It has nothing to show; every FigureWidget would send a copy of its own."""

    _esm = """
    export default {
      initialize({ model }) {
        const url = URL.createObjectURL(new Blob([model.get("bundle")], { type: "text/javascript" }));
        const shared = (globalThis[Symbol.for("omni_lab plotly")] ??= Promise.withResolvers());
        setTimeout(() => shared.resolve(import(url).then((plotly) => plotly.default)), 100);  // others begin first
      },
    };
    """

    bundle = traitlets.Unicode().tag(sync=True)


@cache
def library() -> Library:
    """The one of this process."""
    package = Path(plotly.basewidget.__file__).with_name("package_data")
    return Library(bundle=(package / "widgetbundle.js").read_text("utf-8"))


class Plot(go.FigureWidget):
    """A plotly FigureWidget that takes its JavaScript from the page's one copy. `dark` chooses the template."""

    _esm = Path(__file__).with_name("plot.js").read_text("utf-8")

    _whole_at = traitlets.Int(-1).tag(sync=True)
    """How many edits the figure had seen when all of it was sent; the later ones were sent one by one."""

    def __init__(self, dark: bool = False) -> None:
        library()
        super().__init__()
        self._dark = dark
        self._on_page = False
        self._config = {"responsive": True, "displaylogo": False}
        self.on_msg(self._asked)

    def show_figure(self, figure: go.Figure) -> None:
        """Shows a figure in place of the one before. Handlers of clicks go with the traces they were set on."""
        layout = go.Layout(figure.layout, template=theme.DARK if self._dark else theme.LIGHT)
        left = set(self.layout.to_plotly_json()) - set(layout.to_plotly_json())
        self.data = ()
        self.plotly_relayout(dict.fromkeys(left))  # a new layout alone would leave the old one's shapes in the browser
        self.layout = layout
        self.add_traces([_with_nulls(trace) for trace in figure.data])
        if not self._on_page:
            self._send_whole()

    def on_point(self, clicked: Callable[[str], object]) -> None:
        """Has `clicked` called with the customdata of a point of the present traces when it is clicked."""
        for trace in self.data:
            trace.on_click(lambda trace, points, state: [clicked(trace.customdata[i]) for i in points.point_inds])

    def _send_whole(self) -> None:
        with self.hold_sync():
            self._widget_data = deepcopy(self._data)
            self._widget_layout = deepcopy(self._layout)
            self._whole_at = self._last_trace_edit_id + self._last_layout_edit_id

    def _asked(self, _: object, content: dict[str, Any], buffers: object) -> None:
        """plot.js asks for the whole figure; what has not changed since it was sent, and was lost, goes out again."""
        self._on_page = True
        self._send_whole()
        self.send_state([name for name in self.keys if name.startswith(("_widget_", "_whole_", "_last_"))])

    @traitlets.observe("_js2py_traceDeltas")
    def _drawn(self, _: object) -> None:
        self._on_page = True


def _with_nulls(trace: BaseTraceType) -> dict[str, Any]:
    """The trace with null for NaN in `customdata`, which travels as JSON unless it is a plain row of numbers."""
    sent = trace.to_plotly_json()
    if trace.customdata is not None:
        values = np.array(trace.customdata, dtype=object)
        sent["customdata"] = np.where(pd.isna(values), None, values)
    return sent
