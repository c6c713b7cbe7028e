"""Which channels a stage graph needs: one for each pair of replicas that an edge connects."""

from __future__ import annotations

from dataclasses import dataclass

from omni_lab.core import CLIENT, PipelineSpec


@dataclass(frozen=True, slots=True)
class End:
    """One replica of one stage, or the client (replica 0)."""

    stage: str
    replica: int = 0

    def __str__(self) -> str:
        return CLIENT if self.stage == CLIENT else f"{self.stage}_r{self.replica}"


def channels(spec: PipelineSpec, replicas: dict[str, int]) -> list[tuple[End, End]]:
    """All (source, target) pairs. The client has a channel to and from every worker, for control and records."""

    def ends(stage: str) -> list[End]:
        return [End(stage, replica) for replica in range(replicas.get(stage, 1))]

    control = [(CLIENT, stage.name) for stage in spec.stages] + [(stage.name, CLIENT) for stage in spec.stages]
    edges = dict.fromkeys([*control, *spec.edges])
    return [(source, target) for a, b in edges for source in ends(a) for target in ends(b)]
