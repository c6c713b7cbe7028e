"""Two ways to decode a stream of codec frames chunk by chunk; both give each sample of the stream once.

A vocoder `open`s a stream, tells how many `frames` it would decode for a chunk, and `decode`s the next chunk [T, 16]
of several streams: [samples_per_frame * T] new samples each on the host, less the tail in the first chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from omni_lab.families.qwen3_omni.vocoder_steps import CapturedPass, EagerPass
from omni_lab.models.qwen3_omni.code2wav import Code2Wav, window

MIN_FILL = 0.75
"""A row joins the pass of a longer one if it fills at least this part of it."""

PASS_FRAMES = {"cpu": 100, "cuda": 4096}
"""Frames of a pass that has more than one row, by device. On a CPU what one layer writes should still be in the cache
when the next one reads it."""


@dataclass(slots=True)
class WindowStream:
    """The last frames [T, 16], which serve as context, and how many frames were decoded."""

    context: Tensor | None = None
    done: int = 0


class WindowVocoder:
    """Decodes each chunk behind up to `left_context` earlier frames, and keeps the samples that are new.

    A decode of n frames lacks its last samples (`Code2Wav.tail`), which the next chunk's context completes.
    """

    def __init__(
        self, network: Code2Wav, device: torch.device, left_context: int, step: EagerPass | CapturedPass | None = None
    ) -> None:
        self.network = network
        self.step = step or EagerPass(network)
        self.device = device
        self.left_context = left_context

    def open(self) -> WindowStream:
        return WindowStream()

    def frames(self, stream: WindowStream, new: int) -> int:
        return min(stream.done, self.left_context) + new

    def decode(self, streams: list[WindowStream], chunks: list[Tensor]) -> list[Tensor]:
        windows = [self._window(stream, chunk) for stream, chunk in zip(streams, chunks, strict=True)]
        waves = [torch.empty(0)] * len(windows)
        lengths = {row: len(frames) for row, (frames, _, _) in enumerate(windows)}
        for rows in passes(lengths, PASS_FRAMES[self.device.type]):
            codes = padded([windows[row][0] for row in rows]).to(self.device)
            starts = torch.tensor([windows[row][1] for row in rows], device=self.device)
            decoded = self.step(codes, starts)[0].cpu()
            for row, wave in zip(rows, decoded, strict=True):
                waves[row] = wave[windows[row][2]]
        return waves

    def _window(self, stream: WindowStream, chunk: Tensor) -> tuple[Tensor, int, slice]:
        """Context and new frames [T, 16] of a chunk, where they begin, and which samples of their decode are new."""
        network = self.network
        cut = window(stream.done, len(chunk), self.left_context, network.samples_per_frame, network.tail)
        frames = chunk if stream.context is None else torch.cat([stream.context, chunk])
        frames = frames[cut.start - cut.stop :]
        stream.context = frames[-self.left_context :]
        stream.done = cut.stop
        return frames, cut.start, cut.samples


@dataclass(slots=True)
class MemoryStream:
    """What the network remembers of a stream [S], nothing before its first chunk, and how many frames were decoded."""

    memory: Tensor | None = None
    done: int = 0


class StatefulVocoder:
    """Decodes new frames only: every layer goes on where it stopped, so the samples are those of a full decode.

    The memory of a stream is a tensor of its own, on the device; it goes when the stream is dropped.
    """

    def __init__(self, network: Code2Wav, device: torch.device, step: EagerPass | CapturedPass | None = None) -> None:
        self.network = network
        self.step = step or EagerPass(network)
        self.device = device

    def open(self) -> MemoryStream:
        return MemoryStream()

    def frames(self, stream: MemoryStream, new: int) -> int:
        return new

    def decode(self, streams: list[MemoryStream], chunks: list[Tensor]) -> list[Tensor]:
        """Streams that begin go apart from those that go on; a chunk longer than a pass goes piece by piece."""
        limit = PASS_FRAMES[self.device.type]
        waves: list[list[Tensor]] = [[] for _ in chunks]
        for turn in zip_longest(*(chunk.split(limit) for chunk in chunks)):
            pieces = {row: piece for row, piece in enumerate(turn) if piece is not None}
            begins = {row: len(piece) for row, piece in pieces.items() if streams[row].memory is None}
            goes_on = {row: len(piece) for row, piece in pieces.items() if row not in begins}
            for rows in chain(passes(begins, limit), passes(goes_on, limit)):
                decoded = self._pass([streams[row] for row in rows], [pieces[row] for row in rows])
                for row, wave in zip(rows, decoded, strict=True):
                    waves[row].append(wave)
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in waves]

    def _pass(self, streams: list[MemoryStream], pieces: list[Tensor]) -> list[Tensor]:
        lengths = [len(piece) for piece in pieces]
        starts = torch.tensor([stream.done for stream in streams], device=self.device)
        memories = [stream.memory for stream in streams if stream.memory is not None]
        samples, memory = self.step(
            padded(pieces).to(self.device),
            starts,
            torch.stack(memories) if memories else None,
            torch.tensor(lengths, device=self.device) if min(lengths) < max(lengths) else None,
        )
        for stream, row, length in zip(streams, memory, lengths, strict=True):
            stream.memory = row.clone()  # a view would hold the rows of its neighbours
            stream.done += length
        missing = [self.network.samples_per_frame * (max(lengths) - length) for length in lengths]
        return [wave[: len(wave) - cut] for wave, cut in zip(samples.cpu(), missing, strict=True)]


Stream = WindowStream | MemoryStream


def passes(lengths: dict[int, int], limit: int) -> Iterator[list[int]]:
    """Rows (row: frames) that are decoded together: of nearly the same length, and one or at most `limit` frames.

    What padding makes behind a row's end is cut off later, and should not cost much before.
    """
    order = sorted(lengths, key=lambda row: -lengths[row])
    while order:
        longest = lengths[order[0]]
        rows = [row for row in order[: max(1, limit // longest)] if lengths[row] >= MIN_FILL * longest]
        order = order[len(rows) :]
        yield rows


def padded(pieces: list[Tensor]) -> Tensor:
    """Frames [T, 16] of several streams as codes [B, 16, longest T], with zeros behind the shorter ones."""
    return pad_sequence(pieces, batch_first=True).transpose(1, 2)
