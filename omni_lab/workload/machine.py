"""How busy other programs kept the machine while something was measured."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True, slots=True)
class Reading:
    """Processor seconds that all programs, and that this one with its child processes, have used until now."""

    at_s: float = field(default_factory=time.monotonic)
    all_s: float = field(default_factory=lambda: _busy_s())
    own_s: float = field(default_factory=lambda: _own_s())


def others_share(before: Reading, after: Reading) -> float:
    """Share of all processors that other programs used between two readings, what a hypervisor took away included."""
    capacity_s = (after.at_s - before.at_s) * (psutil.cpu_count() or 1)
    others_s = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, others_s / capacity_s)) if capacity_s else 0.0


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))


def _own_s() -> float:
    total = 0.0
    process = psutil.Process()
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            used = each.cpu_times()
            total += used.user + used.system
    return total
