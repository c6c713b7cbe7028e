"""The teacher: hibari-tts (Apache-2.0). Text in; features, pitch, word times and a waveform that codes describe out.

The teacher predicts a spectrum envelope every 12.5 ms: of a pulse train (`harmonic`) and of two kinds of noise. Its
own waveform has free phases, which no small decoder can learn. Here its envelopes filter a pulse train and a noise
that are functions of each frame's codes, with one fixed phase a frequency, so that codes determine the sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from omni_lab.zoo.training import pitch
from omni_lab.zoo.training.pitch import FRAME, RATE

PACE = 0.85
"""Of the teacher's pace: about 180 words a minute, with more frames a sound than at its own."""
BANDS = (48, 24)
"""Mel bands of the pulse train's and of the noise's envelope."""
SLICES = 4
"""Envelopes a frame: one every 20 ms."""
FEATURES = SLICES * sum(BANDS)
NOISES = 4
"""Noise patterns of one frame. A fine codebook chooses among them, so that noise does not repeat."""

HOP, BINS = 300, 601
"""The teacher's short-time Fourier transform: samples between spectra, frequencies of one."""
LEAD_IN, FADE_OUT = 2, 1
"""Frames of silence before the first sound and after the last one."""
GAIN = 1.2
FLOOR = 0.03
"""Power added before the logarithm, 43 dB below loud vowels: what is quieter would only cost bits."""
_QUIET = -20.0  # log amplitude of silence
_VOICED = 40.0  # Hz; the teacher's curve is below where there is no pitch
_TOP = 11000.0  # Hz; no harmonic lies above
_PHASE_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised.",
    "Many people were waiting near the old bridge until the evening train arrived.",
    "I would like to know how long it takes from the harbour to the museum by bus.",
)


@dataclass(frozen=True)
class Reading:
    """What the teacher says to a text, cut to whole frames."""

    features: np.ndarray
    """Log mel amplitudes, [T, FEATURES]."""
    pitch: np.ndarray
    """Pitch codes, [T]."""
    words: np.ndarray
    """Frame in which each word of the text begins, with fractions, [words]."""
    harmonic: np.ndarray
    """Amplitude envelope of the pulse train, [BINS, T * FRAME / HOP]."""
    noise: np.ndarray
    """Amplitude envelope of the noise, of the same shape."""
    voiced: np.ndarray
    """Where there is pitch, one value a sample, [T * FRAME]."""


class Teacher:
    """One voice of hibari-tts, on one thread."""

    def __init__(self) -> None:
        import onnx
        import onnxruntime
        from hibari import Hibari, dsp

        self.dsp = dsp
        self.hibari = Hibari(threads=1)
        graph = onnx.load(self.hibari.model_path)
        # The length of each phoneme is inside the graph; it becomes one more output.
        (lengths,) = (node.input[0] for node in graph.graph.node if node.op_type == "CumSum")
        graph.graph.output.append(onnx.helper.make_tensor_value_info(lengths, onnx.TensorProto.INT64, None))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(graph.SerializeToString(), options, ["CPUExecutionProvider"])

    def read(self, text: str, pace: float = PACE) -> Reading:
        """Say a text of one or more sentences in one go."""
        phonemes = " ".join(self.hibari.phonemize(text))
        *spectra, curve, lengths = self._predict(phonemes, pace)
        harmonic, _, burst, noise, _ = spectra
        hops = lengths * (len(curve) // lengths.sum())  # a length counts two hops
        starts = _word_starts(text, phonemes, self.hibari.vocab, hops)
        loudness = (np.exp(harmonic.clip(max=7)) ** 2).sum(0) * (curve > _VOICED) + (
            np.exp(noise.clip(max=7)) ** 2
        ).sum(0)
        heard = np.flatnonzero(10 * np.log10(loudness + 1e-9) > 10 * np.log10(loudness.max()) - 45)
        per_frame = FRAME / HOP
        before = round(LEAD_IN * per_frame) - min(heard[0], int(starts[0]))
        frames = int(np.ceil((heard[-1] + 1 + before) / per_frame)) + FADE_OUT
        total = int(np.ceil(frames * per_frame))
        harmonic, burst, noise = (_place(part, before, total, _QUIET) for part in (harmonic, burst, noise))
        frequency = self._per_sample(_place(curve[None], before, total, 0.0)[0])[: frames * FRAME]
        voiced = frequency > _VOICED
        harmonic = np.exp(harmonic.clip(max=7))
        noise = np.sqrt(np.exp(2 * noise.clip(max=7)) + 2 * np.exp(2 * burst.clip(max=7)))
        share = _place(voiced[None].astype(np.float32), 0, total * HOP, 0.0).reshape(total, HOP).mean(1)
        bands = [_mel(BANDS[0]) @ (harmonic**2 * share), _mel(BANDS[1]) @ noise**2]
        levels = np.log(np.concatenate(bands) + FLOOR).T
        times = (np.arange(frames * SLICES) + 0.5) * FRAME / SLICES / HOP - 0.5
        return Reading(
            features=_interpolate(levels, times).reshape(frames, FEATURES).astype(np.float32),
            pitch=pitch.encode(frequency, voiced),
            words=(starts + before) / per_frame,
            harmonic=harmonic,
            noise=noise,
            voiced=voiced,
        )

    def wave(self, reading: Reading, patterns: np.ndarray) -> np.ndarray:
        """The sound of a reading, [T * FRAME] in [-1, 1]; `patterns` [T] names the noise pattern of each frame."""
        turns, frequency = pitch.phase(reading.pitch, FRAME)
        pulses = _pulses(turns.ravel(), frequency.ravel()) * reading.voiced
        count = reading.harmonic.shape[1]
        spectrum = self._spectra(pulses, count) * reading.harmonic * self._voice_phase[:, None]
        scale = HOP / np.sqrt((self.dsp.WIN**2).sum())
        spectrum += self._spectra(_patterns()[patterns].ravel(), count) * scale * reading.noise
        wave = self.dsp.ola(spectrum.astype(np.complex64))[: len(pulses)]
        return np.clip(GAIN * wave, -1, 1)

    def _predict(self, phonemes: str, pace: float) -> list[np.ndarray]:
        ids = np.asarray([self.hibari.ids(phonemes)], np.int64)
        outputs = self.session.run(None, {"ids": ids, "speed": np.asarray([pace], np.float32)})
        return [output[0] for output in outputs[:6]] + [outputs[6].ravel()]

    def _per_sample(self, curve: np.ndarray) -> np.ndarray:
        times = (np.arange(len(curve) * HOP) + 0.5) / HOP - 0.5
        return np.interp(times, np.arange(len(curve)), curve)

    def _spectra(self, wave: np.ndarray, count: int) -> np.ndarray:
        padded = np.zeros(count * HOP, np.float32)
        padded[: len(wave)] = wave[: count * HOP]
        return self.dsp.stft(padded, count)

    @cached_property
    def _voice_phase(self) -> np.ndarray:
        """The mean phase of the voice's filter at each frequency, as unit complex numbers, [BINS]."""
        total = np.zeros(BINS, np.complex128)
        for text in _PHASE_TEXTS:
            harmonic, turn, _, _, _, curve, _ = self._predict(" ".join(self.hibari.phonemize(text)), PACE)
            weight = np.exp(harmonic.clip(max=7)) * (curve > _VOICED)
            total += (weight * np.exp(1j * np.pi * np.tanh(turn))).sum(1)
        return (total / np.abs(total)).astype(np.complex64)


def _word_starts(text: str, phonemes: str, known: dict[str, int], lengths: np.ndarray) -> np.ndarray:
    """Where each word of the text begins, in hops. Where the teacher splits words otherwise, shares of the length."""
    ends = lengths.cumsum()
    spoken = [character for character in phonemes if character in known]
    begins = [ends[0]]
    begins += [ends[index + 1] for index, character in enumerate(spoken) if character == " "]
    words = text.split()
    if len(begins) == len(words):
        return np.asarray(begins, np.float64)
    letters = np.cumsum([0, *(len(word) + 1 for word in words)])
    return np.interp(letters[:-1] / letters[-1], [0, 1], [ends[0], ends[-1]])


def _place(part: np.ndarray, before: int, total: int, fill: float) -> np.ndarray:
    """Shift [rows, n] right by `before` columns (left if negative) into `total` columns."""
    placed = np.full((len(part), total), fill, part.dtype)
    source = part[:, max(0, -before) : max(0, total - before)]
    start = max(0, before)
    placed[:, start : start + source.shape[1]] = source
    return placed


def _interpolate(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    low = np.clip(np.floor(times).astype(int), 0, len(rows) - 1)
    high = np.minimum(low + 1, len(rows) - 1)
    weight = (times - np.floor(times))[:, None]
    return rows[low] * (1 - weight) + rows[high] * weight


def _pulses(turns: np.ndarray, frequency: np.ndarray) -> np.ndarray:
    """All harmonics up to `_TOP` Hz at amplitude 1: the sum of cos(h t) is sin((n + 1/2) t) / (2 sin(t / 2)) - 1/2."""
    angle = 2 * np.pi * (turns % 1.0)
    highest = np.floor(_TOP / frequency) + 0.5
    half = 2 * np.sin(angle / 2)
    near_zero = np.abs(half) < 2e-3
    return np.where(near_zero, highest, np.sin(highest * angle) / np.where(near_zero, 1, half)) - 0.5


def _mel(count: int) -> np.ndarray:
    """Mean over `count` triangular bands of the mel scale between 60 Hz and 12 kHz, [count, BINS]."""
    hertz = np.linspace(0, RATE / 2, BINS)
    mel = np.log1p(hertz / 700)
    edges = np.interp(np.linspace(np.log1p(60 / 700), mel[-1], count + 2), mel, hertz)
    rise = (hertz - edges[:-2, None]) / np.diff(edges)[:-1, None]
    fall = (edges[2:, None] - hertz) / np.diff(edges)[1:, None]
    weights = np.clip(np.minimum(rise, fall), 0, None)
    narrow = weights.sum(1) == 0  # narrower than the distance of two frequencies
    weights[narrow, np.abs(hertz - edges[1:-1, None]).argmin(1)[narrow]] = 1
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _patterns() -> np.ndarray:
    """Noise with a flat spectrum and unit power, [NOISES, FRAME]."""
    spectrum = np.fft.rfft(np.random.default_rng(7).standard_normal((NOISES, FRAME)))
    return np.fft.irfft(spectrum / np.abs(spectrum) * np.sqrt(FRAME)).astype(np.float32)
