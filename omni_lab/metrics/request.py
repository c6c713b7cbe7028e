"""Figures of one request, from the times at which its client saw things happen."""

from __future__ import annotations

from dataclasses import dataclass, field

from omni_lab.metrics.continuity import underrun_s
from omni_lab.metrics.records import RequestRow


@dataclass(slots=True)
class RequestFigures:
    """Times in ms since the request was sent; None where there was nothing to measure. See `definitions`."""

    dispatch_delay_ms: float
    text_tokens: int
    codec_frames: int
    itl_ms: list[float] = field(default_factory=list)
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None
    audio_ttfp_ms: float | None = None
    audio_duration_s: float | None = None
    audio_rtf: float | None = None
    audio_underrun_s: float | None = None


def request_figures(row: RequestRow, sample_rate: int) -> RequestFigures:
    """Latency figures of a request. A failed one has no end-to-end latency; what was measured before stays."""
    figures = RequestFigures(
        dispatch_delay_ms=(row.sent_ns - row.due_ns) / 1e6,
        text_tokens=sum(row.text_tokens),
        codec_frames=sum(row.audio_frames),
    )
    if row.error is None:
        figures.e2el_ms = (row.end_ns - row.sent_ns) / 1e6
    _text(figures, row)
    _audio(figures, row, sample_rate)
    return figures


def _text(figures: RequestFigures, row: RequestRow) -> None:
    events = [(time_ns, tokens) for time_ns, tokens in zip(row.text_ns, row.text_tokens, strict=True) if tokens]
    if not events:
        return
    previous, tokens = events[0]
    figures.ttft_ms = (previous - row.sent_ns) / 1e6
    figures.itl_ms = [0.0] * (tokens - 1)
    for time_ns, tokens in events[1:]:
        figures.itl_ms += [(time_ns - previous) / 1e6 / tokens] * tokens
        previous = time_ns
    if figures.itl_ms:
        figures.tpot_ms = sum(figures.itl_ms) / len(figures.itl_ms)


def _audio(figures: RequestFigures, row: RequestRow, sample_rate: int) -> None:
    chunks = [(time_ns, samples) for time_ns, samples in zip(row.audio_ns, row.audio_samples, strict=True) if samples]
    if not chunks:
        return
    figures.audio_ttfp_ms = (chunks[0][0] - row.sent_ns) / 1e6
    figures.audio_duration_s = sum(samples for _, samples in chunks) / sample_rate
    figures.audio_rtf = (chunks[-1][0] - row.sent_ns) / 1e9 / figures.audio_duration_s
    arrivals, seconds = zip(*((time_ns / 1e9, samples / sample_rate) for time_ns, samples in chunks), strict=True)
    figures.audio_underrun_s = underrun_s(arrivals, seconds)
