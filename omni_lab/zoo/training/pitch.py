"""Pitch of a frame as one code: whole cycles a frame, and how the frequency moves inside it.

Every frame begins at phase 0, because it holds a whole number of cycles. So the waveform of a frame follows from its
codes alone, and the decoder never has to carry a phase from frame to frame. The frequency rises or falls linearly in
the frame by `slope` cycles per frame, which leaves the number of cycles as it is:

    phase(u) = cycles * u + slope / 2 * (u^2 - u),  u in [0, 1)
"""

from __future__ import annotations

import numpy as np

FRAME = 1920
"""Samples a frame: 80 ms at 24 kHz."""
RATE = 24000

FEWEST_CYCLES = 8
CYCLES = 32
SLOPES = np.array([-2.5, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
"""Cycles a frame gained from a frame's begin to its end."""
ENTRIES = CYCLES * len(SLOPES)

_STAY = 0.62
"""A count of cycles is kept while the true one is closer than this, so that pitch between two does not flicker."""


def encode(frequency: np.ndarray, voiced: np.ndarray) -> np.ndarray:
    """Codes [T] of a pitch curve in Hz with a mask, both one value a sample, [T * FRAME]. Gaps are bridged."""
    curve, mask = frequency.reshape(-1, FRAME), voiced.reshape(-1, FRAME)
    count = mask.sum(1)
    known = np.flatnonzero(count > FRAME // 16)
    if not len(known):
        return np.full(len(curve), (16 - FEWEST_CYCLES) * len(SLOPES) + 4)
    mean = (curve * mask).sum(1)[known] / count[known] * FRAME / RATE
    exact = np.interp(np.arange(len(curve)), known, mean)
    cycles = np.round(exact)
    for frame in range(1, len(cycles)):
        if abs(exact[frame] - cycles[frame - 1]) < _STAY:
            cycles[frame] = cycles[frame - 1]
    cycles = cycles.clip(FEWEST_CYCLES, FEWEST_CYCLES + CYCLES - 1)
    slope = np.gradient(cycles) if len(cycles) > 1 else np.zeros(1)
    nearest = np.abs(slope[:, None] - SLOPES).argmin(1)
    return (cycles.astype(np.int64) - FEWEST_CYCLES) * len(SLOPES) + nearest


def phase(codes: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Phase in cycles since the frame's begin, and frequency in Hz, at `points` places a frame: both [..., points]."""
    cycles = (codes // len(SLOPES) + FEWEST_CYCLES)[..., None]
    slope = SLOPES[codes % len(SLOPES)][..., None]
    u = np.arange(points) / points
    return cycles * u + slope / 2 * (u * u - u), (cycles + slope * (u - 0.5)) * RATE / FRAME
