"""What one worker of a trace did: its steps, what its devices were busy with, and the time between."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from omni_lab.tracing.intervals import between, intersection, nested, overlap, top_level, union
from omni_lab.tracing.repeats import pauses_of_loop
from omni_lab.tracing.steps import PROFILER_STEP, Steps
from omni_lab.tracing.trace_file import Events, Trace

GRAPH_LAUNCH = re.compile(r"^(?:cuda|cu|hip)GraphLaunch")
KERNEL_LAUNCH = re.compile(r"^(?:cuda|cu|hip)(?:Ext)?(?:Module)?Launch(?:Cooperative)?Kernel")
WAITS_FOR_ALL = re.compile(r"^(?:cuda|hip)(?:Device|Stream)Synchronize|^cu(?:Ctx|Stream)Synchronize")
"""Calls that return once what was started before is done. An event may be older, so waiting for one proves nothing."""
WAIT = re.compile(r"synchronize|\bwait|acquire|^(?:idle|input|slot)$", re.IGNORECASE)
"""Ranges that do nothing: waiting calls, and what our own workers wait for."""

LOST_SHARE = 1e-3
"""Launches that may lack their activity before a trace counts as incomplete."""
SKEW_NS = 200_000
"""How far activity may seem to start before its launch: Kineto's clocks of host and device agree within some µs."""
TORN_NS = 100_000
"""How far ranges of one thread may overlap without being nested: some are timed by another clock, and aligned."""
OUTSIDE_NS = 10**9
"""How far from the profiler's window an event may lie."""

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Python names its objects so; one function of two objects is one cause."""
NOTHING = "(nothing recorded)"


@dataclass(slots=True)
class Activity:
    """What a process's devices did, as ranges; `launch` is when the host started each, -1 where that is unknown.

    `notes` say where it was completed from host launches, `faults` what is missing. `unbounded`: from when until when,
    on the host, graphs were replayed whose kernels are not in the trace.
    """

    events: Events
    launch: np.ndarray
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    replays: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(slots=True)
class Measured:
    """A worker's steps (`begin` to `finish`), the gaps before them, and the share of time that its devices were busy.

    `step` are the steps that have a gap before them, as rows of `steps`; `gap_ns` the idle time of each gap, which lies
    between `low` and `high`. `idle` are all gaps' idle intervals. `window_ns` is the time from the first step to the
    end of the last, without the profiler's pauses. `faults` is empty if the figures can be trusted.
    """

    steps: Steps
    begin: np.ndarray
    finish: np.ndarray
    step: np.ndarray
    gap_ns: np.ndarray
    low: np.ndarray
    high: np.ndarray
    idle: tuple[np.ndarray, np.ndarray]
    window_ns: int
    busy_share: float
    device_shares: dict[int, float]
    notes: list[str]
    faults: list[str]


def activity_of(trace: Trace, rows: np.ndarray, launch: np.ndarray, calls: Events) -> Activity:
    """The device activity of a process: rows of the trace's, completed by graph replays whose kernels are missing."""
    found = Activity(trace.device.take(rows), launch)
    kinds = np.unique(calls.name).tolist()

    def lacking(pattern: re.Pattern[str]) -> tuple[Events, int]:
        launches = calls.take(np.isin(calls.name, [name for name in kinds if pattern.search(trace.names[name])]))
        return _without_activity(launches, found.events)

    lost, launches = lacking(KERNEL_LAUNCH)
    if len(lost) > LOST_SHARE * launches:
        found.faults.append(f"{len(lost)} of {launches} kernel launches have no device activity in the trace")
    replays, launches = lacking(GRAPH_LAUNCH)
    if len(replays):
        waits = calls.take(np.isin(calls.name, [name for name in kinds if WAITS_FOR_ALL.search(trace.names[name])]))
        _complete(found, replays.sorted(), launches, waits)
    return found


def _without_activity(launches: Events, activity: Events) -> tuple[Events, int]:
    """The launches that started nothing in the trace, and how many there were at all.

    A runtime's launch may have the driver's inside, and only one of the two has the activity's correlation.
    """
    order = np.lexsort((-launches.end, launches.start, launches.thread))
    launches = launches.take(order)
    outer = np.zeros(len(launches), bool)
    for thread in np.unique(launches.thread):
        rows = launches.thread == thread
        outer[rows] = top_level(launches.start[rows], launches.end[rows])
    seen = np.isin(launches.correlation, activity.correlation)
    seen_inside = np.bincount(np.cumsum(outer) - 1, seen, outer.sum()) > 0 if len(launches) else np.zeros(0, bool)
    return launches.take(np.flatnonzero(outer)[~seen_inside]), int(outer.sum())


def _complete(found: Activity, replays: Events, launches: int, waits: Events) -> None:
    """Counts a replay without kernels as busy from its launch to the end of its thread's next call that waits."""
    end = np.full(len(replays), -1, np.int64)
    for thread in np.unique(replays.thread):
        ends = np.append(np.sort(waits.end[waits.thread == thread]), -1)
        starts = np.append(np.sort(waits.start[waits.thread == thread]), np.iinfo(np.int64).max)
        rows = replays.thread == thread
        end[rows] = ends[np.searchsorted(starts, replays.end[rows] - 1)]
    what = f"{len(replays)} of {launches} graph replays have no kernels in the trace"
    if (end < 0).any():
        found.faults.append(f"{what}, and nothing tells how long the device was busy")
        return
    found.notes.append(f"{what}: busy from the host's launch to the end of the synchronization after it")
    found.replays = replays.start, end
    busy = Events(replays.start, end, replays.name, replays.thread, replays.correlation, replays.device)
    found.events = Events.join([found.events, busy])
    found.launch = np.concatenate([found.launch, replays.start])


def measure(steps: Steps, activity: Activity, pauses: Events, steps_of_device: bool = False) -> Measured:
    """Gaps and busy share. Without device activity the ranges of the steps themselves are what is busy.

    What the devices idled in `pauses`, of the profiler, is the measurement's own: neither busy nor idle.
    `steps_of_device`: the steps were inferred from the activity, so their times are the device's.
    """
    faults, notes = [*steps.faults, *activity.faults], list(activity.notes)
    events = activity.events
    if not len(events):
        notes.append("no device activity: gaps of the host's ranges")
        begin, finish, busy = steps.start, steps.end, union(steps.start, steps.end)
    else:
        busy = union(events.start, events.end)
        if steps_of_device:
            begin, finish = steps.start, steps.end
        else:
            begin, finish = _by_launch(steps, activity, notes, faults)
        faults += _skew(activity)
    active = finish > begin
    reach = np.maximum.accumulate(np.where(active, finish, np.iinfo(np.int64).min))
    step = np.flatnonzero(active[1:] & active[:-1]) + 1
    low, high = reach[step - 1], np.maximum(begin[step], reach[step - 1])
    counted = union(np.concatenate([busy[0], pauses.start]), np.concatenate([busy[1], pauses.end]))
    if not len(step):
        faults.append("no gap between two steps that take any time")
    gap_ns = high - low - overlap(*counted, low, high)
    idle = intersection(*between(*counted), *union(low[high > low], high[high > low]))
    begin, finish = begin[active], finish[active]
    if len(begin):
        window = np.array([begin.min()]), np.array([finish.max()])
        busy_ns = int(overlap(*busy, *window)[0])
        paused_ns = int(overlap(*counted, *window)[0]) - busy_ns
        if paused_ns:
            notes.append(f"{paused_ns / 1e6:.3g} ms left out, in which the profiler wrote what it had recorded")
        length = max(int(window[1][0] - window[0][0]) - paused_ns, 1)
        busy_share = busy_ns / length
        devices = {
            int(one): float(overlap(*union(events.start[rows], events.end[rows]), *window)[0] / length)
            for one in np.unique(events.device)
            if one >= 0 and (rows := events.device == one).any()
        }
        faults += pauses_of_loop(gap_ns, finish - begin, length)
    else:
        length, busy_share, devices = 0, 0.0, {}
    return Measured(steps, begin, finish, step, gap_ns, low, high, idle, length, busy_share, devices, notes, faults)


def _by_launch(steps: Steps, activity: Activity, notes: list[str], faults: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """First start and last end of what each step started on the devices; equal where it started nothing."""
    events, known = activity.events, activity.launch >= 0
    at, end = activity.launch, steps.end
    if not known.any():
        notes.append("activity belongs to steps by its time: the trace does not tell what launched it")
        at, known = events.start, np.ones(len(events), bool)
        end = np.append(steps.start[1:], max(events.end.max(), steps.end[-1]))
    step = np.searchsorted(steps.start, at, side="right") - 1
    rows = known & (step >= 0) & (at < end[step])
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    finish = np.full(len(steps), -1, np.int64)
    np.minimum.at(begin, step[rows], events.start[rows])
    np.maximum.at(finish, step[rows], events.end[rows])
    silent = finish < 0
    if silent.any():
        faults.append(f"{silent.sum()} of {len(steps)} steps have no device activity in the trace")
    starts, ends = activity.replays
    first = np.searchsorted(steps.start, starts, side="right")
    later = np.append(steps.start, np.iinfo(np.int64).max)[first]
    if (ends > later).any():
        faults.append("graph replays without kernels are waited for only in a later step")
    return np.where(silent, 0, begin), np.where(silent, 0, finish)


def _skew(activity: Activity) -> list[str]:
    known = activity.launch >= 0
    early = activity.events.start[known] < activity.launch[known] - SKEW_NS
    far = activity.events.start[known] < activity.launch[known] - OUTSIDE_NS
    if early.sum() > LOST_SHARE * known.sum() or far.any():
        return [f"device activity starts before its launch, {early.sum()} times: a clock jumped"]
    return []


def outside(trace: Trace, steps: Steps, activity: Activity) -> list[str]:
    """Whether steps or activity lie far outside of what was recorded, or ranges of the thread are torn."""
    faults = []
    host = trace.ranges.take(trace.ranges.thread == steps.thread).sorted()
    if trace.recorded:
        begin, end = trace.recorded
    elif len(host) and (activity.launch >= 0).any():
        begin, end = int(host.start[0]), max(int(host.end.max()), int(activity.launch.max()))
    else:
        begin, end = int(steps.start.min(initial=0)), int(steps.end.max(initial=0))
    margin = OUTSIDE_NS + (end - begin)
    for what, one in (("steps", steps), ("device activities", activity.events)):
        far = ((one.start < begin - margin) | (one.end > end + margin)).sum()
        if far:
            faults.append(f"{far} {what} lie far outside of the time that was recorded: the clock jumped")
    if len(host):
        reach = np.maximum.accumulate(host.end)[:-1]
        torn = ((host.start[1:] < reach - TORN_NS) & (host.end[1:] > reach + TORN_NS)).sum()
        if torn:
            faults.append(f"{torn} host ranges overlap without being nested: the clock jumped, or events are damaged")
    return faults


def causes(trace: Trace, measured: Measured) -> list[tuple[str, str, int, int]]:
    """What the step's thread did in the gaps: (name, kind, ns, ranges), the longest first; the ns add up to the gaps.

    A range counts without what lies inside it. Kinds: `range`, `wait` for calls that wait, and `nothing`.
    ProfilerStep, which lasts from one step to the next, is nothing that a thread does, unless it marks the steps.
    """
    start, end = measured.idle
    total = int((end - start).sum())
    ranges = _in_gaps(trace, measured).sorted()
    around, ends = nested(ranges.start, ranges.end)
    inside = overlap(start, end, ranges.start, ends)
    alone = inside.copy()
    np.subtract.at(alone, around[around >= 0], inside[around >= 0])
    spent: dict[tuple[str, str], list[int]] = {}
    kinds, rows = np.unique(ranges.name, return_inverse=True)
    sums = np.bincount(rows, alone, len(kinds)) if len(kinds) else []
    for name, ns, count in zip(kinds.tolist(), sums, np.bincount(rows, minlength=len(kinds)), strict=True):
        label = ADDRESS.sub("", re.sub(r"#\d+", "#", trace.names[name]))
        if name in measured.steps.marks:  # a step's own time, whatever its number
            label = re.sub(r"\d+", "#", label)
        entry = spent.setdefault((label, "wait" if WAIT.search(label) else "range"), [0, 0])
        entry[0] += int(ns)
        entry[1] += int(count)
    rest = total - int(alone.sum())
    if rest > 0:
        spent[NOTHING, "nothing"] = [rest, 0]
    found = [(label, kind, ns, count) for (label, kind), (ns, count) in spent.items() if ns > 0]
    return sorted(found, key=lambda one: -one[2])


def work_ns(trace: Trace, measured: Measured) -> np.ndarray:
    """Each gap without the time in which the step's thread waited."""
    ranges = _in_gaps(trace, measured)
    waits = ranges.take(
        np.isin(ranges.name, [name for name in np.unique(ranges.name) if WAIT.search(trace.names[name])])
    )
    waited = intersection(*measured.idle, *union(waits.start, waits.end))
    return measured.gap_ns - overlap(*waited, measured.low, measured.high)


def _in_gaps(trace: Trace, measured: Measured) -> Events:
    """The ranges of the step's thread that lie in gaps, at least in part."""
    found = []
    for part in (trace.ranges, trace.python, trace.calls):
        own = np.flatnonzero(part.thread == measured.steps.thread)
        found.append(part.take(own[overlap(*measured.idle, part.start[own], part.end[own]) > 0]))
    ranges = Events.join(found)
    spans = [name for name in np.unique(ranges.name).tolist() if re.search(PROFILER_STEP, trace.names[name])]
    return ranges.take(~np.isin(ranges.name, [name for name in spans if name not in measured.steps.marks]))
