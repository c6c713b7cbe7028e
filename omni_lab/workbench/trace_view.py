"""The step timeline zoomed on a gap: which gaps are the largest, what caused them, what all stages did meanwhile."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd
import plotly.graph_objects as go
import traitlets

from omni_lab.frames import Run, load
from omni_lab.views import theme
from omni_lab.views.around_gap import length, sentence
from omni_lab.workbench.perfetto import PerfettoFrame
from omni_lab.workbench.plot import Plot
from omni_lab.workbench.run_gaps import RunGaps
from omni_lab.workbench.trace_gaps import TraceGaps

LISTED = 20
"""Largest gaps in the list; the median one comes after them."""

DECADES = (-1.3, 3.3)
"""Logarithms of the least and the most ms that are shown on either side of a gap."""


class TraceView(ipywidgets.VBox):
    """Gaps between steps: of a run (or its directory), or of a trace file or a directory of traces.

    `choice` says which steps: `stage`, `configuration` and `concurrency` (None: open loop) of a run, `worker` of a
    trace; at first those with the largest gap. `gap` is the place in the list, 0 the largest, the last one the median.
    `context_ms` is shown on either side of it. `waiting`: whether waiting counts as part of a gap. All can be set.
    `said` is the cause in words.

    Raises ValueError for a run without step gaps, and what `analyse` raises, TraceError above all, for a trace.
    """

    choice = traitlets.Dict()
    gap = traitlets.Int(0)
    context_ms = traitlets.Float(1.0)
    waiting = traitlets.Bool(False)

    def __init__(
        self,
        run_or_trace: Run | Path | str | Iterable[Path | str],
        dark: bool = False,
        stage_regex: str | None = None,
    ) -> None:
        super().__init__()
        self.source = _source(run_or_trace, stage_regex)
        self.plot = Plot(dark)
        self.said = ""
        self._listing = True
        self._build()
        self.choice, self.waiting = self.source.first, self.source.waiting
        self.observe(self._list, ["choice", "waiting"])
        self.observe(self._draw, ["gap", "context_ms"])
        self._list()

    @traitlets.validate("choice")
    def _known_choice(self, proposal: dict[str, Any]) -> dict[str, Any]:
        choice = self.choice | proposal["value"]
        for name, value in choice.items():
            known = self.source.choices.get(name)
            if known is None:
                raise traitlets.TraitError(f"choice: expected {', '.join(self.source.choices)}, got {name!r}")
            if value not in [one for _, one in known]:
                there = ", ".join(label for label, _ in known)
                raise traitlets.TraitError(f"choice: {name}: expected one of {there}, got {value!r}")
        return choice

    @traitlets.validate("gap")
    def _known_gap(self, proposal: dict[str, Any]) -> int:
        if not 0 <= proposal["value"] < max(len(self.listed), 1):
            raise traitlets.TraitError(f"gap: expected 0 to {len(self.listed) - 1}, got {proposal['value']}")
        return proposal["value"]

    @traitlets.validate("context_ms")
    def _known_context(self, proposal: dict[str, Any]) -> float:
        return min(max(proposal["value"], 10 ** DECADES[0]), 10 ** DECADES[1])

    def _build(self) -> None:
        """The controls, each bound to its trait."""
        wide = {"description_width": "initial"}
        self.dropdowns = {
            name: ipywidgets.Dropdown(options=options, value=self.source.first[name], description=name, style=wide)
            for name, options in self.source.choices.items()
        }
        self.with_waiting = ipywidgets.Checkbox(description="with waiting", indent=False, layout={"width": "auto"})
        self.list = ipywidgets.Select(rows=8, description="gaps", layout={"width": "100%"}, style=wide)
        step = {"layout": {"width": "auto"}}
        self.previous = ipywidgets.Button(description="Previous gap", icon="arrow-left", **step)
        self.next = ipywidgets.Button(description="Next gap", icon="arrow-right", **step)
        self.zoom = ipywidgets.FloatLogSlider(
            min=DECADES[0], max=DECADES[1], step=0.05, description="ms around", readout_format=".2f", style=wide
        )
        self.words = ipywidgets.HTML()
        self.perfetto = ipywidgets.Button(
            description="Open in Perfetto",
            tooltip="ui.perfetto.dev comes from the internet; the trace stays in this browser",
            **step,
        )
        self.frame = ipywidgets.VBox()
        for name, dropdown in self.dropdowns.items():
            dropdown.observe(lambda change, name=name: setattr(self, "choice", {name: change["new"]}), "value")
        self.with_waiting.observe(lambda change: setattr(self, "waiting", change["new"]), "value")
        self.list.observe(self._picked, "index")
        self.zoom.observe(lambda change: setattr(self, "context_ms", change["new"]), "value")
        self.previous.on_click(lambda _: setattr(self, "gap", self.gap - 1))
        self.next.on_click(lambda _: setattr(self, "gap", self.gap + 1))
        self.perfetto.on_click(self._open_perfetto)
        wrapped = {"flex_flow": "row wrap", "align_items": "center"}
        self.children = [
            ipywidgets.HBox([*self.dropdowns.values(), self.with_waiting], layout=wrapped),
            self.list,
            ipywidgets.HBox([self.previous, self.next, self.zoom, self.perfetto], layout=wrapped),
            self.words,
            self.plot,
            self.frame,
        ]

    def _list(self, _: object = None) -> None:
        """Lists the gaps of the choice and shows the largest."""
        own = self.source.gaps(self.choice, self.waiting)
        own = own[own["length_us"] > 0]
        self.count, self.median_us = len(own), own["length_us"].median()
        self.listed = pd.concat([own.head(LISTED), own.iloc[[(len(own) - 1) // 2]]]) if len(own) else own
        self._listing = True
        for name, dropdown in self.dropdowns.items():
            dropdown.value = self.choice[name]
        self.with_waiting.value = self.waiting
        self.list.options = [self._line(place) for place in range(len(self.listed))]
        self.gap = 0
        if len(own):
            self.context_ms = self.source.usual_ms(own)
        self._listing = False
        self.perfetto.layout.display = None if self.source.trace_file(self.choice) else "none"
        self._draw()

    def _line(self, place: int) -> str:
        row = self.listed.iloc[place]
        rank = "median" if place == len(self.listed) - 1 else f"{place + 1}."
        return f"{rank}  {length(row['length_us'])}  ·  {self.source.line(row, self.waiting)}"

    def _picked(self, change: dict[str, Any]) -> None:
        if change["new"] is not None and not self._listing:
            self.gap = change["new"]

    def _draw(self, _: object = None) -> None:
        """Shows the gap in words and as a figure."""
        if self._listing:
            return
        last = max(len(self.listed) - 1, 0)
        self.previous.disabled, self.next.disabled = self.gap == 0, self.gap == last
        subject = self.source.subject(self.choice)
        if self.listed.empty:
            self.said = f"No {subject} was measured"
            self.words.value = _status(self.said)
            self.plot.show_figure(theme.empty(go.Figure()))
            return
        self.list.index, self.zoom.value = self.gap, self.context_ms
        row = self.listed.iloc[self.gap]
        which = "Median" if self.gap == last else "Largest" if self.gap == 0 else f"{_ordinal(self.gap + 1)} largest"
        self.said = sentence(f"{which} {subject}", row["length_us"], self.source.parts(row, self.waiting))
        about = f"The median of {self.count:,} is {length(self.median_us)}."
        self.words.value = _status(self.said, f"{self.source.explain(row, self.waiting)} {about}")
        self.plot.show_figure(self.source.figure(row, self.context_ms))

    def _open_perfetto(self, _: object) -> None:
        for frame in self.frame.children:
            frame.close()
        try:
            self.frame.children = [PerfettoFrame(self.source.trace_file(self.choice))]
        except (OSError, ValueError) as error:  # nobody sees what a click raises
            self.frame.children = [ipywidgets.HTML(f'<em role="alert">{html.escape(str(error))}</em>')]


def _source(given: Run | Path | str | Iterable[Path | str], stage_regex: str | None) -> RunGaps | TraceGaps:
    if isinstance(given, str | Path) and (Path(given) / "run.json").is_file():
        given = load(given)
    return RunGaps(given) if isinstance(given, Run) else TraceGaps(given, stage_regex)


def _ordinal(place: int) -> str:
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def _status(said: str, more: str = "") -> str:
    return (
        f'<div role="status" style="line-height:1.5"><b>{html.escape(said)}.</b><br>'
        f'<span style="opacity:0.8">{html.escape(more)}</span></div>'
    )
