"""The ablation builder: tick what an experiment has on, run it, and see it beside what was run before."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
import pandas as pd
import traitlets
import yaml

from omni_lab.assemble import effective
from omni_lab.comparison import compare
from omni_lab.experiment import Experiment, ExperimentError, load_experiment
from omni_lab.frames import Run, load
from omni_lab.pipeline.wiring import End
from omni_lab.views import comparison as views
from omni_lab.views import theme
from omni_lab.workbench.controls import Controls
from omni_lab.workbench.loop import background
from omni_lab.workbench.plot import Plot
from omni_lab.workbench.runs import ROOT, RunJob, found, watch
from omni_lab.workbench.tables import table
from omni_lab.workbench.variation import MISSING, Variation, assignments, flat, made_up_name
from omni_lab.workload.plan import planned

LOOK = {"workload.concurrency": [4], "workload.num_prompts": [8], "workload.repeats": 3}
"""The load that a builder starts with where nothing else is said: enough for a first look."""

WORK = ("model.checkpoint", "workload", "stages.thinker.sampling", "stages.talker.sampling")
"""What a builder takes over from its base run, so that both do the same work."""

SPACED = "<style>.omni-lab-ratios :is(td, th) { padding: 1px 14px 1px 0; line-height: 1.5 }</style>"

WRAP = {"flex_flow": "row wrap", "align_items": "center", "margin": "6px 0 0 0"}


class AblationBuilder(ipywidgets.VBox):
    """Variations of an experiment: ticked, run and compared in a notebook.

    `experiment_path`: a file, relative to here or to the checkout. `settings` are laid over it like the command's
    `--set`, for the base too. `base` is a run to compare with, whose work is taken over; without it the load is LOOK.
    Raises ExperimentError if the file or a setting is wrong.

    Everything can be set from Python: `changed`, values by dotted key that differ from the base's; `name`, what the
    variation is called (empty: made up from what is changed); `beside`, whether the base runs in turn with it, so that
    their ratio is of one run. `problem` says why it cannot run, empty if it can. `run` starts it, `cancel` ends it.
    `runs` are all runs by label, `compared` the labels of those that are ticked, and `comparison` is their table.
    """

    changed = traitlets.Dict(key_trait=traitlets.Unicode())
    name = traitlets.Unicode()
    beside = traitlets.Bool(True)
    problem = traitlets.Unicode()
    compared = traitlets.List(traitlets.Unicode())

    def __init__(
        self,
        experiment_path: Path | str = "experiments/full.yaml",
        base: Run | None = None,
        settings: Iterable[str] = (),
    ) -> None:
        self.file = found(experiment_path)
        self.start = _laid_over(self.file, list(settings), base)
        self.base = load_experiment(self.file, assignments(self.start))
        self.values = flat(self.base.model_dump(mode="json"))
        self.runs: dict[str, Run] = {}
        self.job: RunJob | None = None
        self.comparison = pd.DataFrame()
        self._kernel = _running_loop()
        self._waits = False
        self._turn = threading.Lock()
        super().__init__()
        self._build()
        self.observe(lambda _: self._check(), ["changed", "name", "beside"])
        self.observe(lambda _: self._side_by_side(), "compared")
        self._check()
        if base is not None:
            self.add(base, base.path.name)

    @traitlets.validate("compared")
    def _known_runs(self, proposal: dict[str, Any]) -> list[str]:
        if unknown := [label for label in proposal["value"] if label not in self.runs]:
            raise traitlets.TraitError(
                f"compared: expected of {', '.join(self.runs) or 'no runs yet'}, got {unknown[0]!r}"
            )
        return proposal["value"]

    @property
    def variation(self) -> Variation:
        """What would run."""
        name = self.name.strip() or made_up_name(self.base, self.changed)
        return Variation(self.file, self.base, self.start, self.changed, name, self.beside)

    def run(self, wait: bool = False) -> RunJob:
        """Starts the variation; with `wait`, returns when it has ended, and an interrupt cancels it.

        Raises ExperimentError if there is a `problem`, RuntimeError if a run is going on, and with `wait` what
        `RunJob.result` raises; in any case what was finished is added to the runs.
        """
        if self.job is not None and self.job.done:
            self._ended(self.job)  # the kernel, busy with this cell, has not come to it
        if self.job is not None:
            raise RuntimeError(f"{self.job.directory.path} is running; wait for it, or cancel() it")
        if self.problem:
            raise ExperimentError(self.problem)
        variation = self.variation
        job = self.job = RunJob(*variation.configurations(), changed=self._moved)
        self._label = variation.name
        self._bar.value, self._bar.max = 0, job.progress.total
        self._locked(True)
        self._show_progress()
        job.future.add_done_callback(lambda _: self._in_kernel(lambda: self._ended(job)))
        if wait:
            try:
                watch(job)
            finally:
                self._ended(job)
        return job

    def cancel(self) -> None:
        """Ends the run that is going on; returns when its pipeline is closed. Finished cells are added to the runs."""
        if job := self.job:
            job.cancel()
            self._ended(job)

    def add(self, run: Run | Path | str, label: str | None = None) -> None:
        """Adds a run to the comparison."""
        run = run if isinstance(run, Run) else load(run)
        label = label or run.path.name
        numbered = (f"{label} ({number})" for number in range(2, len(self.runs) + 2))
        label = next(one for one in (label, *numbered) if one not in self.runs)
        self.runs[label] = run
        tick = ipywidgets.Checkbox(
            True, description=label, indent=False, tooltip=str(run.path), layout={"width": "auto"}
        )
        tick.observe(lambda change: self._tick(label, change["new"]), "value")
        self._ticks.children = [*self._ticks.children, tick]
        self.compared = [*self.compared, label]

    def _build(self) -> None:
        self._controls = Controls(self.values, self._set)
        self._name = ipywidgets.Text(description="name", style={"description_width": "70px"})
        self._beside = ipywidgets.Checkbox(
            description=f"measure {self.base.name} beside it",
            tooltip="both run in turn, repeat by repeat: what disturbs the machine disturbs both",
            indent=False,
            layout={"width": "auto"},
        )
        traitlets.link((self, "name"), (self._name, "value"))
        traitlets.link((self, "beside"), (self._beside, "value"))
        self._preview = ipywidgets.HTML()
        self._start = ipywidgets.Button(description="Run", icon="play", button_style="primary")
        self._stop = ipywidgets.Button(description="Cancel", icon="stop", disabled=True)
        self._start.on_click(lambda _: self._run_soon())
        self._stop.on_click(lambda _: self._cancel_soon())
        self._bar = ipywidgets.IntProgress(0, 0, 1, layout={"width": "260px"})
        self._status = ipywidgets.HTML()
        self._ticks = ipywidgets.HBox(layout=WRAP)
        self._results = ipywidgets.VBox()
        self.children = [
            ipywidgets.HTML(f"<b>{escape(self.file.name)}</b>, and what is changed of it"),
            self._controls,
            ipywidgets.HBox([self._name, self._beside], layout=WRAP),
            self._preview,
            ipywidgets.HBox([self._start, self._stop, self._bar, self._status], layout=WRAP),
            self._ticks,
            self._results,
        ]

    def _set(self, key: str, value: Any) -> None:
        self.changed = {**self.changed, key: value}

    def _check(self) -> None:
        """Brings controls, preview and buttons up to what is changed."""
        stated = {key: value for above, given in self.changed.items() for key, value in flat(given, above).items()}
        changed = {key: value for key, value in stated.items() if self.values.get(key, MISSING) != value}
        if changed != self.changed:
            self.changed = changed  # which calls this again
            return
        self._controls.show(changed)
        self._name.placeholder = made_up_name(self.base, changed)
        try:
            _, configurations = self.variation.configurations()
            self.problem = ""
            self._preview.value = self._described(configurations)
        except ExperimentError as error:
            self.problem = str(error)
            self._preview.value = f'<p role="alert" style="color:{theme.VERMILION}">{escape(self.problem)}</p>'
        self._start.disabled = bool(self.problem) or self.job is not None

    def _described(self, configurations: list[Experiment]) -> str:
        """What is changed, what of it has no effect, how much will run, and the command for it."""
        lines = [
            f"<code>--set {escape(one)}</code> instead of {escape(json.dumps(self.values.get(key)))}"
            for key, one in zip(self.changed, assignments(self.changed), strict=True)
        ]
        ends = [End(stage, 0) for stage in configurations[-1].stages]
        notes = effective(configurations[-1], dict.fromkeys(ends), {})["notes"]
        lines += [f"<em>{escape(key)} is not in effect: {escape(why)}</em>" for key, why in notes.items()]
        units = list(planned(configurations))
        names = " and ".join(escape(one.name) for one in configurations)
        lines.append(f"{names}: {len(units)} cells, {sum(unit.requests + unit.warmup for unit in units)} requests")
        command = escape(self.variation.command(ROOT))
        told = f'<div style="line-height:1.5">{"<br>".join(lines)}</div>'
        return f'{told}<pre style="white-space:pre-wrap;user-select:all;line-height:1.4">{command}</pre>'

    def _locked(self, locked: bool) -> None:
        self._controls.lock(locked)
        self._name.disabled = self._beside.disabled = locked
        self._stop.disabled = not locked
        self._start.disabled = locked or bool(self.problem)

    def _moved(self, _: RunJob) -> None:
        """On the background loop's thread. Ticks that come faster than the kernel takes them become one."""
        if not self._waits:
            self._waits = True
            self._in_kernel(self._show_progress)

    def _show_progress(self) -> None:
        self._waits = False
        if job := self.job:
            self._bar.value = job.progress.done
            self._tell(". ".join([*job.notes, job.progress.title]))

    def _tell(self, words: str) -> None:
        self._status.value = f'<span role="status">{escape(words)}</span>'

    def _run_soon(self) -> None:
        """Of the button: what is wrong is told beside it, since nobody sees what a click raises."""
        try:
            self.run()
        except (ExperimentError, RuntimeError, OSError) as error:
            self._tell(str(error))

    def _cancel_soon(self) -> None:
        """Of the button: the kernel need not wait until the pipeline is closed."""
        if job := self.job:
            self._stop.disabled = True
            self._tell("ends, and closes its pipeline")
            background().call_soon(job.future.cancel)

    def _ended(self, job: RunJob) -> None:
        """Adds what a run has finished. Whoever comes first does it, and the others wait for that."""
        with self._turn:
            if self.job is not job:
                return
            self._bar.value = job.progress.done
            try:
                job.result()
                self._tell(job.kept)
            except Exception as error:  # what a user can mend, or a bug: both belong into the status line
                self._tell(str(error) or repr(error))
            try:
                if job.directory.finished:
                    self.add(job.path, self._label)
            finally:
                self.job = None
                self._locked(False)

    def _in_kernel(self, action: Callable[[], object]) -> None:
        """Calls `action` on the kernel's own thread, where widgets live; without a kernel, here."""
        if self._kernel and self._kernel.is_running():
            self._kernel.call_soon_threadsafe(action)
        else:
            action()

    def _tick(self, label: str, on: bool) -> None:
        self.compared = [one for one in self.runs if (one in self.compared or one == label) and (on or one != label)]

    def _side_by_side(self) -> None:
        for tick in self._ticks.children:
            tick.value = tick.description in self.compared
        chosen = {label: self.runs[label] for label in self.compared}
        names = {cell["configuration"] for run in chosen.values() for cell in run.record.get("cells") or []}
        if not names:
            self.comparison, self._results.children = pd.DataFrame(), ()
            return
        self.comparison = compare(chosen, self.base.name if self.base.name in names else None)
        if self.comparison.empty:
            self._results.children = [ipywidgets.HTML("One configuration alone has nothing to be compared with.")]
            return
        if not any(isinstance(child, Plot) for child in self._results.children):
            self._results.children = [Plot(), ipywidgets.HTML()]
        plot, figures = self._results.children
        plot.show_figure(views.figure(self.comparison))
        figures.value = f'<div class="omni-lab-ratios">{SPACED}{table(views.summary(self.comparison)).data}</div>'


def _laid_over(file: Path, settings: list[str], base: Run | None) -> dict[str, Any]:
    """What is laid over the file for the base: a small load, or the work of a run; then the settings."""
    load_experiment(file, settings)  # what is wrong with them is told by itself
    stated = [flat(yaml.safe_load(value), key.strip()) for key, _, value in (one.partition("=") for one in settings)]
    work = LOOK if base is None else _work(file, base)
    return work | {key: value for one in stated for key, value in one.items()}


def _work(file: Path, run: Run) -> dict[str, Any]:
    """What the work of a run's configuration of the same name, or its first, has that the file has not."""
    plain, configurations = load_experiment(file), run.record.get("configurations")
    if not configurations:
        raise ExperimentError(f"{run.path}/run.json: expected configurations, whose work is taken over; there are none")
    record = configurations.get(plain.name) or next(iter(configurations.values()))
    ours, theirs = flat(plain.model_dump(mode="json")), flat(record["experiment"])
    keys = [key for key in theirs if any(key == part or key.startswith(f"{part}.") for part in WORK)]
    found = {key: _in_checkout(key, theirs[key]) for key in keys}
    return {key: value for key, value in found.items() if value != ours.get(key, MISSING)}


def _in_checkout(key: str, value: Any) -> Any:
    """Reference results have paths relative to the checkout, wherever that is."""
    return str(ROOT / value) if key in ("model.checkpoint", "workload.dataset") and "/" in value else value


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
