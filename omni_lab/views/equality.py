"""Whether configurations gave the same answer: text tokens, codes, and how far the recorded samples lie apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from omni_lab.frames import Run
from omni_lab.quality.recordings import recording
from omni_lab.quality.summary import STEP
from omni_lab.views import theme

SHOWN = 28
"""Characters of a sentence that stand below its column; hovering shows all."""

SAME, APART, OTHER, UNKNOWN = "same", "samples apart", "other answer", "not compared"
LOOKS = {SAME: theme.BLUE, APART: theme.ORANGE, OTHER: theme.VERMILION, UNKNOWN: theme.GREY}
"""What a comparison of two answers can say, and its colour."""


def equality(run: Run, base: str | None = None) -> pd.DataFrame:
    """Each answer of each configuration against that of `base` (default: the first one) to the same prompt.

    Columns: configuration, concurrency, prompt, text; `tokens_equal` and `codes_equal`, None where the run did not keep
    them (`results.save_tokens`); `frames`, the length of the answer; `steps`, the largest difference of two samples in
    steps of 16 bits, NaN where a recording is missing or has another length; `verdict`: SAME means that all that was
    kept is equal, samples within one step.
    """
    rows = run.requests
    if rows.empty:
        return pd.DataFrame(columns=["configuration", "concurrency", "prompt", "verdict"])
    base = base or str(rows["configuration"].iloc[0])
    first = rows[rows["repeat"] == rows["repeat"].min()]
    known = {(row["concurrency"], row["prompt"]): row for _, row in first[first["configuration"] == base].iterrows()}
    found = [
        _compared(run, row, known[row["concurrency"], row["prompt"]])
        for _, row in first[first["configuration"] != base].iterrows()
        if (row["concurrency"], row["prompt"]) in known
    ]
    return pd.DataFrame(found).astype({"configuration": rows["configuration"].dtype})


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each configuration of `equality`: answers, how many are equal, and the largest difference."""
    grouped = frame.groupby("configuration", observed=True)
    return grouped.agg(
        answers=("prompt", "size"),
        same_tokens=("tokens_equal", lambda column: int((column == True).sum())),  # noqa: E712  (None is neither)
        same_codes=("codes_equal", lambda column: int((column == True).sum())),  # noqa: E712
        frames=("frames", "sum"),
        largest_difference_steps=("steps", "max"),
    ).reset_index()


def figure(frame: pd.DataFrame, base: str) -> go.Figure:
    """The rows of `equality` as a grid: colour is the verdict, the number the largest difference in 16-bit steps."""
    title = {"text": f"Every answer against that of {base.replace('_', ' ')}"}
    drawn = go.Figure(layout={"template": theme.LIGHT, "title": title})
    if frame.empty:
        return theme.empty(drawn)
    names = [name for name in frame["configuration"].cat.categories if (frame["configuration"] == name).any()]
    prompts = list(dict.fromkeys(frame["text"]))
    texts = [text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…" for text in prompts]
    for verdict, color in LOOKS.items():
        own = frame[frame["verdict"] == verdict]
        if own.empty:
            continue
        drawn.add_scatter(
            name=verdict,
            x=[prompts.index(text) for text in own["text"]],
            y=own["configuration"].astype(str).str.replace("_", " "),
            mode="markers+text",
            marker={"color": color, "symbol": "square", "size": 26, "opacity": 0.85},
            text=["" if pd.isna(steps) else f"{steps:.0f}" for steps in own["steps"]],
            textfont={"color": "#ffffff", "size": 12},
            customdata=own[["tokens_equal", "codes_equal", "frames", "steps", "text"]].astype(object),
            hovertemplate="%{customdata[4]}<br>tokens equal: %{customdata[0]}, codes equal: %{customdata[1]}, "
            "%{customdata[2]} frames<br>largest difference: %{customdata[3]:.0f} steps of 16 bits",
        )
    height = 34 * len(names)
    drawn.update_layout(height=height + 230, legend_y=-130 / height, showlegend=True)
    drawn.update_xaxes(
        tickvals=list(range(len(prompts))), ticktext=texts, tickangle=-30, range=[-0.6, len(prompts) - 0.4]
    )
    drawn.update_xaxes(showgrid=False, zeroline=False)
    shown = [name.replace("_", " ") for name in names][::-1]
    drawn.update_yaxes(categoryorder="array", categoryarray=shown, range=[-0.6, len(names) - 0.4])
    return drawn


def _compared(run: Run, row: pd.Series, other: pd.Series) -> dict[str, Any]:
    tokens, codes = (_equal(row.get(name), other.get(name)) for name in ("text_token_ids", "codes"))
    steps = _apart(run, row, other)
    lengths = row.get("audio_duration_s") == other.get("audio_duration_s")
    if tokens is False or codes is False or not lengths:
        verdict = OTHER
    elif pd.isna(steps) and tokens is None:
        verdict = UNKNOWN
    else:
        verdict = APART if steps > 1 else SAME
    return {
        "configuration": row["configuration"],
        "concurrency": row["concurrency"],
        "prompt": row["prompt"],
        "text": row.get("target_text") or row["prompt"],
        "tokens_equal": tokens,
        "codes_equal": codes,
        "frames": row.get("codec_frames"),
        "steps": steps,
        "verdict": verdict,
    }


def _equal(one: Any, other: Any) -> bool | None:
    """Whether two lists are equal; None where one was not kept."""
    return one == other if isinstance(one, list) and isinstance(other, list) else None


def _apart(run: Run, row: pd.Series, other: pd.Series) -> float:
    """The largest difference of two recordings in steps of 16 bits; NaN if one is missing or longer."""
    if not all(isinstance(one.get("audio_file"), str) for one in (row, other)):
        return float("nan")
    first, second = (recording(run, one).samples for one in (row, other))
    return float(np.abs(first - second).max(initial=0) / STEP) if len(first) == len(second) else float("nan")
