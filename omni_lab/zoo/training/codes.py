"""Codebooks: features of a frame to six codes and back, by principal components and residual k-means.

Of the 16 codes of a frame the first is a coarse spectrum, the second the pitch, four more refine the spectrum, and
the other ten are constant: the code predictor has five to learn instead of fifteen.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from omni_lab.zoo.training.pitch import ENTRIES
from omni_lab.zoo.training.teacher import NOISES

GROUPS = 16
ENTRIES_A_BOOK = 256
INFORMATIVE = 6
PITCH_BOOK = 1
SPECTRUM_BOOKS = [book for book in range(INFORMATIVE) if book != PITCH_BOOK]
COMPONENTS = 64
ROUNDS = 20

assert ENTRIES <= ENTRIES_A_BOOK


@dataclass(frozen=True)
class Codebooks:
    mean: torch.Tensor
    """Of the features, [F]."""
    components: torch.Tensor
    """Principal components, [F, COMPONENTS]."""
    books: torch.Tensor
    """Centres of the residual k-means, [5, ENTRIES_A_BOOK, COMPONENTS]."""

    def encode(self, features: np.ndarray, pitch: np.ndarray) -> np.ndarray:
        """Features [T, F] and pitch codes [T] to informative codes [T, INFORMATIVE], uint8."""
        rest = self._project(features)
        codes = np.zeros((len(rest), INFORMATIVE), np.uint8)
        codes[:, PITCH_BOOK] = pitch
        for book, centres in zip(SPECTRUM_BOOKS, self.books, strict=True):
            nearest = _nearest(rest, centres)
            codes[:, book] = nearest.numpy()
            rest = rest - centres[nearest]
        return codes

    def error(self, features: np.ndarray) -> list[float]:
        """Root mean square error of the log amplitudes in nats, with one book, two books, and so on."""
        rest, lost = self._project(features), []
        outside = float(((torch.from_numpy(features) - self.mean) ** 2).sum(1).mean() - (rest**2).sum(1).mean())
        for centres in self.books:
            rest = rest - centres[_nearest(rest, centres)]
            lost.append(((float((rest**2).sum(1).mean()) + outside) / features.shape[1]) ** 0.5)
        return lost

    def _project(self, features: np.ndarray) -> torch.Tensor:
        return (torch.from_numpy(features.astype(np.float32)) - self.mean) @ self.components

    def save(self, file: Path) -> None:
        scratch = file.with_suffix(".tmp")
        torch.save({"mean": self.mean, "components": self.components, "books": self.books}, scratch)
        os.replace(scratch, file)

    @classmethod
    def load(cls, file: Path) -> Codebooks:
        return cls(**torch.load(file))


def noise_pattern(codes: np.ndarray) -> np.ndarray:
    """Which noise a frame has, [T]: the finest spectrum code, which differs from frame to frame, chooses it."""
    return codes[:, INFORMATIVE - 1] % NOISES


def fit(features: np.ndarray) -> Codebooks:
    """Fit on features [N, F], N at least ENTRIES_A_BOOK."""
    data = torch.from_numpy(features.astype(np.float32))
    mean = data.mean(0)
    centred = data - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    components = vectors.flip(1)[:, :COMPONENTS].contiguous()
    rest, books = centred @ components, []
    for seed in range(len(SPECTRUM_BOOKS)):
        centres = _k_means(rest, seed)
        rest = rest - centres[_nearest(rest, centres)]
        books.append(centres)
    return Codebooks(mean, components, torch.stack(books))


def _k_means(data: torch.Tensor, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    centres = data[torch.randperm(len(data), generator=chance)[:ENTRIES_A_BOOK]].clone()
    for _ in range(ROUNDS):
        nearest = _nearest(data, centres)
        count = torch.bincount(nearest, minlength=ENTRIES_A_BOOK).float()[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, data)
        centres = torch.where(count > 0, sums / count.clamp(min=1), centres)
        empty = (count[:, 0] < 2).nonzero().flatten()
        centres[empty] = data[torch.randint(len(data), (len(empty),), generator=chance)]
    return centres


def _nearest(data: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    square = (centres**2).sum(1)
    return torch.cat([(square - 2 * part @ centres.T).argmin(1) for part in data.split(8192)])
