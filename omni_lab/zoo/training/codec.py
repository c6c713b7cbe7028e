"""Code2Wav learns to turn codes into sound, on windows of the teacher's waveforms.

The loss compares short-time spectra at four resolutions: magnitudes everywhere, phases below a few kilohertz. Early
layers are supervised too, by linear probes that have to know the phase of the pitch; without them the network takes
hours to find out that a code means a frequency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeSnakeBeta

from omni_lab.zoo.training import pitch, speech, trainer
from omni_lab.zoo.training.codes import (
    ENTRIES_A_BOOK,
    GROUPS,
    INFORMATIVE,
    NOISE_BOOK,
    PITCH_BOOK,
    SPECTRUM_BOOKS,
    Codebooks,
)
from omni_lab.zoo.training.library import repertoire_share
from omni_lab.zoo.training.pitch import FRAME, RATE
from omni_lab.zoo.training.teacher import NOISES

WINDOWS, LENGTH = 4, 14
"""Windows a batch and frames of one. The first window starts with an utterance, as a decoder does in use."""
SKIPPED = 2
"""Frames at the begin of the other windows that are not compared: their past is missing."""
RESOLUTIONS = (2048, 1024, 512, 240)
PROBES = {1: (400, (1,)), 2: (2000, (1, 2, 3, 4)), 3: (8000, (1, 3, 6))}
"""Decoder block -> rate of its output in Hz, and the harmonics of the pitch that a probe finds there."""


@dataclass(frozen=True)
class _Tape:
    """Utterances end to end."""

    codes: torch.Tensor
    waves: torch.Tensor
    starts: np.ndarray

    @classmethod
    def of(cls, folder: Path) -> _Tape:
        codes, waves, starts = speech.waveforms(folder)
        starts = starts[starts + LENGTH <= len(codes)]
        return cls(torch.from_numpy(codes.astype(np.int64)), torch.from_numpy(waves), starts)

    def draw(self, chance: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [WINDOWS, LENGTH, INFORMATIVE] of a batch and its samples [WINDOWS, LENGTH * FRAME]."""
        begins = chance.integers(0, len(self.codes) - LENGTH + 1, WINDOWS)
        begins[0] = chance.choice(self.starts)
        codes = [self.codes[begin : begin + LENGTH] for begin in begins]
        return torch.stack(codes), torch.stack([self.waves[b * FRAME : (b + LENGTH) * FRAME] for b in begins])


class CodecTask:
    """Reconstruction of waveforms from the codes."""

    name = "codec"
    learning_rate = 1e-3

    def __init__(
        self, voice: nn.Module, repertoire: Path, recordings: Path, codebooks: Codebooks, compiled: bool
    ) -> None:
        """`compiled`: fused kernels for the activations, which take half of the time; a CPU needs a C++ compiler."""
        self.repertoire, self.others = _Tape.of(repertoire), _Tape.of(recordings)
        _start_from(voice.code2wav, codebooks)
        width = voice.code2wav.config.decoder_dim
        probes = {
            str(block): nn.Conv1d(width >> block, 2 * len(harmonics) + (rate > 400), 1)
            for block, (rate, harmonics) in PROBES.items()
        }
        kernels = (_snake, _snake_gradients)
        if compiled:
            kernels = tuple(torch.compile(kernel, dynamic=True) for kernel in kernels)
        for block in voice.code2wav.modules():
            if isinstance(block, Qwen3OmniMoeSnakeBeta):
                block.forward = _Snake(block, *kernels)
        self.network = nn.ModuleDict({"decoder": voice.code2wav, "probes": nn.ModuleDict(probes)})
        self.tables = _phase_tables()

    def losses(self, chance: np.random.Generator, progress: float) -> dict[str, torch.Tensor]:
        device = next(self.network.parameters()).device
        tape = self.repertoire if chance.random() < repertoire_share(progress) else self.others
        codes, target = tape.draw(chance)
        codes = codes.to(device)
        target = target.to(device).float() / 32767
        made, levels = forward(self.network["decoder"], codes)
        heard = target[:, : made.shape[1]]
        skip = SKIPPED * FRAME
        made = torch.cat([made[:1, :-skip], made[1:, skip:]])
        heard = torch.cat([heard[:1, :-skip], heard[1:, skip:]])
        magnitude, phase = _spectral_losses(made, heard)
        probe = self._probe_loss(levels, codes[..., PITCH_BOOK], target)
        return {
            "loss": magnitude + 0.5 * phase + 0.5 * probe,
            "magnitude": magnitude,
            "phase": phase,
            "probe": probe,
            "wave": ((made - heard).pow(2).mean() / heard.pow(2).mean()).sqrt(),
        }

    def _probe_loss(self, levels: dict[int, torch.Tensor], codes: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean absolute error of the pitch's phases, and of the waveform as far as the level's rate can carry it."""
        total = torch.zeros((), device=target.device)
        for block, (rate, harmonics) in PROBES.items():
            found = self.network["probes"][str(block)](levels[block])
            skip, length = SKIPPED * rate * FRAME // RATE, found.shape[2]
            angle = self.tables[rate].to(target.device)[codes].flatten(1)[:, skip:length]
            wanted = torch.stack([turn(h * angle) for h in harmonics for turn in (torch.cos, torch.sin)], 1)
            total = total + (found[:, : 2 * len(harmonics), skip:] - wanted).abs().mean()
            if rate > 400:
                slow = _resample(target, target.shape[1] * rate // RATE)[:, skip:length]
                total = total + (found[:, -1, skip:] - slow).abs().mean() / slow.abs().mean().clamp(min=1e-3)
        return total / 5


def averaged_decoder(folder: Path) -> dict[str, torch.Tensor]:
    """Code2Wav's averaged weights by the decoder's own names. Raises FileNotFoundError before its first training."""
    prefix, weights = "decoder.", trainer.averaged(folder, CodecTask.name)
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def forward(decoder: nn.Module, codes: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Waveform [B, n] of informative codes [B, T, INFORMATIVE], not clipped, and what each decoder block gave.

    The same as the decoder's own forward: the embeddings of all 16 books are averaged, and those of the constant
    books are zero. Clipping is left out because its gradient is zero where it matters.
    """
    offsets = torch.arange(INFORMATIVE, device=codes.device) * ENTRIES_A_BOOK
    hidden = decoder.code_embedding(codes + offsets).sum(2) / GROUPS
    hidden = decoder.pre_transformer(inputs_embeds=hidden).last_hidden_state.permute(0, 2, 1)
    for blocks in decoder.upsample:
        for block in blocks:
            hidden = block(hidden)
    levels = {}
    for index, block in enumerate(decoder.decoder):
        hidden = block(hidden)
        levels[index] = hidden
    return hidden[:, 0], levels


@torch.no_grad()
def _start_from(decoder: nn.Module, codebooks: Codebooks) -> None:
    """The sum of a frame's embeddings starts as its spectrum, its pitch's phases and its noise, turned at random."""
    chance = torch.Generator().manual_seed(6)
    books = decoder.code_embedding.weight.view(GROUPS, ENTRIES_A_BOOK, -1)
    width = books.shape[2]
    directions = torch.linalg.qr(torch.randn(width, width, generator=chance))[0]
    spectrum, phases, noise = directions.split((codebooks.books.shape[2], 64, width - 64 - codebooks.books.shape[2]))
    scale = 4 / codebooks.books[0].std()
    for book, centres in zip(SPECTRUM_BOOKS, codebooks.books, strict=True):
        books[book] = centres @ spectrum * scale
    angle = _phase_tables()[400]
    books[PITCH_BOOK] = 4 * torch.cat([angle.cos(), angle.sin()], 1) @ phases
    patterns = torch.randn(NOISES, len(noise), generator=chance) @ noise
    books[NOISE_BOOK] += 2 * patterns.repeat(ENTRIES_A_BOOK // NOISES, 1)
    books[INFORMATIVE:] = 0


def _phase_tables() -> dict[int, torch.Tensor]:
    """For each rate of a probe: the phase in radians of each pitch code at each point of a frame."""
    codes = np.arange(ENTRIES_A_BOOK)
    return {
        rate: torch.from_numpy(2 * np.pi * pitch.phase(codes, rate * FRAME // RATE)[0]).float()
        for rate, _ in PROBES.values()
    }


def _resample(wave: torch.Tensor, points: int) -> torch.Tensor:
    """Band-limited resampling [B, n] -> [B, points] by cutting the spectrum."""
    spectrum = torch.fft.rfft(wave)[:, : points // 2 + 1]
    return torch.fft.irfft(spectrum, points) * (points / wave.shape[1])


def _spectral_losses(made: torch.Tensor, heard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of magnitudes and of phases, relative to the target, averaged over the resolutions.

    Magnitudes are compared as they are and with an exponent of 0.3, which weighs quiet parts as the ear does. Low
    frequencies count more. Phases count below a few kilohertz only: above, no decoder can know them.
    """
    magnitude = phase = torch.zeros((), device=made.device)
    for size in RESOLUTIONS:
        spectra = [_stft(wave, size) for wave in (made, heard)]
        frequency = torch.linspace(0, RATE / 2, size // 2 + 1, device=made.device)[:, None]
        weight = 1 / (1 + frequency / 3000)
        weight = weight / weight.mean()
        power = [part.real**2 + part.imag**2 + 1e-7 for part in spectra]
        soft = [part**0.15 for part in power]
        scale = (soft[1] * weight).mean()
        magnitude = magnitude + ((soft[0] - soft[1]).abs() * weight).mean() / scale
        plain = [part.sqrt() for part in power]
        magnitude = magnitude + 0.3 * (plain[0] - plain[1]).abs().mean() / plain[1].mean()
        apart = spectra[0] * power[0] ** -0.35 - spectra[1] * power[1] ** -0.35
        low = weight / (1 + (frequency / 1500) ** 2)
        phase = phase + ((apart.real**2 + apart.imag**2 + 1e-9).sqrt() * low).mean() / scale
    return magnitude / len(RESOLUTIONS), phase / len(RESOLUTIONS)


def _stft(wave: torch.Tensor, size: int) -> torch.Tensor:
    window = torch.hann_window(size, device=wave.device)
    return torch.stft(wave, size, size // 4, window=window, return_complex=True) / math.sqrt(size)


Ahead = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Back = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class _Snake:
    """SnakeBeta of one layer: x + sin^2(a x) / b."""

    def __init__(self, layer: nn.Module, ahead: Ahead, back: Back) -> None:
        self.layer, self.ahead, self.back = layer, ahead, back

    def __call__(self, wave: torch.Tensor) -> torch.Tensor:
        a, b = (exponent.exp()[:, None] for exponent in (self.layer.alpha, self.layer.beta))
        return _SnakeFunction.apply(wave, a, b, self.ahead, self.back)


def _snake(wave: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sine = torch.sin(wave * a)
    return wave + sine * sine / (b + 1e-9)


def _snake_gradients(
    gradient: torch.Tensor, wave: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """d/dx = 1 + sin(2 a x) a / b; d/da = x sin(2 a x) / b; d/db = -sin^2(a x) / b^2."""
    angle = wave * a
    double, sine = gradient * torch.sin(2 * angle), torch.sin(angle)
    of_a = (double * wave).sum((0, 2))[:, None] / b
    of_b = -(gradient * sine * sine).sum((0, 2))[:, None] / (b * b)
    return gradient + double * (a / b), of_a, of_b


class _SnakeFunction(torch.autograd.Function):
    """Keeps the input alone for the backward pass; both directions can be compiled."""

    @staticmethod
    def forward(
        context: Any, wave: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ahead: Ahead, back: Back
    ) -> torch.Tensor:
        context.save_for_backward(wave, a, b)
        context.back = back
        return ahead(wave, a, b)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *context.back(gradient, *context.saved_tensors), None, None
