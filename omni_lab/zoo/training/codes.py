"""Codebooks: features of a frame to eight codes and back, by principal components and residual k-means.

Of the 16 codes of a frame the first is a coarse spectrum, the second the pitch, six more refine the spectrum, and
the other eight are constant: the code predictor has seven to learn instead of fifteen.
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
INFORMATIVE = 8
PITCH_BOOK = 1
NOISE_BOOK = 5
"""A fine code, which differs from frame to frame, chooses the noise pattern too."""
SPECTRUM_BOOKS = [book for book in range(INFORMATIVE) if book != PITCH_BOOK]
COMPONENTS = 64
ITERATIONS = 20
JOINT_ITERATIONS = 5
BEAM = 8
"""Partial encodings that are kept from book to book: the nearest centre in each book by itself is 5 % worse."""

assert ENTRIES <= ENTRIES_A_BOOK


@dataclass(frozen=True)
class Codebooks:
    mean: torch.Tensor
    """Of the features, [F]."""
    components: torch.Tensor
    """Principal components, [F, COMPONENTS]."""
    books: torch.Tensor
    """Centres of the spectrum books, [len(SPECTRUM_BOOKS), ENTRIES_A_BOOK, COMPONENTS]."""

    def encode(self, features: np.ndarray, pitch: np.ndarray) -> np.ndarray:
        """Features [T, F] and pitch codes [T] to informative codes [T, INFORMATIVE], uint8."""
        codes = np.zeros((len(features), INFORMATIVE), np.uint8)
        codes[:, PITCH_BOOK] = pitch
        codes[:, SPECTRUM_BOOKS] = _encode(self._project(features), self.books)[0].numpy()
        return codes

    def error(self, features: np.ndarray) -> list[float]:
        """Root mean square error of the log amplitudes in nats, with one book, two books, and so on."""
        points, lost = self._project(features), []
        outside = float(((torch.from_numpy(features) - self.mean) ** 2).sum(1).mean() - (points**2).sum(1).mean())
        for count in range(1, len(self.books) + 1):
            rest = _encode(points, self.books[:count])[1]
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
    """Which noise a frame has, [T]."""
    return codes[:, NOISE_BOOK] % NOISES


def fit(features: np.ndarray) -> Codebooks:
    """Fit on features [N, F], N at least ENTRIES_A_BOOK."""
    data = torch.from_numpy(features.astype(np.float32))
    mean = data.mean(0)
    centred = data - mean
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    components = vectors.flip(1)[:, :COMPONENTS].contiguous()
    points = centred @ components
    rest, found = points, []
    for seed in range(len(SPECTRUM_BOOKS)):
        centres = _k_means(rest, seed)
        rest = rest - centres[_nearest(rest, centres)]
        found.append(centres)
    books = torch.stack(found)
    for _ in range(JOINT_ITERATIONS):
        _fit_together(points, books)
    return Codebooks(mean, components, books)


def _fit_together(points: torch.Tensor, books: torch.Tensor) -> None:
    """Move the centres of each book to what the other books leave over, with codes as they are chosen in use."""
    codes, rest = _encode(points, books)
    for book, centres in enumerate(books):
        chosen = codes[:, book]
        count = torch.bincount(chosen, minlength=ENTRIES_A_BOOK).float()[:, None]
        shift = torch.zeros_like(centres).index_add_(0, chosen, rest) / count.clamp(min=1)
        centres += shift
        rest = rest - shift[chosen]


def _encode(points: torch.Tensor, books: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, books] of points [N, D] by beam search, and what they leave over [N, D]."""
    parts = [_encode_part(part, books) for part in points.split(2048)]
    codes, rest = (torch.cat(column) for column in zip(*parts, strict=True))
    return codes, rest


def _encode_part(points: torch.Tensor, books: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rest = points[:, None]  # [N, beams, D]
    codes = torch.zeros(len(points), 1, 0, dtype=torch.int64)
    for centres in books:
        distance = (rest**2).sum(-1, keepdim=True) - 2 * rest @ centres.T + (centres**2).sum(1)
        best = distance.flatten(1).topk(BEAM, largest=False).indices
        beam, code = best // ENTRIES_A_BOOK, best % ENTRIES_A_BOOK
        rest = rest.take_along_dim(beam[..., None], 1) - centres[code]
        codes = torch.cat([codes.take_along_dim(beam[..., None], 1), code[..., None]], 2)
    return codes[:, 0], rest[:, 0]


def _k_means(data: torch.Tensor, seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    centres = data[torch.randperm(len(data), generator=chance)[:ENTRIES_A_BOOK]].clone()
    for _ in range(ITERATIONS):
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
