"""Loudness and peak as Recommendation ITU-R BS.1770-5 (2023) measures them, of one channel."""

from __future__ import annotations

import math

import numpy as np
import soxr

RATE = 48_000
"""Hz for which the recommendation gives its filters."""

FILTERS = (
    ((1.53512485958697, -2.69169618940638, 1.19839281085285), (1.0, -1.69065929318241, 0.73248077421585)),
    ((1.0, -2.0, 1.0), (1.0, -1.99004745483398, 0.99007225036621)),
)
"""Numerators and denominators of the shelf (its table 1) and of the high-pass (table 2), which weight by frequency."""

RING = 16_384
"""Samples after which both filters have rung down to less than a double can hold beside the signal."""

BLOCK, HOP = 2 * RATE // 5, RATE // 10
"""Blocks of 400 ms that overlap by three quarters."""

ABSOLUTE, RELATIVE = -70.0, -10.0
"""Gates: LUFS, and LU beside the mean of the blocks above the first one."""

OVERSAMPLED = 4
"""Times that annex 2 samples the waveform between its samples."""

FULL_SCALE = 1 - 2**-15
"""The largest sample that 16 bits hold."""


def loudness(samples: np.ndarray, rate: int) -> float:
    """Integrated loudness in LUFS of mono samples of full scale 1, as one channel: played on two it is 3 LU more.

    NaN if no block passes the absolute gate: silence, or less than 400 ms.
    """
    weighted = _weighted(soxr.resample(samples.astype(np.float64), rate, RATE))
    if len(weighted) < BLOCK:
        return math.nan
    energy = np.concatenate([[0.0], np.cumsum(weighted**2)])
    starts = np.arange(0, len(weighted) - BLOCK + 1, HOP)
    power = (energy[starts + BLOCK] - energy[starts]) / BLOCK
    power = power[power > _power(ABSOLUTE)]
    if not len(power):
        return math.nan
    return _lufs(power[power > _power(_lufs(power.mean()) + RELATIVE)].mean())


def true_peak(samples: np.ndarray, rate: int) -> float:
    """The highest point of the waveform, also between its samples, in dB of full scale; NaN if it is zero."""
    between = soxr.resample(samples.astype(np.float64), rate, OVERSAMPLED * rate)
    peak = max((float(np.abs(part).max()) for part in (samples, between) if len(part)), default=0.0)
    return 20 * math.log10(peak) if peak else math.nan


def clipped(samples: np.ndarray) -> int:
    """Samples at full scale."""
    return int((np.abs(samples) >= FULL_SCALE).sum())


def _weighted(samples: np.ndarray) -> np.ndarray:
    """Both filters, applied to the spectrum; what rings on after the end has room behind it."""
    count = 1 << (len(samples) + RING).bit_length()
    delay = np.exp(-2j * np.pi * np.fft.rfftfreq(count))
    spectrum = np.fft.rfft(samples, count)
    for numerator, denominator in FILTERS:
        spectrum *= np.polyval(numerator[::-1], delay) / np.polyval(denominator[::-1], delay)
    return np.fft.irfft(spectrum, count)[: len(samples)]


def _lufs(power: float) -> float:
    return -0.691 + 10 * math.log10(power)


def _power(lufs: float) -> float:
    return 10 ** ((lufs + 0.691) / 10)
