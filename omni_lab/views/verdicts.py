"""What a comparison comes to, in a sentence or two."""

from __future__ import annotations

import pandas as pd

from omni_lab.metrics.relative import NOISE
from omni_lab.views.figures import LABELS, load_label


def in_words(comparison: pd.DataFrame) -> str:
    """Rows of `omni_lab.compare` in words; Markdown.

    First how many ratios lie within noise, then each that is better and each that is worse, with its interval, then how
    many cannot be judged (too few repeats, different work).
    """
    rows = comparison[comparison["ratio"].notna()]
    if rows.empty:
        return "Nothing was compared."
    noise = int((rows["verdict"] == NOISE).sum())
    said = [f"**{noise} of {len(rows)} ratios are within noise.**"]
    judged = rows["better"].fillna(False).astype(bool), rows["better"].eq(False).fillna(False).astype(bool)
    for word, chosen in zip(("Better", "Worse"), judged, strict=True):
        if chosen.any():
            groups = rows[chosen].groupby(["figure", "configuration", "stage"], sort=False, dropna=False, observed=True)
            said.append(f"{word}: {'; '.join(_ratios(group) for _, group in groups)}.")
    rest = len(rows) - noise - int(sum(chosen.sum() for chosen in judged))
    if rest:
        words = ", ".join(dict.fromkeys(rows.loc[~(rows["verdict"] == NOISE) & rows["better"].isna(), "verdict"]))
        said.append(f"No word about {rest} of them: {words}.")
    return " ".join(said)


def _ratios(rows: pd.DataFrame) -> str:
    """Ratios of one figure of one configuration, at one or several loads."""
    first = rows.iloc[0]
    figure = first["figure"].removeprefix("mean_")
    of_stage = f" of the {first['stage']}" if isinstance(first["stage"], str) else ""
    loads = [
        f"x{row['ratio']:.3g} ({row['low']:.3g} to {row['high']:.3g}) at {load_label(row['concurrency'])} in flight"
        for _, row in rows.iterrows()
    ]
    return f"{LABELS.get(figure, (figure, ''))[0]}{of_stage} in `{first['configuration']}`, {', '.join(loads)}"
