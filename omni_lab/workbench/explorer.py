"""Latency of a run's requests: distributions, percentiles, limits, and each single request to look at and hear."""

from __future__ import annotations

import html
import math
from typing import Any

import ipywidgets
import pandas as pd
import traitlets

from omni_lab.frames import Run
from omni_lab.views import checks, figures, latency, theme
from omni_lab.views.figures import LABELS, load_label, thin
from omni_lab.views.latency import Limits
from omni_lab.views.steps import at_load, loads_of, number
from omni_lab.workbench.plot import Plot
from omni_lab.workbench.request_view import RequestView

METRICS = (
    "audio_ttfp_ms",
    "audio_rtf",
    "ttft_ms",
    "e2el_ms",
    "tpot_ms",
    "audio_underrun_s",
    "audio_duration_s",
)
"""Figures of single requests that can be chosen, where the run measured them."""

ALL = "all"
"""The concurrency that stands for each one."""

LISTED = 100
"""Requests in the list at most, thinned evenly over their order."""

TTFP_MS, RTF = 500.0, 1.0
"""Limits at first: a pause in a talk that nobody minds, and speech that keeps up with its listener."""

TABLE = """<style>
.omni-table table {border-collapse: collapse; font-size: 12px; font-variant-numeric: tabular-nums}
.omni-table th, .omni-table td {padding: 0 8px 0 0; text-align: right; border: 0; white-space: nowrap}
.omni-table thead th {opacity: 0.7; font-weight: 500; border-bottom: 1px solid currentColor}</style>"""


class LatencyExplorer(ipywidgets.VBox):
    """The latencies of a run, figures that answer at once, and any single request by a click on its point.

    `configurations` (several), `concurrency` (a load or its label, "open", or "all"), `metric` (of METRICS), `form`
    ("share" at or below each value, or "box"), `percentile`, `limit_ttfp_ms` and `limit_rtf` say what is shown;
    `selected` is the id of the request that is shown in full, or None. All can be set. Repeats with a capture are left
    out.

    Raises ValueError for a run without requests.
    """

    configurations = traitlets.Tuple()
    concurrency = traitlets.Any()
    metric = traitlets.Unicode()
    form = traitlets.Enum(("share", "box"), "share")
    percentile = traitlets.Float(95.0, min=1.0, max=99.9)
    limit_ttfp_ms = traitlets.Float(TTFP_MS, min=0.0)
    limit_rtf = traitlets.Float(RTF, min=0.0)
    selected = traitlets.Unicode(None, allow_none=True)

    def __init__(self, run: Run, dark: bool = False) -> None:
        super().__init__()
        self.run = run
        self.requests = checks.counted(run, run.requests)
        if self.requests.empty:
            raise ValueError(f"{run.path}/requests.jsonl: expected requests, and there are none")
        self.loads = {load_label(load): load for load in loads_of(self.requests)}
        self.metrics = [name for name in METRICS if name in self.requests and self.requests[name].notna().any()]
        self.names = [str(name) for name in self.requests["configuration"].drop_duplicates()]
        self.metric = self.metrics[0] if self.metrics else METRICS[0]
        self.configurations = tuple(self.names)
        self.concurrency = list(self.loads)[len(self.loads) // 2]
        self.distribution, self.scatter, self.bars = Plot(dark), Plot(dark), Plot(dark)
        self.detail = RequestView(run, dark)
        self._build()
        self.observe(self._choose, ["configurations", "concurrency"])
        self.observe(self._show_distribution, ["metric", "form", "percentile"])
        self.observe(self._list, ["metric"])
        self.observe(self._show_limits, ["limit_ttfp_ms", "limit_rtf"])
        self.observe(self._show_selected, ["selected"])
        self.observe(self._show_table, ["configurations", "concurrency", "metric", "limit_ttfp_ms", "limit_rtf"])
        self._choose()
        self._show_table()

    @traitlets.validate("configurations")
    def _known_configurations(self, proposal: dict[str, Any]) -> tuple[str, ...]:
        unknown = [name for name in proposal["value"] if name not in self.names]
        if unknown:
            raise traitlets.TraitError(f"configurations: expected of {', '.join(self.names)}, got {unknown[0]!r}")
        return tuple(proposal["value"])

    @traitlets.validate("concurrency")
    def _known_concurrency(self, proposal: dict[str, Any]) -> str:
        value = proposal["value"]
        label = value if isinstance(value, str) else load_label(value)
        if label not in (*self.loads, ALL):
            raise traitlets.TraitError(f"concurrency: expected one of {', '.join((*self.loads, ALL))}, got {value!r}")
        return label

    @traitlets.validate("metric")
    def _known_metric(self, proposal: dict[str, Any]) -> str:
        if self.metrics and proposal["value"] not in self.metrics:
            raise traitlets.TraitError(f"metric: expected one of {', '.join(self.metrics)}, got {proposal['value']!r}")
        return proposal["value"]

    @traitlets.validate("selected")
    def _known_request(self, proposal: dict[str, Any]) -> str | None:
        value = proposal["value"]
        if value is not None and not (self.requests["id"] == value).any():
            raise traitlets.TraitError(f"selected: the run has no request {value!r} in the repeats that count")
        return value

    def _build(self) -> None:
        """The controls, each bound to its trait, and their places."""
        wide = {"description_width": "initial"}
        rows = min(max(len(self.names), 3), 9)
        self.controls = {
            "configurations": ipywidgets.SelectMultiple(
                options=self.names, rows=rows, description="configurations", style=wide
            ),
            "concurrency": ipywidgets.Dropdown(options=[*self.loads, ALL], description="in flight", style=wide),
            "metric": ipywidgets.Dropdown(
                options=[(LABELS[name][0], name) for name in self.metrics or METRICS[:1]],
                description="metric",
                style=wide,
            ),
            "form": ipywidgets.ToggleButtons(options=["share", "box"], description="shown as", style=wide),
            "percentile": ipywidgets.FloatSlider(
                min=1, max=99.9, step=0.1, description="percentile", readout_format=".1f", style=wide
            ),
            "limit_ttfp_ms": self._log_slider("audio_ttfp_ms", "first audio within, ms"),
            "limit_rtf": self._log_slider("audio_rtf", "RTF at most"),
        }
        for name, control in self.controls.items():
            traitlets.link((self, name), (control, "value"))
        self.list = ipywidgets.Dropdown(description="request", style=wide, layout={"width": "auto"})
        self.list.observe(self._picked, "value")
        self.definition, self.table = ipywidgets.HTML(), ipywidgets.HTML()
        wrapped = ipywidgets.Layout(flex_flow="row wrap", align_items="flex-start")
        names, *others = self.controls.values()
        choice = ipywidgets.VBox(others[:4])
        self.children = [
            ipywidgets.HBox([names, choice], layout=wrapped),
            self.definition,
            ipywidgets.HBox([_half(self.distribution), _half(self.scatter)], layout=wrapped),
            ipywidgets.HBox(others[4:], layout=wrapped),
            ipywidgets.HBox([_half(self.bars), _half(self.table)], layout=wrapped),
            self.list,
            self.detail,
        ]

    def _log_slider(self, metric: str, description: str) -> ipywidgets.FloatLogSlider:
        """A slider over the decades in which a metric lies."""
        values = self.requests[metric].dropna() if metric in self.requests else pd.Series(dtype=float)
        values = values[values > 0]
        low, high = (values.min(), values.max()) if len(values) else (0.1, 10.0)
        return ipywidgets.FloatLogSlider(
            min=math.floor(math.log10(low)),
            max=math.ceil(math.log10(high * 1.001)),
            step=0.01,
            description=description,
            readout_format=".3g",
            disabled=not len(values),
            style={"description_width": "initial"},
            layout={"width": "420px"},
        )

    def _choose(self, _: object = None) -> None:
        """Everything anew, of the chosen configurations and load."""
        chosen = self.requests[self.requests["configuration"].isin(self.configurations)]
        if self.concurrency != ALL:
            chosen = chosen[at_load(chosen, self.loads[self.concurrency])]
        self.chosen = chosen
        self._show_scatter()
        self._show_distribution()
        self._list()

    def _show_distribution(self, _: object = None) -> None:
        if self.form == "share":
            figure = latency.ecdf(self.chosen, self.metric, self.percentile)
        else:
            figure = figures.distribution(self.chosen, self.metric)
        self.distribution.show_figure(figure)
        self.controls["percentile"].disabled = self.form != "share"
        meaning = (self.run.record.get("definitions") or {}).get(self.metric, "The run says no definition of it.")
        name = LABELS[self.metric][0]
        self.definition.value = f"<div style='line-height:1.5'><b>{html.escape(name)}.</b> {html.escape(meaning)}</div>"

    def _show_scatter(self) -> None:
        self.scatter.show_figure(figures.ttfp_rtf(self.chosen))
        self.scatter.on_point(lambda request: setattr(self, "selected", request))
        self.plain_shapes = self.scatter.layout.shapes
        ring = {"size": 16, "symbol": "circle-open", "color": theme.PURPLE, "line": {"width": 3}}
        self.scatter.add_scatter(name="selected", mode="markers", marker=ring, hoverinfo="skip", showlegend=False)
        self._show_limits()
        self._mark_selected()

    def _show_limits(self, _: object = None) -> None:
        """The region of good answers, how many there are of them, and nothing else: a slider moves it."""
        limits = Limits(self.limit_ttfp_ms, self.limit_rtf)
        self.good = latency.goodput(self.chosen, self.run.cells, limits)
        self.scatter.layout.shapes = [*self.plain_shapes, *latency.region(limits)]
        self.bars.show_figure(latency.goodput_bars(self.good, limits))

    def _show_table(self, _: object = None) -> None:
        """Percentiles of the metric and the share of good answers, a row for each cell."""
        frame = latency.percentiles(self.chosen, self.metric)
        frame = frame.merge(self.good.drop(columns="requests"), on=["configuration", "concurrency"], how="left")
        frame["concurrency"] = [load_label(load) for load in frame["concurrency"]]
        frame["share"] = [f"{share:.0%}" for share in frame["share"]]
        names = {"concurrency": "in flight", "requests": "n", "share": "good", "goodput_per_s": "good / s"}
        table = frame.rename(columns=names).to_html(index=False, border=0, float_format=number, na_rep="-")
        what = html.escape(", ".join(part for part in LABELS[self.metric] if part))
        self.table.value = f"{TABLE}<div class='omni-table' style='overflow-x:auto'><b>{what}</b>{table}</div>"

    def _list(self, _: object = None) -> None:
        """The requests that can be picked without a click, the largest first."""
        unit = LABELS[self.metric][1]
        rows = self.chosen[self.chosen[self.metric].notna()] if self.metric in self.chosen else self.chosen
        if self.metric in rows:
            rows = thin(rows.sort_values(self.metric, ascending=False), LISTED)
            options = [(f"{row.id}: {number(getattr(row, self.metric))} {unit}", row.id) for row in rows.itertuples()]
        else:
            options = [(name, name) for name in thin(rows["id"], LISTED)]
        if self.selected and self.selected not in [value for _, value in options]:
            options.insert(0, (self.selected, self.selected))
        self.list.unobserve(self._picked, "value")
        self.list.options = [("none", ""), *options]
        self.list.value = self.selected or ""
        self.list.observe(self._picked, "value")

    def _picked(self, change: dict[str, Any]) -> None:
        self.selected = change["new"] or None

    def _show_selected(self, _: object = None) -> None:
        self._list()
        self._mark_selected()
        self.detail.show(None if self.selected is None else self._request())

    def _mark_selected(self) -> None:
        """A ring around the request's point."""
        row = None if self.selected is None else self._request()
        ring = self.scatter.data[-1]
        with self.scatter.batch_update():
            ring.x = [] if row is None else [row.get("audio_ttfp_ms")]
            ring.y = [] if row is None else [row.get("audio_rtf")]

    def _request(self) -> pd.Series:
        return self.requests[self.requests["id"] == self.selected].iloc[0]


def _half(child: ipywidgets.DOMWidget) -> ipywidgets.Box:
    """A box that takes half of the width where there is room for two."""
    return ipywidgets.VBox([child], layout={"flex": "1 1 420px", "min_width": "0"})
