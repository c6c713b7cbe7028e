"""`python -m omni_lab.quality RUN_DIR`: listens to a run's recordings and says what each configuration sounds like."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from omni_lab.command import DONE, INTERRUPTED, WRONG, Parser
from omni_lab.frames import Run, load
from omni_lab.quality.ear import RECOGNISER
from omni_lab.quality.summary import FIRST, by_configuration
from omni_lab.quality.table import hear, measure, write
from omni_lab.quality.words import DEFINITIONS, WHISPER

COLUMNS = (
    ("recordings", "recordings", ".0f"),
    ("words", "words", ".0f"),
    ("WER %", "wer_percent", ".1f"),
    ("low", "wer_low_percent", ".1f"),
    ("high", "wer_high_percent", ".1f"),
    ("worst %", "worst_percent", ".0f"),
    ("CER %", "cer_percent", ".1f"),
    ("WER is", "wer_verdict", ""),
    ("samples are", "samples", ""),
    ("deviation", "max_deviation", ".1g"),
    ("LUFS", "loudness_lufs", ".1f"),
    ("peak dBTP", "peak_dbtp", ".1f"),
    ("clipped", "clipped_samples", ".0f"),
    ("edges", "edges", ".0f"),
    ("edge percentile", "edge_percentile", ".0f"),
    ("there in first", "compared_edge_percentile", ".0f"),
    ("clicks", "clicks", ".0f"),
    ("silence s", "leading_silence_s", ".2f"),
    ("words/s", "words_per_s", ".2f"),
)
"""Heading, name in `by_configuration`, format."""

WORST = ("worst_reference", "worst_heard")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.no_words and options.report:
        parser.error("--no-words: a report measures the signal without being asked; --report keeps what was heard")
    try:
        run = load(options.run_dir)
        heard = measure(run) if options.no_words else hear(run, options.definition, bar=not options.json)
        if options.report and len(heard):
            _keep(run, heard)
    except (OSError, ValueError, ImportError) as error:
        hint = "; --no-words does without" if isinstance(error, ImportError) else ""
        print(f"{' '.join(str(error).split())}{hint}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    if heard.empty:
        print(f"{run.path}: the run kept no audio; results.save_audio says how much it keeps", file=sys.stderr)
        return WRONG
    definition = None if options.no_words else DEFINITIONS[options.definition].says
    if options.json:
        print(json.dumps(as_json(heard, definition), indent=1))
    else:
        print(as_text(heard, definition))
    return DONE


def as_json(heard: pd.DataFrame, definition: str | None) -> dict[str, Any]:
    """All that was found, with the definition of the word error rate; null: not measured."""
    rows = {"configurations": by_configuration(heard), "requests": heard}
    found = {name: [_plain(row) for row in frame.to_dict("records")] for name, frame in rows.items()}
    return {"word_error_rate": definition, "recogniser": definition and RECOGNISER, **found}


def as_text(heard: pd.DataFrame, definition: str | None) -> str:
    """A line for each configuration, what the word error rate means, and the worst sentences."""
    found = by_configuration(heard)
    shown = {"configuration": found["configuration"].astype(str)}
    for heading, name, form in COLUMNS:
        values = [_cell(value, form) for value in found[name]]
        if set(values) != {"-"}:
            shown[heading] = values
    lines = [pd.DataFrame(shown).to_string(index=False)]
    if definition:
        lines.append(f"\nWER: {definition}; heard by {RECOGNISER}; low-high: 95 % over sentences")
        for (said, heard_as), rows in found[found["worst_percent"] > 0].groupby(list(WORST), sort=False):
            lines.append(f"worst of {', '.join(rows['configuration'])}: {said!r} was heard as {heard_as!r}")
    if (found["samples"] != FIRST).any():
        lines.append(
            f"\nsamples: beside those of {found['configuration'].iloc[0]} for the same request; deviation of full scale"
        )
    return "\n".join(lines)


def _keep(run: Run, heard: pd.DataFrame) -> None:
    from omni_lab.views.report import write_report  # plotly takes its time, and only this needs it

    print(write(run, heard), write_report(run.path), sep="\n", file=sys.stderr)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None or (isinstance(value, float) and math.isnan(value)) else f"{value:{form}}"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if pd.isna(value) else value for key, value in row.items()}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="omni_lab.quality", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="such as results/<name>/<time>")
    parser.add_argument(
        "--definition", choices=DEFINITIONS, default=WHISPER.name, help="of the word error rate (default: %(default)s)"
    )
    parser.add_argument("--no-words", action="store_true", help="signal only: some ms a recording, no recogniser")
    parser.add_argument("--json", action="store_true", help="print JSON, with a row for each request")
    parser.add_argument(
        "--report", action="store_true", help="keep quality.parquet in the run directory and write its report anew"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
