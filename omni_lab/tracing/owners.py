"""Whose work a device did: the process, and the moment, in which the host started each activity."""

from __future__ import annotations

import numpy as np

from omni_lab.tracing.activity import SKEW_NS
from omni_lab.tracing.trace_file import Events, Trace

OWN_SHARE = 0.9
"""Of a device row's activity, what a process must have launched for the row to be its own."""


def host_processes(trace: Trace, process: np.ndarray) -> list[int | str | None]:
    """The processes that have ranges of the host; `process` is that of each of the trace's threads."""
    threads = [np.unique(part.thread) for part in (trace.ranges, trace.calls, trace.python)]
    return list(dict.fromkeys(process[np.unique(np.concatenate(threads))].tolist()))


def owners(trace: Trace, process: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The process that started each device activity, and when (-1: unknown); `process` is that of each thread.

    A row of a device that is a row of a process belongs to it. Else correlations tell: they tie activity to launches,
    but are unique in one process only, so a row of a merged trace belongs to the process whose launches all come before
    the activity, and closest. If several processes share a row, the closest launch decides for each activity.
    """
    device, calls = trace.device, trace.calls
    owner = np.full(len(device), None, object)
    launch = np.full(len(device), -1, np.int64)
    hosts = host_processes(trace, process)
    for one in np.unique(device.device):
        rows = np.flatnonzero(device.device == one)
        row = trace.devices[one][0]
        candidates = [row] if row in hosts else hosts or [row]
        start = device.start[rows]
        launches = [
            _launches(calls.take((process == pid)[calls.thread]), device.correlation[rows]) for pid in candidates
        ]
        delays = [np.where(at < 0, np.iinfo(np.int64).max, np.abs(start - at)) for at in launches]
        before = [float(((at >= 0) & (start >= at - SKEW_NS)).mean()) for at in launches]
        best = min(range(len(candidates)), key=lambda index: (before[index] < OWN_SHARE, np.median(delays[index])))
        chosen = np.full(len(rows), best)
        if before[best] < OWN_SHARE:
            nearest = np.argmin(delays, axis=0)
            chosen = np.where(np.min(delays, axis=0) < np.iinfo(np.int64).max, nearest, best)
        owner[rows] = np.array([*candidates, None], object)[chosen]
        launch[rows] = np.stack(launches)[chosen, np.arange(len(rows))]
    return owner, launch


def _launches(calls: Events, correlation: np.ndarray) -> np.ndarray:
    """When the call with each correlation began, -1 where there is none."""
    calls = calls.take(calls.correlation > 0)
    if not len(calls):
        return np.full(len(correlation), -1, np.int64)
    order = np.argsort(calls.correlation, kind="stable")
    ids = calls.correlation[order]
    row = np.minimum(np.searchsorted(ids, correlation), len(ids) - 1)
    return np.where(ids[row] == correlation, calls.start[order][row], -1)
