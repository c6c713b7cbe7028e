"""The cells of a run and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omni_lab.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Unit:
    """One repeat of one cell."""

    configuration: Experiment
    concurrency: int | None
    repeat: int

    @property
    def key(self) -> tuple[str, int | None, int]:
        return self.configuration.name, self.concurrency, self.repeat

    @property
    def label(self) -> str:
        load = "open" if self.concurrency is None else f"c{self.concurrency}"
        return f"{self.configuration.name}-{load}-r{self.repeat}"

    @property
    def requests(self) -> int:
        """Number of requests that are measured."""
        return self.configuration.workload.prompts(self.concurrency)

    @property
    def warmup(self) -> int:
        """Number of requests before them."""
        stated = self.configuration.workload.warmup
        return (self.concurrency or 1) if stated is None else stated


def planned(configurations: Sequence[Experiment]) -> Iterator[Unit]:
    """All units in order: repeat by repeat, and every other repeat from the last configuration back to the first.

    A machine that grows steadily slower or faster is then, over an even number of repeats, the same to all of them,
    and the configuration at the turn keeps its pipeline, so no start is added.
    """
    for repeat in range(max(one.workload.repeats for one in configurations)):
        for configuration in reversed(configurations) if repeat % 2 else configurations:
            if repeat < configuration.workload.repeats:
                for concurrency in configuration.workload.loads:
                    yield Unit(configuration, concurrency, repeat)
