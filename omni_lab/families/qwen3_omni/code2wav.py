"""Code2Wav as a stage: codec frames in, 24 kHz audio out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from omni_lab.core import CLIENT, Payload
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.models.qwen3_omni.code2wav import Code2Wav, window

MIN_FILL = 0.75
"""A window joins the pass of a longer one if it fills at least this part of it."""


@dataclass(slots=True)
class Code2WavState:
    """Chunks that wait, the frames before them that serve as context, and how many frames were decoded."""

    chunks: deque[Payload] = field(default_factory=deque)
    context: torch.Tensor | None = None
    done: int = 0


class Code2WavStage:
    """Decodes the waiting chunk of every request in one pass, each with up to `left_context` earlier frames.

    A decode of n frames lacks its last samples (`Code2Wav.tail`), which the next chunk's context completes: the
    stream has exactly the samples of one decode of all frames, whatever the chunks. Windows of different
    lengths are padded on the right, where padding cannot reach the samples that are kept.
    """

    name = "code2wav"

    def __init__(self, network: Code2Wav, left_context: int, device: torch.device) -> None:
        self.network = network
        self.left_context = left_context
        self.device = device

    def open(self, sequence: Sequence) -> None:
        sequence.state = Code2WavState()

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        sequence.state.chunks.append(payload)

    def next_step(self, sequence: Sequence) -> str | None:
        return "vocode" if sequence.state.chunks else None

    def step_tokens(self, sequence: Sequence) -> int:
        state = sequence.state
        return min(state.done, self.left_context) + len(state.chunks[0].tensors.get("codes", ()))

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        chunks = [sequence.state.chunks.popleft() for sequence in batch]
        decoding = [(s, c) for s, c in zip(batch, chunks, strict=True) if "codes" in c.tensors]
        samples = dict.fromkeys((sequence.request_id for sequence in batch), torch.zeros(0))
        if decoding:
            windows = [self._window(sequence, chunk.tensors["codes"]) for sequence, chunk in decoding]
            waves = self._decode(windows)
            for (sequence, _), (_, _, new), wave in zip(decoding, windows, waves, strict=True):
                samples[sequence.request_id] = wave[new]
        emissions = []
        for sequence, chunk in zip(batch, chunks, strict=True):
            sequence.finished = chunk.final
            codes = chunk.tensors.get("codes", torch.zeros(0, self.network.config.quantizers, dtype=torch.int64))
            tensors = {"audio": samples[sequence.request_id], "frames": torch.tensor(len(codes))}
            if sequence.options.get("return_codes"):
                tensors["codes"] = codes
            emissions.append(Emission(sequence, CLIENT, tensors, chunk.final, chunk.finish_reason))
        return emissions, sum(len(chunk.tensors["codes"]) for _, chunk in decoding)

    def close(self, sequence: Sequence) -> None:
        sequence.state = None

    def _window(self, sequence: Sequence, codes: torch.Tensor) -> tuple[torch.Tensor, int, slice]:
        """Context and new frames [T, 16] of a chunk, where they begin, and which samples of their decode are new."""
        state, network = sequence.state, self.network
        cut = window(state.done, len(codes), self.left_context, network.samples_per_frame, network.tail)
        frames = codes if state.context is None else torch.cat([state.context, codes])
        frames = frames[cut.start - cut.stop :]
        state.context = frames[-self.left_context :]
        state.done = cut.stop
        return frames, cut.start, cut.samples

    def _decode(self, windows: list[tuple[torch.Tensor, int, slice]]) -> list[torch.Tensor]:
        """Waveforms on the host, one for each window [T, 16] that starts at a frame of its stream.

        Windows go together with others of nearly their length: what padding makes behind a window's end is cut off
        later, and should not cost much before.
        """
        waves: list[torch.Tensor] = [torch.empty(0)] * len(windows)
        order = sorted(range(len(windows)), key=lambda index: -len(windows[index][0]))
        while order:
            longest = len(windows[order[0]][0])
            group = [index for index in order if len(windows[index][0]) >= MIN_FILL * longest]
            order = order[len(group) :]
            padded = torch.zeros(len(group), longest, self.network.config.quantizers, dtype=torch.int64)
            for row, index in zip(padded, group, strict=True):
                row[: len(windows[index][0])] = windows[index][0]
            starts = torch.tensor([windows[index][1] for index in group], device=self.device)
            decoded = self.network.decode(padded.transpose(1, 2).to(self.device), starts).cpu()
            for index, wave in zip(group, decoded, strict=True):
                waves[index] = wave
        return waves
