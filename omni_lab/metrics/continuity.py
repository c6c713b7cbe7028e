"""Playback continuity: what a listener hears who presses play at the first chunk."""

from __future__ import annotations

from collections.abc import Sequence

THRESHOLD_S = 0.1
"""Underrun up to which an answer still counts as continuous (vLLM-Omni's default)."""


def underrun_s(arrival_s: Sequence[float], audio_s: Sequence[float]) -> float:
    """The largest shortage of audio, in seconds, at the arrival of any chunk after the first.

    `arrival_s`: when each chunk came; `audio_s`: how much audio it brought. The player starts at the first
    arrival and never waits: at time t it has consumed t - arrival_s[0] seconds, so the shortage just before a
    chunk is that minus all audio received before it. The definition of vLLM-Omni's `audio_underrun`.
    """
    shortage, received = 0.0, 0.0
    for arrival, seconds in zip(arrival_s, audio_s, strict=True):
        shortage = max(shortage, arrival - arrival_s[0] - received)
        received += seconds
    return shortage
