"""One gap between two steps, what it is made of, and what all stages did around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.metrics.phases import CAUSES, HOST, STEP
from omni_lab.views import theme
from omni_lab.views.figures import load_label
from omni_lab.views.steps import CAUSE_NAMES, look, number, of_repeat
from omni_lab.views.timeline import IN_TURN, SHADES

PIECES = 80
"""Steps of one row that are drawn singly at most; of more, neighbours are drawn as one."""

NAMED = 140
"""Letters that have room side by side over the picture's width: a bar has its name where that fits."""


def around_gap(steps: pd.DataFrame, gap: pd.Series, context_ms: float) -> go.Figure:
    """All stages from `context_ms` before a gap to `context_ms` after it, a row for each worker.

    `steps` as in `Run.steps`, `gap` a row of `steps.gaps`. The parts of every step and the causes of every gap, which
    the step clock has as sums: within a gap they are drawn in about the order in which they happen. The gap is framed;
    time counts from its start. Where a row has more than PIECES steps, neighbours are drawn as one, their parts summed,
    and the title says so.
    """
    whole_ns = _between_ns(gap)
    zero_ns = gap["start_ns"] - whole_ns
    figure = go.Figure(layout={"template": theme.LIGHT, "barmode": "overlay", "bargap": 0.3})
    around = of_repeat(steps, gap)
    starts = around["start_ns"] - sum(around[f"{cause}_ns"].fillna(0) for cause in CAUSES)
    low, high = zero_ns - 1e6 * context_ms, gap["start_ns"] + 1e6 * context_ms
    around = around.assign(since_ns=starts)[(around["end_ns"] >= low) & (starts <= high)]
    workers = list(around.groupby(["stage", "replica"], observed=True))
    several = len(workers) > around["stage"].nunique()
    names = [f"{stage} {replica}" if several else str(stage) for (stage, replica), _ in workers]
    lanes = pd.concat([together(lane.assign(lane=i)) for i, (_, lane) in enumerate(workers)], ignore_index=True)
    base = (lanes["since_ns"] - zero_ns) / 1e6
    width_ms = (high - low) / 1e6
    for part in (*IN_TURN, *STEP):
        wide = lanes[f"{part}_ns"].fillna(0) / 1e6
        _draw(figure, part, base, wide, lanes, width_ms)
        base = base + wide
    own = next(i for i, (key, _) in enumerate(workers) if key == (gap["stage"], gap["replica"]))
    _frame(figure, own, whole_ns)
    words = f"{gap['configuration']}, concurrency {load_label(gap['concurrency'])}: around a gap of the {gap['stage']}"
    if len(lanes) < len(around):
        words += f"; {len(around):,} steps as {len(lanes):,}"
    height = 54 * len(names)
    figure.update_layout(title_text=words, height=height + 170, margin_t=72, legend_y=-60 / height)
    figure.update_xaxes(title="ms since the gap began", range=[-context_ms, width_ms - context_ms])
    figure.update_yaxes(
        tickvals=list(range(len(names))), ticktext=names, range=[len(names) - 0.4, -0.75], showgrid=False
    )
    return figure


def together(lane: pd.DataFrame, most: int = PIECES) -> pd.DataFrame:
    """The steps of one worker, in order of time, as at most `most` rows: the times of neighbours are summed.

    `count`: how many steps a row is of; `step` is that of the first, `batch` the mean.
    """
    lane = lane.sort_values("start_ns").assign(count=1)
    if len(lane) <= most:
        return lane
    sums = ["count", "tokens", *(f"{part}_ns" for part in (*CAUSES, *STEP))]
    how = {"since_ns": "first", "step": "first", "batch": "mean", "lane": "first", **dict.fromkeys(sums, "sum")}
    return lane.groupby(np.arange(len(lane)) * most // len(lane)).agg(how)


def parts(gap: pd.Series, waiting: bool = False) -> list[tuple[str, float]]:
    """What a row of `steps.gaps` is made of, in µs, the longest first: the gap of the loop, or with the waiting."""
    causes = CAUSES if waiting else HOST
    found = [(CAUSE_NAMES[cause], float(gap[f"{cause}_us"])) for cause in causes if gap[f"{cause}_us"] > 0]
    return sorted(found, key=lambda part: -part[1])


def sentence(what: str, whole_us: float, made_of: Sequence[tuple[str, float]], most: int = 3) -> str:
    """The cause of a gap in a sentence: "largest gap of the talker: 3.1 ms, of which build payloads 2.4 ms (77 %)".

    The first `most` parts are told, as far as they are a hundredth of it.
    """
    told = [f"{name} {length(us)} ({100 * us / whole_us:.0f} %)" for name, us in made_of[:most] if us > whole_us / 100]
    return f"{what}: {length(whole_us)}" + (f", of which {', '.join(told)}" if told else "")


def length(us: float) -> str:
    """A time in words, in µs below a millisecond, else in ms."""
    return f"{number(us / 1e3)} ms" if us >= 1e3 else f"{number(us)} µs"


def _between_ns(gap: pd.Series) -> float:
    return sum(gap[f"{cause}_ns"] for cause in CAUSES)


def _draw(figure: go.Figure, part: str, base: pd.Series, wide: pd.Series, lanes: pd.DataFrame, width_ms: float) -> None:
    """The bars of one part of the steps, or one cause of the gaps."""
    some = wide > 0
    if not some.any():
        return
    name, marker = (part, {"color": SHADES[part]}) if part in STEP else (CAUSE_NAMES[part], look(part))
    base, wide, rows = base[some], wide[some], lanes[some]
    fits = wide / width_ms * NAMED > len(name)
    figure.add_bar(
        name=name,
        base=base.to_numpy("float32"),
        x=wide.to_numpy("float32"),
        y=rows["lane"].to_numpy("int8"),
        orientation="h",
        width=0.6,
        marker={**marker, "line": {"width": 0}},
        text=np.where(fits, name, "").tolist() if fits.any() else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        customdata=rows[["count", "step", "batch", "tokens"]].to_numpy("float32"),
        hovertemplate=f"{name} %{{x:,.4~g}} ms<br>%{{customdata[0]}} step(s) from step %{{customdata[1]}}, batch "
        "%{customdata[2]:.3~g}, %{customdata[3]} tokens or frames<extra></extra>",
    )


def _frame(figure: go.Figure, lane: int, whole_ns: float) -> None:
    """Frames the gap in its row, shades its time in all rows, and says how long it is."""
    figure.add_vrect(x0=0, x1=whole_ns / 1e6, fillcolor=theme.VERMILION, opacity=0.1, line_width=0, layer="below")
    line = {"color": theme.VERMILION, "width": 2}
    figure.add_shape(type="rect", x0=0, x1=whole_ns / 1e6, y0=lane - 0.36, y1=lane + 0.36, line=line)
    figure.add_annotation(
        x=whole_ns / 2e6,
        y=lane - 0.36,
        text=f"<b>{length(whole_ns / 1e3)}</b> between two steps",
        showarrow=False,
        yanchor="bottom",
        font={"size": 12},
    )
