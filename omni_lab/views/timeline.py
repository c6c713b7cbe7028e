"""Decode steps before and after: the same few steps of each configuration, and the gaps between them, measured."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from omni_lab.metrics.phases import CAUSES, HOST, STEP
from omni_lab.views import theme
from omni_lab.views.figures import by_configuration
from omni_lab.views.steps import CAUSE_NAMES, gaps, look, number, subject

WINDOW = 8
"""Consecutive steps of one configuration."""

NEAREST = 0.02
"""This share of the gaps passes for the median: among them the one with the most even batch is shown."""

LABEL_WIDTH = 0.12
"""Share of the picture's width that a gap's label needs; labels that would lie on another one are left to hovering."""

SHADES = {"prepare": "#99C7E0", "forward": theme.BLUE, "sample": "#4C9CC9"}
"""Colours of the parts of a step, shades of one blue."""

IN_TURN = ("payload", "send", "slot", "other", "input", "schedule")
"""The causes in about the order in which they happen between two steps; the clock keeps their sums alone."""


def timeline(steps: pd.DataFrame, count: int = WINDOW) -> go.Figure:
    """Decode steps as bars, before and after: a lane for each configuration in `steps`, which are of one stage.

    Above, `count` consecutive steps of one worker around a gap of median length, all lanes from zero and on one scale,
    at the same batch or the nearest that a lane has; the median is that of the decode steps at this batch:
    prepare, forward and sample as shades, what lies between as its causes, each gap's label the gap of the loop in µs
    ("+ wait" where waiting took longer). The label of the median gap is bold. Below, that gap alone, enlarged: its
    causes less the waiting. Code2Wav and others without decode steps show their most frequent kind. Lanes without a
    measured gap are left out.
    """
    found = {str(name): own for name, own in by_configuration(gaps(steps))}
    if not found:
        title = {"text": f"{subject(steps)}: consecutive steps"}
        return theme.empty(go.Figure(layout={"template": theme.LIGHT, "title": title}))
    kinds = {name: _kind(own) for name, own in found.items()}
    batch = _common([own.loc[own["kind"] == kinds[name], "batch"] for name, own in found.items()])
    lanes = {name: _around_median(own, kinds[name], batch, count) for name, own in found.items()}
    shown = sorted({lane.loc[lane["middle"], "batch"].item() for lane in lanes.values()})
    words = f"{' or '.join(dict.fromkeys(kinds.values()))} steps around their median gap at batch "
    words += " to ".join(f"{one:g}" for one in dict.fromkeys((shown[0], shown[-1])))
    title = {"text": f"{subject(steps)}: consecutive {words}"}
    height = 46 * len(lanes)
    figure = make_subplots(2, 1, row_heights=[0.58, 0.42], vertical_spacing=min(0.3, 90 / (2 * height + 120)))
    _draw_steps(figure, lanes)
    _draw_causes(figure, lanes)
    _label_gaps(figure, lanes)
    _enlarge(figure, lanes)
    figure.update_layout(
        template=theme.LIGHT, title=title, height=2 * height + 240, barmode="overlay", legend_y=-80 / (2 * height + 120)
    )
    words = [f"{name}<br>{lane['batch'].mean():.3g} in a step" for name, lane in lanes.items()]
    for row in (1, 2):
        figure.update_yaxes(
            tickvals=list(range(len(lanes))), ticktext=words, range=[len(lanes) - 0.45, -0.6], showgrid=False, row=row
        )
    figure.update_xaxes(title="ms since the first step shown began", rangemode="tozero", row=1)
    figure.update_xaxes(title="the median gap, enlarged: µs since its step before ended, less waiting", row=2)
    return figure


def _kind(found: pd.DataFrame) -> str:
    """Which steps are shown: decode steps, else the most frequent kind."""
    return "decode" if (found["kind"] == "decode").any() else found["kind"].mode().iloc[0]


def _common(batches: list[pd.Series]) -> float:
    """The batch that is most frequent where it is rarest; the median of all where the lanes share none."""
    shares = pd.concat([one.value_counts(normalize=True) for one in batches], axis=1).fillna(0).min(axis=1)
    return shares.idxmax() if shares.max() > 0 else pd.concat(batches).median()


def _around_median(found: pd.DataFrame, kind: str, batch: float, count: int) -> pd.DataFrame:
    """At most `count` consecutive steps of one worker and kind around a step whose batch is nearest to `batch`.

    Of such steps one whose gap is nearest to their median, where the steps around it have that batch too if there is a
    choice. `found` is what `gaps` gave. `start` and `end` in ms since the first one began; `middle` says which has the
    gap. Time without a request ends a row of consecutive steps, for it is no gap.
    """
    before = found.shift()
    joined = (
        (found["worker"] == before["worker"])
        & (found["step"] == before["step"] + 1)
        & (found["kind"] == before["kind"])
    )
    series = (~joined | (found["idle_ns"] > 0)).cumsum()
    place, length = found.groupby(series).cumcount(), found.groupby(series)["step"].transform("size")
    of_kind = found["kind"] == kind
    count = min(count, int(length[of_kind].max()))
    fits = of_kind & (length >= count) & (place >= min(1, count - 1))  # the gap lies between two steps that are shown
    off = (found["batch"] - batch).abs()
    alike = off == off[fits].min()
    uneven = (found["batch"].rolling(count, center=True, min_periods=1).mean() - found["batch"]).abs().round()
    distance = (found["gap_us"] - found.loc[of_kind & alike, "gap_us"].median()).abs()
    choice = pd.DataFrame({"uneven": uneven, "distance": distance})[fits & alike]
    choice = choice[choice["distance"] <= choice["distance"].quantile(NEAREST)]
    middle = found.index.get_loc(choice.sort_values(["uneven", "distance"], kind="stable").index[0])
    first = middle - min(max(count // 2, place.iloc[middle] + count - length.iloc[middle]), place.iloc[middle])
    lane = found.iloc[first : first + count]
    start, end = ((lane[f"{side}_ns"] - lane["start_ns"].iloc[0]) / 1e6 for side in ("start", "end"))
    return lane.assign(start=start, end=end, middle=lane.index == found.index[middle])


def _table(lanes: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """All lanes as one table, numbered in `lane`."""
    return pd.concat([lane.assign(lane=number) for number, lane in enumerate(lanes.values())], ignore_index=True)


def _draw_steps(figure: go.Figure, lanes: dict[str, pd.DataFrame]) -> None:
    """The parts of every step, one behind the other."""
    rows = _table(lanes)
    base = rows["start"]
    for part in STEP:
        width = rows[f"{part}_ns"] / 1e6
        _bars(figure, 1, part, base, width, rows["lane"], {"color": SHADES[part]}, rows)
        base = base + width


def _draw_causes(figure: go.Figure, lanes: dict[str, pd.DataFrame]) -> None:
    """The causes of every gap between two steps that are shown, from the end of the first of them."""
    rows = _table({name: lane.iloc[1:] for name, lane in lanes.items()})
    base = rows["start"] - sum(rows[f"{cause}_us"] for cause in CAUSES) / 1e3
    for cause in IN_TURN:
        width = rows[f"{cause}_us"] / 1e3
        if (width > 0).any():
            legend = cause not in HOST  # those have theirs below
            _bars(figure, 1, CAUSE_NAMES[cause], base, width, rows["lane"], look(cause), rows, legend)
        base = base + width


def _label_gaps(figure: go.Figure, lanes: dict[str, pd.DataFrame]) -> None:
    """The gap of the loop in µs above each gap for which there is room, those of the median gaps first."""
    room = LABEL_WIDTH * max(lane["end"].max() for lane in lanes.values())
    x, y, text = [], [], []
    for row, lane in enumerate(lanes.values()):
        ends = lane["end"].shift()
        between = lane.assign(at=(ends + lane["start"]) / 2)[ends.notna()].sort_values("middle", ascending=False)
        taken: list[float] = []
        for _, step in between.iterrows():
            if all(abs(step["at"] - other) >= room for other in taken):
                taken.append(step["at"])
                words = f"{number(step['gap_us'])} µs"
                words += " + wait" if step["input_us"] + step["slot_us"] > step["gap_us"] else ""
                text.append(f"<b>{words}</b>" if step["middle"] else words)
        x += taken
        y += [row - 0.3] * len(taken)
    figure.add_scatter(
        x=x,
        y=y,
        text=text,
        mode="markers+text",
        textposition="top center",
        textfont={"size": 10},
        marker={"symbol": "triangle-down", "size": 5, "color": theme.VERMILION},
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        row=1,
        col=1,
    )


def _enlarge(figure: go.Figure, lanes: dict[str, pd.DataFrame]) -> None:
    """The causes of each lane's median gap from zero, less the waiting."""
    rows = _table({name: lane[lane["middle"]] for name, lane in lanes.items()})
    base = pd.Series(0.0, rows.index)
    for cause in IN_TURN:
        if cause in HOST:
            width = rows[f"{cause}_us"]
            _bars(figure, 2, CAUSE_NAMES[cause], base, width, rows["lane"], look(cause), rows)
            base = base + width
    figure.add_scatter(
        x=base,
        y=rows["lane"],
        text=[f" <b>{number(value)} µs</b>" for value in base],
        mode="text",
        textposition="middle right",
        textfont={"size": 11},
        hoverinfo="skip",
        showlegend=False,
        row=2,
        col=1,
    )
    figure.update_xaxes(range=[0, 1.15 * base.max()], row=2)


def _bars(
    figure: go.Figure,
    row: int,
    name: str,
    base: pd.Series,
    width: pd.Series,
    lanes: pd.Series,
    marker: dict,
    steps: pd.DataFrame,
    legend: bool = True,
) -> None:
    micros_wide = width * (1e3 if row == 1 else 1.0)
    figure.add_bar(
        name=name,
        legendgroup=name,
        showlegend=legend,
        base=base.tolist(),
        x=width.tolist(),
        y=lanes.tolist(),
        orientation="h",
        width=0.5,
        marker={**marker, "line": {"width": 0}},
        customdata=np.column_stack([steps["step"], steps["batch"], steps["tokens"], micros_wide.round(3)]),
        hovertemplate="step %{customdata[0]}, batch %{customdata[1]}, %{customdata[2]} tokens or frames<br>"
        + f"{name} %{{customdata[3]:,.4~g}} µs<extra></extra>",
        row=row,
        col=1,
    )
