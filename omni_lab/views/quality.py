"""What a run's audio sounds like, configuration by configuration: the report's section, and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from omni_lab.frames import Run
from omni_lab.metrics.relative import HIGHER, LOWER
from omni_lab.quality.clicks import NEAR_S
from omni_lab.quality.ear import RECOGNISER
from omni_lab.quality.summary import DIFFERENT, IDENTICAL, by_configuration
from omni_lab.quality.table import current
from omni_lab.quality.words import DEFINITIONS
from omni_lab.views import theme
from omni_lab.views.tables import COUNT, NUMBER, Table, text

WORDS = ("Word error rate, %", "Worst sentence, %", "Word error rate is")
"""Headings of what is there once the recordings were heard."""

COLUMNS = (
    ("recordings", "Recordings", COUNT),
    ("loudness_lufs", "Loudness mean, LUFS", NUMBER),
    ("peak_dbtp", "Peak, dBTP", NUMBER),
    ("clipped_samples", "Clipped samples", COUNT),
    ("edges", "Chunk edges", COUNT),
    ("clicks", "Clicks at edges", COUNT),
    ("edge_percentile", "Edges among other places, percentile", NUMBER),
    ("compared_edge_percentile", "Same places in the first configuration", NUMBER),
    ("leading_silence_s", "Silence before speech, s", NUMBER),
    ("longest_pause_s", "Longest pause, s", NUMBER),
    ("words_per_s", "Words / s", NUMBER),
)
"""Columns of the table: name in `by_configuration`, heading, how it is written."""

COMMAND = "python -m omni_lab.quality RUN_DIR --report"

SIGNAL = (
    "Loudness: integrated, ITU-R BS.1770-5. Peak: true peak. Clicks: chunk edges at which the waveform bends more "
    "sharply than at every other place of the recording; percentile: how many of the other places bend less than an "
    "edge, 50 where an edge is a place like any other. Silence: below -50 dB of full scale."
)


@dataclass(frozen=True)
class Section:
    """What the report shows: sentences, a table, figures."""

    words: list[str]
    table: Table
    figures: list[go.Figure]


def section(run: Run) -> Section | None:
    """The report's section; None if the run kept no audio.

    Word error rates are there once the command has heard the recordings. Raises what `quality.measure` raises.
    """
    heard = current(run)
    if heard.empty:
        return None
    found = by_configuration(heard)
    told = found["wer_percent"].notna().any()
    said = [f"Word error rate: {definition(heard)}." if told else f"Word error rate: not measured; {COMMAND} does."]
    if found["compared"].any():
        said.append(f"Samples are beside those of {found['configuration'].iloc[0]} for the same request.")
    drawn = [word_errors(heard)] if told else []
    return Section([*said, SIGNAL], _table(found, told), [*drawn, loudness(heard), clicks(heard)])


def definition(heard: pd.DataFrame) -> str:
    """What the word error rates of a table mean, and who heard them; "" if no words were heard."""
    names = heard["definition"].dropna().unique()
    return "; ".join(f"{DEFINITIONS[name].says}; heard by {RECOGNISER}" for name in names)


def word_errors(heard: pd.DataFrame) -> go.Figure:
    """Word error rate of each configuration with its 95 % interval over sentences; the small mark is the worst one."""
    figure = _figure("Word error rate, %", heard)
    found = by_configuration(heard).dropna(subset=["wer_percent"])
    if found.empty:
        return theme.empty(figure)
    looks = theme.style(heard["configuration"])
    names = found["configuration"].astype(str).tolist()
    figure.add_scatter(
        name="rate, 95 % interval",
        x=names,
        y=found["wer_percent"],
        error_y={
            "array": found["wer_high_percent"] - found["wer_percent"],
            "arrayminus": found["wer_percent"] - found["wer_low_percent"],
            "width": 6,
            "color": theme.GREY,
        },
        mode="markers",
        marker={"size": 11, "color": [looks[name]["color"] for name in names]},
        customdata=found[["errors", "words", "wer_verdict"]],
        hovertemplate="%{y:.1f} %: %{customdata[0]} of %{customdata[1]} words (%{customdata[2]})<extra></extra>",
    )
    figure.add_scatter(
        name="worst sentence",
        x=names,
        y=found["worst_percent"],
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 14, "color": theme.GREY},
        customdata=found[["worst_reference", "worst_heard"]],
        hovertemplate="%{y:.0f} %: “%{customdata[0]}”<br>heard as “%{customdata[1]}”<extra></extra>",
    )
    return figure.update_yaxes(rangemode="tozero").update_layout(showlegend=True)


def loudness(heard: pd.DataFrame) -> go.Figure:
    """Integrated loudness of each recording, by configuration; the line is the mean."""
    return _recordings(heard, "loudness_lufs", "Loudness, LUFS", "%{y:.1f} LUFS")


def clicks(heard: pd.DataFrame) -> go.Figure:
    """Where the chunk edges of each recording stand among its other places; a cross has an edge above all of them.

    Grey: the same places where the first configuration said the same. Recordings in one chunk have no edge.
    """
    title = f"Chunk edges among other places, percentile (±{1000 * NEAR_S:g} ms)"
    figure = _recordings(heard, "edge_percentile", title, "edges at %{y:.0f}")
    if not heard["edge_percentile"].notna().any():
        return figure
    first = heard.dropna(subset=["compared_edge_percentile"])
    figure.add_scatter(
        name=f"the same places in {heard['configuration'].iloc[0]}",
        x=first["configuration"].astype(str),
        y=first["compared_edge_percentile"],
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 14, "color": theme.GREY},
        text=first["compared_with"],
        hovertemplate="%{y:.0f} there<br>%{text}<extra></extra>",
        showlegend=not first.empty,
    )
    loud = heard[heard["clicks"] > 0]
    figure.add_scatter(
        name="with a click",
        x=loud["configuration"].astype(str),
        y=loud["edge_percentile"],
        mode="markers",
        marker={"symbol": "x", "size": 11, "color": theme.VERMILION},
        customdata=loud[["clicks", "id"]],
        hovertemplate="%{customdata[0]} edges stand out more than every other place<br>%{customdata[1]}<extra></extra>",
        showlegend=not loud.empty,
    )
    figure.add_hline(
        y=50,
        line={"color": theme.GREY, "dash": "dash"},
        annotation_text="like any other place",
        annotation_position="bottom right",
    )
    return figure.update_yaxes(range=[0, 104]).update_layout(showlegend=True)


def _recordings(heard: pd.DataFrame, name: str, title: str, hover: str) -> go.Figure:
    """A point for each recording, and the mean of each configuration."""
    figure = _figure(title, heard)
    measured = heard.dropna(subset=[name])
    if measured.empty:
        return theme.empty(figure)
    looks = theme.style(heard["configuration"])
    for configuration, own in measured.groupby("configuration", sort=False, observed=True):
        figure.add_box(
            name=str(configuration),
            x=[str(configuration)] * len(own),
            y=own[name],
            boxpoints="all",
            boxmean=True,
            jitter=0.6,
            pointpos=0,
            fillcolor="rgba(0,0,0,0)",
            line={"width": 1},
            marker={"color": looks[configuration]["color"], "size": 6, "opacity": 0.7},
            text=own["id"],
            hovertemplate=f"{hover}<br>%{{text}}<extra></extra>",
            showlegend=False,
        )
    return figure


def _figure(title: str, heard: pd.DataFrame) -> go.Figure:
    names = [str(name) for name in heard["configuration"].unique()]
    figure = go.Figure(layout={"template": theme.LIGHT, "title": {"text": title}, "height": 360})
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=names)


def _table(found: pd.DataFrame, words: bool) -> Table:
    head = ["Configuration", *(WORDS if words else ()), "Samples are"]
    rows = [
        [
            str(row["configuration"]),
            *(_about_words(row) if words else ()),
            _verdict(row["samples"], bad=DIFFERENT, good=IDENTICAL),
            *(_cell(text(row[name], form)) for name, _, form in COLUMNS),
        ]
        for _, row in found.iterrows()
    ]
    return {"head": [*head, *(heading for _, heading, _ in COLUMNS)], "rows": rows}


def _about_words(row: pd.Series) -> Iterator[dict[str, str]]:
    yield _cell(_rate(row))
    yield _cell(text(row["worst_percent"], NUMBER))
    yield _verdict(row["wer_verdict"], bad=HIGHER, good=LOWER)


def _rate(row: pd.Series) -> str:
    """A rate that was measured says how many words it is of; 0 errors are 0, with what they leave possible."""
    rate = text(row["wer_percent"], NUMBER)
    if pd.isna(row["wer_percent"]) or pd.isna(row["wer_low_percent"]):
        return rate
    return f"{rate} ({row['wer_low_percent']:.1f} to {row['wer_high_percent']:.1f}), {row['words']:.0f} words"


def _verdict(word: Any, bad: str, good: str) -> dict[str, str]:
    if not isinstance(word, str):
        return _cell(text(math.nan, NUMBER))
    return {"text": word, "kind": {bad: "worse", good: "better"}.get(word, "same")}


def _cell(words: str) -> dict[str, str]:
    return {"text": words, "kind": "missing" if words == text(None, NUMBER) else "figure"}
