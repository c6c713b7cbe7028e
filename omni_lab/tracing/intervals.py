"""Arithmetic of time intervals: unions, what lies between them, and how much of them falls within others."""

from __future__ import annotations

import numpy as np


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same time as intervals that neither overlap nor touch, in order."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], start[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return start[first], reach[last]


def between(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The holes of a union."""
    return end[:-1], start[1:]


def covered(start: np.ndarray, end: np.ndarray, at: np.ndarray) -> np.ndarray:
    """How much of a union lies before each time of `at`, in the union's unit."""
    total = np.concatenate([[0], np.cumsum(end - start)])
    index = np.searchsorted(start, at, side="right")
    inside = np.clip(at - start[index - 1], 0, end[index - 1] - start[index - 1]) if len(start) else 0
    return np.where(index > 0, total[index - 1] + inside, 0)


def overlap(start: np.ndarray, end: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How much of a union lies within each interval from `begins` to `ends`; 0 where that is empty."""
    return np.maximum(covered(start, end, ends) - covered(start, end, begins), 0)


def nested(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The index of the range around each one, -1 where there is none, and where each ends: not after that one.

    Ranges in the order of `Events.sorted`. Calls of a runtime are timed by another clock than the operators around
    them, and may stick out by some µs.
    """
    found, ends = np.full(len(start), -1, np.int64), end.copy()
    open_ranges: list[tuple[int, int]] = []
    block = 1 << 18  # a block at a time as Python numbers: all at once would need ten times their memory
    for low in range(0, len(start), block):
        pairs = zip(start[low : low + block].tolist(), end[low : low + block].tolist(), strict=True)
        for index, (begin, stop) in enumerate(pairs, low):
            while open_ranges and open_ranges[-1][0] <= begin:
                open_ranges.pop()
            if open_ranges:
                around, found[index] = open_ranges[-1]
                if stop > around:
                    ends[index] = stop = around
            open_ranges.append((stop, index))
    return found, ends


def top_level(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """A mask of the ranges that lie in no other, in the order of `Events.sorted`. One that sticks out is not inside."""
    if not len(start):
        return np.zeros(0, bool)
    reach = np.maximum.accumulate(end)[:-1]
    return np.concatenate([[True], (start[1:] >= reach) | (end[1:] > reach)])


def intersection(
    start: np.ndarray, end: np.ndarray, other_start: np.ndarray, other_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What two unions have in common, as a union."""
    first = np.searchsorted(other_end, start, side="right")
    counts = np.maximum(np.searchsorted(other_start, end, side="left") - first, 0)
    rows = np.repeat(np.arange(len(start)), counts)
    others = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return np.maximum(start[rows], other_start[others]), np.minimum(end[rows], other_end[others])
