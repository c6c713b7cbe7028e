"""Steps as bars in the row of their worker: of a window of time, whatever the request."""

from __future__ import annotations

from itertools import cycle

import pandas as pd
import plotly.graph_objects as go

from omni_lab.views import theme
from omni_lab.views.figures import load_label
from omni_lab.views.steps import number

BARS = 400
"""Bars of one kind that a row shows at most; shorter steps are drawn together."""

SHOWN = 120
"""Steps of the busiest worker in a window that is chosen here."""

KINDS = {"prefill": theme.ORANGE, "decode": theme.BLUE, "vocode": theme.GREEN, "generate": theme.PURPLE}
"""Colour of each kind of step; other kinds take sky blue and grey in turn."""


def window(steps: pd.DataFrame, start_ns: float | None = None, end_ns: float | None = None) -> go.Figure:
    """The steps of all workers from `start_ns` to `end_ns`, a row for each stage and replica, whatever the request.

    `steps` are of one repeat of a cell. Colour is the kind, opacity the batch, full at the largest one. Without times,
    the middle of the repeat, so long that the busiest worker takes SHOWN steps. Where a row has more than BARS steps of
    a kind, neighbours are drawn as one bar whose hover text counts them, and the title says so.
    """
    figure = go.Figure(layout={"template": theme.LIGHT, "title": {"text": "All stages at work"}, "barmode": "overlay"})
    if steps.empty:
        return theme.empty(figure)
    middle_ns, half_ns = _middle(steps)
    start_ns = middle_ns - half_ns if start_ns is None else start_ns
    end_ns = middle_ns + half_ns if end_ns is None else end_ns
    workers = steps.groupby(["stage", "replica"], observed=True).ngroups
    several = steps["stage"].nunique() < workers
    during = steps[(steps["end_ns"] >= start_ns) & (steps["start_ns"] <= end_ns)]
    if during.empty:
        return theme.empty(figure)
    during = during.assign(
        start=(during["start_ns"].clip(lower=start_ns) - start_ns) / 1e6,
        end=(during["end_ns"].clip(upper=end_ns) - start_ns) / 1e6,
        opacity=0.3 + 0.7 * during["batch"] / during["batch"].max(),
    )
    rows, parts = [], []
    for (stage, replica), lane in during.groupby(["stage", "replica"], observed=True):
        rows.append(f"{stage} {replica}" if several else str(stage))
        parts += [merged(kind.assign(row=rows[-1])) for _, kind in lane.groupby("kind")]
    shown = pd.concat(parts)
    draw_steps(figure, shown)
    cell, length_ms = steps.iloc[0], (end_ns - start_ns) / 1e6
    words = f"{cell['configuration']}, concurrency {load_label(cell['concurrency'])}"
    words += f": {number(length_ms)} ms of all stages"
    if len(shown) < len(during):
        words += f"; {len(during):,} steps as {len(shown):,} bars"
    figure.update_layout(title_text=words, height=150 + 44 * len(rows), bargap=0.3, legend_y=-60 / (44 * len(rows)))
    since_s = (start_ns - steps["start_ns"].min()) / 1e9
    figure.update_xaxes(title=f"ms, from {since_s:.2f} s after the first step of the repeat", range=[0, length_ms])
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1], range=[-0.6, len(rows) - 0.4])
    return figure


def merged(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of one kind and row as at most BARS bars: neighbours become one, which counts them.

    `start` and `end` in ms; `busy`, the ms in steps, and `steps` are added.
    """
    steps = steps.assign(busy=steps["end"] - steps["start"], steps=1)
    if len(steps) <= BARS:
        return steps
    since = steps["start"].min()
    bucket = ((steps["start"] - since) * (BARS - 1) // (steps["start"].max() - since)).to_numpy()
    how = {"start": "min", "end": "max", "busy": "sum", "steps": "sum", "batch": "mean", "tokens": "sum"}
    return steps.groupby(bucket).agg({**how, "kind": "first", "row": "first", "opacity": "max"})


def draw_steps(figure: go.Figure, steps: pd.DataFrame) -> None:
    """Bars of what `merged` gives, each in its `row` and with its `opacity`."""
    others = cycle([theme.SKY, theme.GREY])
    for kind, part in steps.groupby("kind"):
        figure.add_bar(
            name=kind,
            base=part["start"],
            x=part["end"] - part["start"],
            y=part["row"],
            orientation="h",
            width=0.7,
            marker={"color": KINDS.get(kind) or next(others), "opacity": part["opacity"], "line": {"width": 0}},
            customdata=part[["start", "busy", "steps", "batch", "tokens"]].round(3),
            hovertemplate="at %{customdata[0]:.2f} ms, busy %{customdata[1]:.2f} ms<br>%{customdata[2]} step(s), batch "
            "%{customdata[3]:.1f}, %{customdata[4]} tokens",
        )


def _middle(steps: pd.DataFrame) -> tuple[float, float]:
    """The middle of the steps, and half the time in which the busiest worker takes SHOWN of them; both in ns."""
    first, last = steps["start_ns"].min(), steps["end_ns"].max()
    most = steps.groupby(["stage", "replica"], observed=True).size().max()
    return (first + last) / 2, (last - first) / 2 * min(1.0, SHOWN / most)
