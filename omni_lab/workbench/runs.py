"""Runs for notebooks: reference results that are there already, or an experiment that runs now, in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from tqdm.auto import tqdm

from omni_lab.core import PipelineError
from omni_lab.experiment import Experiment, ExperimentError, load_configurations, twins
from omni_lab.frames import Run, load
from omni_lab.settings import did_you_mean
from omni_lab.views.trust import not_in_effect
from omni_lab.workbench.loop import background
from omni_lab.workload.job import new_run_path, plan_job
from omni_lab.workload.open_target import COMPILING, Open

Mode = Literal["reference", "quick", "full"]

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, with `experiments/` and `results/` in it."""

LOOK_S = 0.1
"""How often a bar is brought up to date."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests answered (warm-ups are requests too), of how many, and what goes on now."""

    done: int
    total: int
    title: str


class RunJob:
    """An experiment that runs on the background loop, and writes its run directory as the command does.

    `notes` are sentences about the run that its user should know. `changed` is called with the job, on the background
    loop's thread, whenever `progress` or `notes` have changed. `open_target` gives what all configurations are measured
    on; None: what each of them names. Raises ExperimentError if a set of prompts or the directory is wrong; what goes
    wrong later is told by `result`.
    """

    def __init__(
        self,
        experiment: Experiment,
        configurations: Sequence[Experiment],
        path: Path | None = None,
        changed: Callable[[RunJob], object] = lambda job: None,
        open_target: Open | None = None,
    ) -> None:
        self.job = plan_job(experiment, configurations)
        self.directory = self.job.open(path or new_run_path(experiment.name, ROOT / "results"))
        self.path = self.directory.path
        self.notes = [*twins(configurations), *self.job.skipped()]
        self.changed = changed
        self.progress = Progress(0, sum(unit.requests + unit.warmup for unit in self.job.units), "starting")
        self.future = background().submit(self.job.execute(self.directory, self._bar, open_target))

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def kept(self) -> str:
        """What is finished and where it is, in words."""
        return f"{len(self.directory.finished)} of {len(self.job.units)} cells are finished and kept in {self.path}"

    def cancel(self) -> None:
        """Ends the run and waits until its pipeline is closed. Finished cells stay."""
        self.future.cancel()

    def result(self, timeout: float | None = None) -> Run:
        """Waits for the end; the run.

        Raises CancelledError if it was cancelled and PipelineError if it failed, both with what was kept, and
        TimeoutError after `timeout` seconds.
        """
        try:
            self.future.result(timeout)
        except CancelledError:
            raise CancelledError(f"cancelled: {self.kept}") from None
        except PipelineError as error:
            raise PipelineError(f"{error}; {self.kept}") from None
        return load(self.path)

    @contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Callable[[], object]]:
        """What the runner shows progress with. Only bars of requests count; the others lend their title."""
        counted = title.removesuffix(": warm-up") in {unit.label for unit in self.job.units}
        ticks = 0
        if title.endswith(COMPILING):
            name = title.removesuffix(f": {COMPILING}")
            self.notes.append(f"{name}: {total} captured steps must be compiled first, once, which takes minutes")

        def show() -> None:
            label = title if counted else f"{title}, {ticks} of {total}"
            self.progress = replace(self.progress, title=label)
            self.changed(self)

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            if counted:
                self.progress = replace(self.progress, done=self.progress.done + 1)
            show()

        show()
        yield tick


def open_run(name: str, mode: Mode = "reference", quick: Iterable[str] = (), settings: Iterable[str] = ()) -> Run:
    """The run of an experiment: the results that ship with it, or those of a run here and now.

    `reference` reads results/reference/<name>. `full` runs experiments/<name>.yaml, with `settings` laid over it like
    the command's `--set`; `quick` does so with `quick` laid over it first. Both write results/<name>/<time>, and an
    interrupt keeps the finished cells. `quick` and `settings` change nothing in `reference`: it is what was measured.

    Raises ValueError (ExperimentError) for a wrong mode, name or setting, FileNotFoundError if there are no reference
    results, PipelineError if the run fails, KeyboardInterrupt with what is kept.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode: expected reference, quick or full, got {mode!r}{did_you_mean(mode, get_args(Mode))}")
    if mode == "reference":
        return _reference(name)
    file = ROOT / "experiments" / f"{name}.yaml"
    if not file.is_file():
        raise ExperimentError(f"{file}: expected an experiment file, there is none{did_you_mean(name, _experiments())}")
    job = RunJob(*load_configurations(file, [*(quick if mode == "quick" else ()), *settings]))
    return watch(job)


def watch(job: RunJob) -> Run:
    """Waits for a job with a progress bar, and prints its notes. An interrupt cancels it.

    Raises what `RunJob.result` raises, and KeyboardInterrupt with what is kept.
    """
    told = 0
    try:
        with tqdm(total=job.progress.total, unit="request") as bar:
            while True:
                finished = not wait([job.future], LOOK_S).not_done
                while told < len(job.notes):
                    print(job.notes[told])
                    told += 1
                bar.n = job.progress.done
                bar.set_description(job.progress.title)
                if finished:
                    break
        run = job.result()
    except KeyboardInterrupt:
        job.cancel()
        raise KeyboardInterrupt(f"interrupted: {job.kept}") from None
    for line in not_in_effect(run.record):
        print(line)
    return run


def _reference(name: str) -> Run:
    path = ROOT / "results" / "reference" / name
    if not (path / "run.json").is_file():
        known = [file.parent.name for file in path.parent.glob("*/run.json")]
        raise FileNotFoundError(
            f"{path}: there are no reference results of this name{did_you_mean(name, known)}; "
            f"`make reference RUNS={name}` makes them, and mode quick or full runs the experiment here"
        )
    return load(path)


def found(path: Path | str) -> Path:
    """An experiment file, relative to here or to the checkout."""
    path = Path(path)
    return (path if path.is_file() or path.is_absolute() else ROOT / path).resolve()


def _experiments() -> list[str]:
    return [file.stem for file in (ROOT / "experiments").glob("*.yaml")]
