"""What was heard, configuration by configuration, with how much of a difference chance can make."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from omni_lab.metrics.relative import CONFIDENCE, HIGHER, LOWER, NOISE
from omni_lab.quality.words import DEFINITIONS, Definition

RESAMPLES = 2000
STEP = 2**-15
"""One step of 16 bits, to which recordings are rounded."""

FIRST, IDENTICAL, ROUNDING, DIFFERENT, UNKNOWN = (
    "first",
    "identical",
    "within one step of 16 bits",
    "different",
    "not compared",
)
"""What `samples` says of a configuration, beside the first one."""

FEW = "too few sentences"
"""What `wer_verdict` says below two sentences that both configurations spoke."""

COLUMNS = (
    "configuration",
    "recordings",
    "sentences",
    "errors",
    "words",
    "wer_percent",
    "wer_low_percent",
    "wer_high_percent",
    "wer_verdict",
    "cer_percent",
    "worst_percent",
    "worst_reference",
    "worst_heard",
    "samples",
    "compared",
    "identical",
    "max_deviation",
    "loudness_lufs",
    "peak_dbtp",
    "clipped_samples",
    "edges",
    "edge_percentile",
    "compared_edge_percentile",
    "edge_worst_db",
    "clicks",
    "leading_silence_s",
    "trailing_silence_s",
    "longest_pause_s",
    "words_per_s",
)
"""Of `by_configuration`; docs/quality.md says what each is."""


def by_configuration(heard: pd.DataFrame) -> pd.DataFrame:
    """A row for each configuration of `hear`'s or `measure`'s table; rates are in percent.

    `wer_percent` with `wer_low_percent` and `wer_high_percent`, its 95 % interval: the percentile bootstrap over
    sentences (Efron and Tibshirani, 1993), all recordings of a sentence together. Without any error the upper end is
    3 errors in as many words ("rule of three", Hanley and Lippman-Hand, 1983); for one sentence both are NaN.
    `wer_verdict`: higher, lower or within noise of the first configuration, by the bootstrap interval of the
    difference over the sentences that both spoke. `samples`: how the samples compare with the first configuration's.
    """
    heard = heard.assign(sentence=heard["prompt"].where(heard["prompt"].notna(), heard["reference"]))
    groups = [(name, rows) for name, rows in heard.groupby("configuration", sort=False, observed=True)]
    rows = []
    for name, own in groups:
        differences = own.dropna(subset=["compared_with"])
        rows.append(
            {
                "configuration": name,
                "recordings": len(own),
                "sentences": own["sentence"].nunique(),
                **_words(own, groups[0][1]),
                "samples": _samples(own, own is groups[0][1]),
                "compared": len(differences),
                "identical": int(_identical(differences).sum()),
                "max_deviation": differences["max_deviation"].max(),
                "loudness_lufs": own["loudness_lufs"].mean(),
                "peak_dbtp": own["peak_dbtp"].max(),
                "clipped_samples": own["clipped_samples"].sum(),
                "edges": own["edges"].sum(),
                "edge_percentile": _weighted(own["edge_percentile"], own["edges"]),
                "compared_edge_percentile": _weighted(own["compared_edge_percentile"], own["edges"]),
                "edge_worst_db": own["edge_worst_db"].max(),
                "clicks": own["clicks"].sum(),
                "leading_silence_s": own["leading_silence_s"].mean(),
                "trailing_silence_s": own["trailing_silence_s"].mean(),
                "longest_pause_s": own["longest_pause_s"].max(),
                "words_per_s": own["words_per_s"].mean(),
            }
        )
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS))


def _words(own: pd.DataFrame, first: pd.DataFrame) -> dict[str, Any]:
    """Rates of a configuration's words; nothing where no words were heard or no reference has any."""
    own, first = (rows[rows["words"] > 0] for rows in (own, first))
    if own.empty:
        return {}
    definition = DEFINITIONS[own["definition"].iloc[0]]
    low, high = _interval(_rates(own, definition, _drawn(own["sentence"].unique())))
    if own["sentence"].nunique() < 2:
        low = high = math.nan
    elif not own["errors"].any():
        high = min(1.0, 3 / own["words"].sum())
    worst = own.loc[(own["errors"] / own["words"]).idxmax()]
    return {
        "errors": int(own["errors"].sum()),
        "words": int(own["words"].sum()),
        "wer_percent": 100 * float(definition.rate(*_counts(own))),
        "wer_low_percent": 100 * low,
        "wer_high_percent": 100 * high,
        "wer_verdict": FIRST if own.equals(first) else _verdict(own, first, definition),
        "cer_percent": 100 * own["character_errors"].sum() / own["characters"].sum(),
        "worst_percent": 100 * worst["errors"] / worst["words"],
        "worst_reference": worst["reference"],
        "worst_heard": worst["heard"],
    }


def _verdict(own: pd.DataFrame, first: pd.DataFrame, definition: Definition) -> str:
    common = np.intersect1d(own["sentence"].unique(), first["sentence"].unique())
    if len(common) < 2:
        return FEW
    drawn = _drawn(common)
    rates = [_rates(rows[rows["sentence"].isin(common)], definition, drawn) for rows in (own, first)]
    low, high = _interval(rates[0] - rates[1])
    return HIGHER if low > 0 else LOWER if high < 0 else NOISE


def _drawn(sentences: np.ndarray) -> pd.DataFrame:
    """How often each sentence is in each resample: a row a resample, always the same for as many sentences."""
    count = len(sentences)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return pd.DataFrame(draws, columns=sentences)


def _rates(rows: pd.DataFrame, definition: Definition, drawn: pd.DataFrame) -> np.ndarray:
    """The rate of each resample, where a recording counts as often as its sentence was drawn."""
    return definition.rate(*_counts(rows), drawn[rows["sentence"]].to_numpy())


def _counts(rows: pd.DataFrame) -> Iterator[np.ndarray]:
    return (rows[name].to_numpy(float) for name in ("errors", "words"))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _samples(own: pd.DataFrame, is_first: bool) -> str:
    differences = own.dropna(subset=["compared_with"])
    if differences.empty:
        return FIRST if is_first else UNKNOWN
    if _identical(differences).all():
        return IDENTICAL
    close = (differences["length_difference"] == 0) & (differences["max_deviation"] <= STEP)
    return ROUNDING if close.all() else DIFFERENT


def _identical(differences: pd.DataFrame) -> pd.Series:
    return (differences["length_difference"] == 0) & (differences["max_deviation"] == 0)


def _weighted(values: pd.Series, weights: pd.Series) -> float:
    known = values.notna()
    return float(np.average(values[known], weights=weights[known])) if known.any() else math.nan
