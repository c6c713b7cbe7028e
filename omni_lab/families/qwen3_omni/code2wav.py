"""Code2Wav as a stage: codec frames in, 24 kHz audio out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from omni_lab.core import CLIENT, Payload
from omni_lab.engine.clock import FORWARD, PAYLOAD, PREPARE, StepClock
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.families.qwen3_omni.vocoders import StatefulVocoder, Stream, WindowVocoder


@dataclass(slots=True)
class Code2WavState:
    """The vocoder's stream, and chunks that wait for it."""

    stream: Stream
    chunks: deque[Payload] = field(default_factory=deque)


class Code2WavStage:
    """Decodes the waiting chunk of every request in one step.

    The stream of a request has exactly the samples of one decode of all its frames, whatever the chunks: the
    vocoder's own way, of the two in `vocoders`, of joining them.
    """

    name = "code2wav"

    def __init__(self, vocoder: WindowVocoder | StatefulVocoder, clock: StepClock) -> None:
        self.vocoder = vocoder
        self.clock = clock
        self.no_codes = torch.zeros(0, vocoder.network.config.quantizers, dtype=torch.int64)
        self.counters = vocoder.step.counters

    def open(self, sequence: Sequence) -> None:
        sequence.state = Code2WavState(self.vocoder.open())

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        sequence.state.chunks.append(payload)

    def next_step(self, sequence: Sequence) -> str | None:
        return "vocode" if sequence.state.chunks else None

    def step_tokens(self, sequence: Sequence) -> int:
        state = sequence.state
        return self.vocoder.frames(state.stream, len(state.chunks[0].tensors.get("codes", ())))

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        self.clock.enter(PREPARE)
        chunks = [sequence.state.chunks.popleft() for sequence in batch]
        codes = [chunk.tensors.get("codes", self.no_codes) for chunk in chunks]
        rows = [row for row, frames in enumerate(codes) if len(frames)]
        waves = [torch.zeros(0)] * len(batch)
        self.clock.enter(FORWARD)
        decoded = self.vocoder.decode([batch[row].state.stream for row in rows], [codes[row] for row in rows])
        self.clock.enter(PAYLOAD)
        for row, wave in zip(rows, decoded, strict=True):
            waves[row] = wave
        emissions = []
        for sequence, chunk, frames, wave in zip(batch, chunks, codes, waves, strict=True):
            sequence.finished = chunk.final
            tensors = {"audio": wave, "frames": torch.tensor(len(frames))}
            if sequence.options.get("return_codes"):
                tensors["codes"] = frames
            emissions.append(Emission(sequence, CLIENT, tensors, chunk.final, chunk.finish_reason))
        return emissions, sum(map(len, codes))

    def close(self, sequence: Sequence) -> None:
        sequence.state = None
