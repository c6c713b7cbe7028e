"""A run from the experiment to its report: what the command and the notebooks have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from omni_lab.core import PipelineError
from omni_lab.experiment import Experiment
from omni_lab.workload.dataset import Dataset, load_dataset
from omni_lab.workload.plan import Unit, planned

if TYPE_CHECKING:  # what computes is imported once the experiment is known to be right
    from omni_lab.results import RunDirectory
    from omni_lab.workload.open_target import Open, Progress


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run: the configurations of an experiment, the prompts of each, and the cells in their order."""

    experiment: Experiment
    configurations: Sequence[Experiment]
    datasets: dict[str, Dataset]
    units: Sequence[Unit]

    def skipped(self) -> Iterator[str]:
        """One sentence for each set of prompts with lines that were skipped."""
        for data in {data.path: data for data in self.datasets.values() if data.skipped}.values():
            yield f"{data.path}: {data.skipped} lines without a text to speak were skipped"

    def open(self, path: Path, resume: bool = False) -> RunDirectory:
        """The run's directory, empty or with what is finished. Raises ExperimentError if it holds something else."""
        from omni_lab.environment import describe_environment
        from omni_lab.results import RunDirectory

        directory = RunDirectory(path, self.experiment, self.configurations)
        if resume:
            directory.resume()
        else:
            directory.create()
        directory.record["environment"] = directory.record["environment"] or describe_environment()
        directory.write()
        return directory

    async def execute(self, directory: RunDirectory, progress: Progress, open_target: Open | None = None) -> None:
        """Runs what the directory lacks and writes the report.

        `open_target` gives what all configurations are measured on; None: what each of them names. Raises
        PipelineError when a target cannot start or breaks, or no request of a cell was completed: at the end, with
        the report of what was measured.
        """
        from omni_lab.views.report import write_report
        from omni_lab.workload import open_target as named
        from omni_lab.workload.cells import run_units

        lacking = [unit for unit in self.units if unit.key not in directory.finished]
        failure = None
        try:
            await run_units(lacking, self.datasets, directory, progress, open_target or named.open_target)
        except PipelineError as error:
            failure = " ".join(str(error).split())
        cells = directory.record["cells"]
        if cells:
            await asyncio.to_thread(write_report, directory.path)
        empty = [f"{one['configuration']} at concurrency {one['concurrency']}" for one in cells if not one["completed"]]
        if failure or empty:
            raise PipelineError(
                failure or f"no request was completed in {', '.join(empty)} (requests.jsonl has the errors)"
            )


def plan_job(experiment: Experiment, configurations: Sequence[Experiment]) -> Job:
    """Reads the sets of prompts. Raises ExperimentError naming file and line."""
    datasets = {one.name: load_dataset(one.workload) for one in configurations}
    return Job(experiment, configurations, datasets, list(planned(configurations)))


def new_run_path(name: str, results: Path = Path("results")) -> Path:
    """Where a run of this name goes if nobody says: results/<name>/<time>, and a number for a second in that second."""
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = chain([time], (f"{time}_{number}" for number in count(2)))
    return next(path for one in names if not (path := results / name / one).exists())
