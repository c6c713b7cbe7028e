"""Which gaps between steps are the largest, and what fills them: as a table, and in a sentence."""

from __future__ import annotations

import pandas as pd
from pandas.io.formats.style import Styler

from omni_lab.frames import CELL
from omni_lab.metrics.phases import HOST
from omni_lab.views import theme
from omni_lab.views.around_gap import length
from omni_lab.views.figures import load_label
from omni_lab.views.steps import CAUSE_NAMES


def largest(stages: pd.DataFrame) -> pd.DataFrame:
    """The step gaps of `Run.stages`, the largest first; a row for each stage of each cell, none where not measured.

    `gap_us`: the mean gap, the time in which the loop worked for its next step (waiting is no gap); `of_step`: the gap
    divided by the mean step; `cause`: what fills most of it, in words; `cause_share`; and each cause in µs.
    """
    names = {f"gap_{cause}_us": f"{cause}_us" for cause in HOST}
    rows = stages.reindex(columns=[*CELL, "stage", "step_ms", *names]).dropna(subset=list(names))
    rows = rows.rename(columns=names)
    causes = rows[list(names.values())]
    gap_us = causes.sum(axis=1)
    words = {f"{cause}_us": CAUSE_NAMES[cause] for cause in HOST}
    head = {
        "gap_us": gap_us,
        "of_step": gap_us / 1e3 / rows["step_ms"],
        "cause": causes.idxmax(axis=1).map(words) if len(rows) else "",
        "cause_share": causes.max(axis=1) / gap_us,
    }
    rows = pd.concat([rows[[*CELL, "stage"]].assign(**head), causes], axis=1)
    return rows.sort_values("gap_us", ascending=False, ignore_index=True)


def styled(gaps: pd.DataFrame) -> Styler:
    """Rows of `largest` as a table for a notebook: whole µs, shares in percent, the gap as a bar."""
    columns = gaps.columns[gaps.columns.str.endswith("_us")]
    forms = {
        **dict.fromkeys(columns, "{:,.0f}"),
        "of_step": "{:.0%}",
        "cause_share": "{:.0%}",
        "concurrency": load_label,
    }
    return gaps.style.format(forms).bar(subset="gap_us", color=f"{theme.SKY}80", vmin=0).hide(axis="index")


def sentence(gap: pd.Series) -> str:
    """A row of `largest` in words, its two largest causes named; Markdown."""
    causes = gap[[f"{cause}_us" for cause in HOST]].astype(float)
    shares = (causes / gap["gap_us"]).sort_values(ascending=False).head(2)
    parts = " and ".join(f"**{CAUSE_NAMES[name.removesuffix('_us')]}** ({share:.0%})" for name, share in shares.items())
    where = f"`{gap['configuration']}`, {load_label(gap['concurrency'])} in flight"
    return (
        f"{gap['stage']} in {where}: {length(gap['gap_us'])} between two steps on average, "
        f"{gap['of_step']:.0%} of a step. Most of it: {parts}."
    )
