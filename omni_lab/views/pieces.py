"""What each piece of a whole saves: differences of the same repeats, with their interval, and shares of the whole."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go

from omni_lab.frames import CELL, UNITS, Run
from omni_lab.metrics.relative import t_quantile, undisturbed
from omni_lab.views import theme
from omni_lab.views.figures import LABELS
from omni_lab.views.steps import at_load, number

SUM = "sum of the pieces"
"""The row that adds up what the pieces save alone."""


def repeats(run: Run) -> pd.DataFrame:
    """A row for each repeat that counts in `Run.cells`, its figures named as there."""
    rows = [
        {key: cell[key] for key in CELL} | {UNITS.get(name, name): value for name, value in one.items()}
        for cell in run.record.get("cells", [])
        for one in undisturbed(cell.get("runs") or [])
    ]
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=[*CELL, "repeat"])
    return frame.astype({"configuration": run.cells["configuration"].dtype})


def saved(run: Run, metric: str, off: str, on: str, concurrency: float | None = 1) -> pd.DataFrame:
    """What each configuration takes away from a figure of `off`, and which share that is of what `on` takes away.

    A row for `on`, for each other configuration (the pieces, each alone) and for the SUM of these. `saved`: mean of the
    repeats' differences, in the unit of `metric`; `low` and `high`: their 95 % interval of Student's t, NaN with one
    repeat; `share`: of what `on` saves. Raises ValueError if the run has no such configuration,
    KeyError if it has no such figure.
    """
    rows = repeats(run)
    rows = rows[at_load(rows, concurrency)]
    table = rows.pivot(index="repeat", columns="configuration", values=metric)
    if missing := {off, on} - set(table.columns.astype(str)):
        raise ValueError(
            f"{run.path}: expected the configuration {' and '.join(sorted(missing))} at this load, found none"
        )
    gains = (-table.sub(table[off], axis=0)).drop(columns=off).dropna()
    gains.columns = gains.columns.astype(str)
    gains[SUM] = gains.drop(columns=on).sum(axis=1)
    count, mean = len(gains), gains.mean()
    reach = t_quantile(count - 1) * gains.std() / math.sqrt(count) if count > 1 else math.nan
    frame = pd.DataFrame({"saved": mean, "low": mean - reach, "high": mean + reach, "share": mean / mean[on]})
    return frame.rename_axis("configuration").reset_index()


def figure(frame: pd.DataFrame, metric: str, on: str) -> go.Figure:
    """The rows of `saved` as bars, the largest piece first, with the whole above and the sum of the pieces below."""
    base = metric.removeprefix("mean_")
    name, unit = LABELS.get(base, (base, ""))
    title = {"text": f"{name}: what each piece alone saves{f', {unit}' if unit else ''}"}
    drawn = go.Figure(layout={"template": theme.LIGHT, "title": title})
    if frame.empty or frame["saved"].isna().all():
        return theme.empty(drawn)
    whole, total = frame["configuration"] == on, frame["configuration"] == SUM
    pieces = frame[~whole & ~total].sort_values("saved", ascending=False)
    rows = pd.concat([frame[whole], pieces, frame[total]])
    looks = {on: (theme.BLUE, ""), SUM: (theme.GREY, "/")}
    chosen = [looks.get(one, (theme.SKY, "")) for one in rows["configuration"]]
    drawn.add_bar(
        x=rows["saved"],
        y=rows["configuration"].str.replace("_", " "),
        orientation="h",
        error_x={"array": rows["high"] - rows["saved"], "width": 4, "thickness": 1},
        marker={
            "color": [color for color, _ in chosen],
            "pattern": {"shape": [shape for _, shape in chosen], "size": 6, "fillmode": "overlay"},
        },
        customdata=rows[["low", "high", "share"]],
        hovertemplate="%{y}: saves %{x:,.4~g} (95 % interval %{customdata[0]:,.4~g} to %{customdata[1]:,.4~g})<br>"
        "%{customdata[2]:.0%} of the whole<extra></extra>",
        showlegend=False,
    )
    reach = rows["high"].fillna(rows["saved"]).clip(lower=0)
    drawn.add_scatter(
        x=reach,
        y=rows["configuration"].str.replace("_", " "),
        text=[f"  {share:.0%}, {_signed(value)}" for share, value in zip(rows["share"], rows["saved"], strict=True)],
        mode="text",
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    drawn.update_xaxes(title=f"saved{f', {unit}' if unit else ''}; bars: 95 % interval over the repeats")
    drawn.update_xaxes(range=[min(0, 1.15 * rows["low"].fillna(rows["saved"]).min()), 1.3 * reach.max()])
    drawn.update_yaxes(autorange="reversed")
    return drawn.update_layout(height=130 + 34 * len(rows))


def _signed(value: float) -> str:
    return f"-{number(-value)}" if value < 0 else number(value)
