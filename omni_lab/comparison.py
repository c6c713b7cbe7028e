"""Configurations side by side, of one run or of several: each figure's ratio, its interval, and a plain word for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd

from omni_lab.frames import UNITS, Run, load
from omni_lab.metrics.relative import (
    HIGHER,
    LOWER,
    Ratio,
    compared_figures,
    figure_at,
    paired_ratio,
    undisturbed,
    unpaired_ratio,
)
from omni_lab.settings import did_you_mean

DIFFERENT, NO_RATIO = "different work", "no ratio"
"""Verdicts beside those of `metrics.relative`: the two cells did not do the same, so no word about their ratio is fair;
or a figure is 0, was not measured, or has nothing to be compared with."""

PAIRED, UNPAIRED = "paired", "unpaired"

COLUMNS = (
    "run",
    "configuration",
    "concurrency",
    "stage",
    "figure",
    "value",
    "base",
    "ratio",
    "low",
    "high",
    "verdict",
    "better",
    "against",
    "compared",
    "repeats",
    "differs",
)

DTYPES = {
    "better": "boolean",
    "concurrency": "Int64",
    **dict.fromkeys(("value", "base", "ratio", "low", "high"), float),
}
"""Of columns in which something may be missing everywhere."""

LENGTHS = 0.02
"""Answers whose mean lengths are further apart are not the same work."""

SAME_WORK = ("modalities", "output", "arrivals", "system_prompt", "prompt_template")
"""Settings of the workload that must agree, beside the prompts themselves."""

MACHINE = ("cpu", "cpus_usable", "gpus", "omp_num_threads")
"""What of a run's environment says that two runs were on different machines."""

Runs = Run | Path | str | Mapping[str, Run | Path | str] | Iterable[Run | Path | str]
Loads = float | Iterable[float | None] | None


def compare(runs: Runs, base: str | None = None, concurrency: Loads = None) -> pd.DataFrame:
    """The configurations of one or several runs (or run directories), each figure beside that of `base`.

    `base`: a configuration's name; None: the first of the first run. A mapping gives the runs labels of its own.
    `concurrency`: keep these only.

    A cell is compared with the base of its own run where that has one: `compared` is "paired", the ratio is taken
    repeat by repeat, and what disturbed the machine disturbed both. Otherwise with the base of the first run that has
    one: "unpaired", Welch's t on the logarithms, and what changed between the runs is in the ratio. Where all runs have
    but one configuration, the same, the first run is the base of the others: before and after.

    A row for each configuration, concurrency, stage and figure (named as in `Run.cells` and `Run.stages`): `value`, the
    base's, `ratio` and its 95 % interval `low` to `high`, and `verdict`: "higher", "lower", "within noise", "too few
    repeats", "different work" or "no ratio". `better` says whether a higher or lower figure is for the better; it is
    missing where there is no difference to speak of, and for `step_ms`, which grows with the sequences in a step.
    `repeats` is the number of pairs, or of the lesser side. `differs` names what was not the same: where it is part of
    the work, the verdict is withheld; another machine is named too.

    Raises ValueError if no run has the configuration `base` or a concurrency that is asked for.
    """
    cells = [cell for label, run in _labelled(runs) for cell in _cells(label, run)]
    if base is None and cells:
        base = cells[0].configuration
    names = list(dict.fromkeys(cell.configuration for cell in cells))
    if base not in names:
        raise ValueError(
            f"base: expected one of {', '.join(names) or 'no configuration (no cell is finished)'}, got "
            f"{base!r}{did_you_mean(base, names)}"
        )
    wanted = _loads(concurrency)
    if missing := wanted - {cell.concurrency for cell in cells}:
        found = sorted({cell.concurrency for cell in cells if cell.concurrency})
        raise ValueError(f"concurrency: expected some of {found}, got {sorted(missing, key=str)}")
    others = [name for name in names if name != base]
    bases = [cell for cell in cells if cell.configuration == base and (others or cell.run is cells[0].run)]
    before = {id(cell) for cell in bases}
    kept = [cell for cell in cells if id(cell) not in before and (not wanted or cell.concurrency in wanted)]
    rows = [row for cell in kept for row in _rows(cell, _base(cell, bases))]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype(DTYPES)
    frame["configuration"] = pd.Categorical(frame["configuration"], others or names, ordered=True)
    return frame


@dataclass(frozen=True)
class _Cell:
    """A configuration at one concurrency in one run; `label` is the run's."""

    label: str
    run: Run
    figures: dict[str, Any]

    @property
    def configuration(self) -> str:
        return self.figures["configuration"]

    @property
    def concurrency(self) -> int | None:
        return self.figures["concurrency"]

    @cached_property
    def repeats(self) -> dict[int, dict[str, Any]]:
        return {run["repeat"]: run for run in undisturbed(self.figures.get("runs") or [])}

    @cached_property
    def requests(self) -> pd.DataFrame:
        """Its requests, of the first repeat."""
        table = self.run.requests
        if table.empty:
            return table
        load = table["concurrency"].isna() if self.concurrency is None else table["concurrency"] == self.concurrency
        first = table["repeat"] == min(self.repeats, default=0)
        return table[(table["configuration"] == self.configuration) & load & first]

    @cached_property
    def work(self) -> dict[str, Any]:
        """What it was asked for: settings by their key, and the prompts by name."""
        configuration = (self.run.record.get("configurations") or {}).get(self.configuration) or {}
        experiment = configuration.get("experiment") or {}  # of an older version it may lack any key
        workload = experiment.get("workload") or {}
        work = {"model.checkpoint": _place((experiment.get("model") or {}).get("checkpoint"))}
        work |= {f"workload.{key}": workload.get(key) for key in SAME_WORK}
        stages = experiment.get("stages") or {}
        work |= {f"stages.{name}.sampling": stage.get("sampling") for name, stage in stages.items()}
        if "prompt" in self.requests and self.requests["prompt"].notna().any():
            return work | {"prompts": Counter(self.requests["prompt"].dropna())}
        dataset = {"workload.dataset": _place(workload.get("dataset"))}
        return work | dataset | {f"workload.{key}": workload.get(key) for key in ("num_prompts", "seed")}

    @cached_property
    def outcome(self) -> dict[str, float]:
        """What came of it: failed requests, and the mean lengths of the answers."""
        lengths = {
            name: self.requests[name].mean() for name in ("text_tokens", "codec_frames") if name in self.requests
        }
        return {"failed requests": float(self.figures.get("failed") or 0)} | {
            f"{name.replace('_', ' ')} an answer": mean for name, mean in lengths.items() if pd.notna(mean)
        }


def _loads(concurrency: Loads) -> set[float | None]:
    """What is asked for, as run.json has it: tables have NaN for open loop."""
    several = [concurrency] if isinstance(concurrency, Real) else () if concurrency is None else concurrency
    return {None if pd.isna(load) else load for load in several}


def _labelled(runs: Runs) -> Iterator[tuple[str, Run]]:
    """Each run with its label: what the mapping says, else its directory's name, with that of the folder if needed."""
    if isinstance(runs, Run | Path | str):
        runs = [runs]
    loaded = [
        one if isinstance(one, Run) else load(one) for one in (runs.values() if isinstance(runs, Mapping) else runs)
    ]
    if isinstance(runs, Mapping):
        yield from zip(runs, loaded, strict=True)
        return
    names = Counter(run.path.name for run in loaded)
    for run in loaded:
        path = run.path.resolve()
        yield (path.name if names[run.path.name] == 1 else f"{path.parent.name}/{path.name}"), run


def _cells(label: str, run: Run) -> Iterator[_Cell]:
    return (_Cell(label, run, figures) for figures in run.record.get("cells") or [])


def _base(cell: _Cell, bases: Sequence[_Cell]) -> _Cell | None:
    """The base's cell at the same concurrency: of the same run, else of the first run that has one."""
    same = [base for base in bases if base.concurrency == cell.concurrency]
    return next((base for base in same if base.run is cell.run), same[0] if same else None)


def _rows(cell: _Cell, base: _Cell | None) -> Iterator[dict[str, Any]]:
    paired = base is not None and base.run is cell.run
    work, machine = _differences(cell, base) if base else ([], [])
    for path in compared_figures(cell.figures):
        value = figure_at(cell.figures, path)
        if value is None:
            continue
        figure = UNITS.get(path[-1], path[-1])
        ratio, repeats = _ratio(cell, base, path, paired) if base else (None, 0)
        verdict = NO_RATIO if ratio is None else DIFFERENT if work else ratio.verdict
        yield {
            "run": cell.label,
            "configuration": cell.configuration,
            "concurrency": cell.concurrency,
            "stage": path[1] if len(path) > 1 else None,
            "figure": figure,
            "value": value,
            "base": figure_at(base.figures, path) if base else None,
            "ratio": ratio.ratio if ratio else None,
            "low": ratio.low if ratio else None,
            "high": ratio.high if ratio else None,
            "verdict": verdict,
            "better": _better(figure, verdict),
            "against": (base.configuration if paired else f"{base.configuration} of {base.label}") if base else None,
            "compared": (PAIRED if paired else UNPAIRED) if base else None,
            "repeats": repeats,
            "differs": "; ".join([*work, *machine]),
        }


def _ratio(cell: _Cell, base: _Cell, path: tuple[str, ...], paired: bool) -> tuple[Ratio | None, int]:
    """The ratio, and of how many repeats it is."""
    ours, theirs = (
        {repeat: value for repeat, run in one.repeats.items() if (value := figure_at(run, path)) is not None}
        for one in (cell, base)
    )
    if not paired:
        return unpaired_ratio(list(ours.values()), list(theirs.values())), min(len(ours), len(theirs))
    common = sorted(ours.keys() & theirs.keys())
    return paired_ratio([ours[repeat] for repeat in common], [theirs[repeat] for repeat in common]), len(common)


def more_is_better(figure: str) -> bool | None:
    """Whether a higher figure is the better one; None for `step_ms`, which grows with the sequences in a step."""
    return None if figure == "step_ms" else "throughput" in figure or figure.endswith("_per_s")


def _better(figure: str, verdict: str) -> bool | None:
    more = more_is_better(figure)
    return None if more is None or verdict not in (HIGHER, LOWER) else more == (verdict == HIGHER)


def _differences(cell: _Cell, base: _Cell) -> tuple[list[str], list[str]]:
    """What two cells did not have in common: parts of the work, and the machine."""
    work = [
        f"{key} ({_shown(cell.work.get(key))} against {_shown(base.work.get(key))})"
        for key in dict.fromkeys([*base.work, *cell.work])
        if cell.work.get(key) != base.work.get(key)
    ]
    for key in base.outcome.keys() & cell.outcome.keys():
        ours, theirs = cell.outcome[key], base.outcome[key]
        if abs(ours - theirs) > LENGTHS * max(ours, theirs):
            work.append(f"{key} ({ours:.3g} against {theirs:.3g})")
    ours, theirs = (one.run.record.get("environment") or {} for one in (cell, base))
    machine = [
        f"environment.{key} ({_shown(ours.get(key))} against {_shown(theirs.get(key))})"
        for key in MACHINE
        if ours.get(key) != theirs.get(key)
    ]
    return work, machine


def _shown(value: Any) -> str:
    if isinstance(value, Counter):
        return f"{value.total()} of {len(value)} texts"
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _place(name: str | None) -> str | None:
    """A path in this checkout as reference results have it: relative to the checkout."""
    return name and name.removeprefix(f"{Path(__file__).resolve().parents[1]}/")
