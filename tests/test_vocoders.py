"""Streams that are decoded chunk by chunk: the stateful vocoder gives the samples of a full decode.

Streams of all chunkings and lengths run mixed, in batches that change from step to step, as requests do.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch

from omni_lab.core import Payload, Sampling
from omni_lab.engine.clock import StepClock
from omni_lab.engine.stage import Sequence
from omni_lab.families.plan import StagePlan
from omni_lab.families.qwen3_omni import build_stage
from omni_lab.families.qwen3_omni.code2wav import Code2WavStage
from omni_lab.families.qwen3_omni.vocoders import StatefulVocoder, WindowVocoder, passes
from omni_lab.models.qwen3_omni.code2wav import Code2Wav
from tests.test_code2wav import FRAME, TAIL, chunk_sizes, distance, load_ours

TOLERANCE = 1e-5
VOICES, LONGEST = 5, 105
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["voice", "nano"])
def network(request: pytest.FixtureRequest) -> Code2Wav:
    return load_ours(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def voices(network: Code2Wav) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Frames [T, 16] and their full decode; every stream of a test follows one of these from its beginning."""
    generator = torch.Generator().manual_seed(8)
    frames = torch.randint(0, network.config.codebook_size, (VOICES, LONGEST, 16), generator=generator)
    return [(codes, network.decode(codes.T[None])[0]) for codes in frames]


def run(vocoder: StatefulVocoder | WindowVocoder, streams: list[tuple[torch.Tensor, list[int]]]) -> list[torch.Tensor]:
    """The waveform of each stream (frames, chunk sizes); at every step a random part of them has a chunk ready."""
    draw = random.Random(5)
    states = [vocoder.open() for _ in streams]
    waiting = [list(frames[: sum(sizes)].split(sizes)) for frames, sizes in streams]
    waves: list[list[torch.Tensor]] = [[] for _ in streams]
    while ready := [row for row, chunks in enumerate(waiting) if chunks]:
        rows = draw.sample(ready, draw.randint(1, min(7, len(ready))))
        decoded = vocoder.decode([states[row] for row in rows], [waiting[row].pop(0) for row in rows])
        for row, wave in zip(rows, decoded, strict=True):
            waves[row].append(wave)
    return [torch.cat(parts) for parts in waves]


def test_streams_of_any_chunking_and_length_equal_the_full_decode(
    network: Code2Wav, voices: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    firsts = cycle(range(1, 10))
    chunkings = [
        chunk_sizes(frames, next(firsts), steady)
        for steady in range(1, 31)
        for frames in {1, steady - 1, steady, steady + 1, 3 * steady} - {0}
    ]
    chunkings += [[4, 8, 16, 25, 25], [1, 2, 5, 9, 1], [70, 30], [LONGEST]]  # ramps, and a chunk of more than a pass
    voice = [voices[index % VOICES] for index in range(len(chunkings))]
    streams = [(codes, sizes) for (codes, _), sizes in zip(voice, chunkings, strict=True)]
    waves = run(StatefulVocoder(network, CPU), streams)
    for (_, full), sizes, wave in zip(voice, chunkings, waves, strict=True):
        assert wave.shape == (FRAME * sum(sizes) - TAIL,), sizes
        assert distance(wave, full[: len(wave)]) < TOLERANCE, sizes


def test_a_long_stream_stays_exact(network: Code2Wav) -> None:
    codes = torch.randint(0, network.config.codebook_size, (660, 16), generator=torch.Generator().manual_seed(9))
    full = network.decode(codes.T[None])[0]
    for sizes in (chunk_sizes(660, 4, 25), [660]):
        (wave,) = run(StatefulVocoder(network, CPU), [(codes, sizes)])
        assert distance(wave, full) < TOLERANCE


def test_a_chunk_brings_its_samples_at_once(network: Code2Wav, voices: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The first chunk lacks the tail, every later one brings samples for all its frames; both vocoders alike."""
    frames, _ = voices[0]
    for vocoder in (StatefulVocoder(network, CPU), WindowVocoder(network, CPU, 25)):
        state = vocoder.open()
        counts = [len(vocoder.decode([state], [chunk])[0]) for chunk in frames[:37].split([4, 25, 1, 7])]
        assert counts == [4 * FRAME - TAIL, 25 * FRAME, FRAME, 7 * FRAME]


def test_neighbours_and_padding_change_rounding_at_most(network: Code2Wav) -> None:
    """Some processors' matrix products add the last rows of an odd number in another order."""
    lengths = [20, 20, 17, 15]
    codes = torch.randint(0, 256, (4, 16, 40), generator=torch.Generator().manual_seed(10))
    starts = torch.full((4,), 20)
    _, memory = network.stream(codes[..., :20], starts - 20, None)
    before = memory.clone()
    waves, after = network.stream(codes[..., 20:], starts, memory, torch.tensor(lengths))
    assert torch.equal(memory, before)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        alone = network.stream(codes[own, :, 20 : 20 + length], starts[own], memory[own])
        assert distance(waves[own, : FRAME * length], alone[0]) < 1e-6
        assert distance(after[own], alone[1]) < 1e-6 * after.abs().max()


def test_first_chunks_shorter_than_others_of_their_pass(network: Code2Wav) -> None:
    """What a padded row remembers of its first frames, fewer than a window, is what it remembers alone."""
    codes = torch.randint(0, 256, (3, 16, 12), generator=torch.Generator().manual_seed(11))
    lengths, zeros = [12, 9, 1], torch.zeros(3, dtype=torch.int64)
    _, memory = network.stream(codes[..., :12], zeros, None, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        full = network.decode(codes[row : row + 1])[0]
        new = codes[row : row + 1, :, length - 1 : length + 6]  # any frames that follow
        wave, _ = network.stream(new, torch.tensor([length]), memory[row : row + 1])
        whole = network.decode(torch.cat((codes[row : row + 1, :, :length], new), 2))[0]
        assert distance(wave[0], whole[FRAME * length - TAIL :]) < TOLERANCE
        assert distance(full[: FRAME * length - TAIL], whole[: FRAME * length - TAIL]) < TOLERANCE


def test_passes_hold_every_row_once_and_nearly_full() -> None:
    lengths = dict(enumerate([25, 4, 25, 24, 1, 19, 18, 100, 4, 25]))
    groups = list(passes(lengths, 64))
    assert sorted(row for rows in groups for row in rows) == list(lengths)
    for rows in groups:
        longest = max(lengths[row] for row in rows)
        assert len(rows) == 1 or len(rows) * longest <= 64
        assert all(lengths[row] >= 0.75 * longest for row in rows)


def stage(directory: Path, vocoder: str) -> Code2WavStage:
    plan = StagePlan(
        str(directory), "code2wav", 0, "generation", "cpu", "float32", 8, 1, 128, 1, "chunked", {}, 25, "sync", 1,
        vocoder=vocoder,
    )  # fmt: skip
    return build_stage(plan, StepClock(10)).stage


def chunk(frames: torch.Tensor | None, final: bool = False) -> Payload:
    tensors = {} if frames is None else {"codes": frames}
    return Payload("r", "talker", "code2wav", final=final, tensors=tensors, finish_reason="stop" if final else None)


@pytest.mark.parametrize("vocoder", ["context", "stateful"])
def test_empty_chunks_end_a_stream_with_what_it_has(nano: Path, vocoder: str) -> None:
    code2wav = stage(nano, vocoder)
    speaks, silent = (Sequence(name, Sampling(), {"return_codes": True}, ("client",), {}) for name in "ab")
    for sequence in (speaks, silent):
        code2wav.open(sequence)
    frames = torch.randint(0, 256, (6, 16))
    code2wav.receive(speaks, chunk(frames))
    code2wav.receive(speaks, chunk(None, final=True))
    code2wav.receive(silent, chunk(None, final=True))
    (first, nothing), tokens = code2wav.step("vocode", [speaks, silent])
    assert tokens == 6 and torch.equal(first.tensors["codes"], frames) and not first.final
    assert len(first.tensors["audio"]) == 6 * FRAME - TAIL
    (last,), tokens = code2wav.step("vocode", [speaks])
    for emission in (nothing, last):
        assert emission.final and emission.reason == "stop" and emission.sequence.finished
        assert emission.tensors["codes"].shape == (0, 16) and len(emission.tensors["audio"]) == 0
        assert emission.tensors["frames"] == 0
    assert tokens == 0 and code2wav.next_step(speaks) is None


def test_closing_a_stream_lets_go_of_its_memory_alone(nano: Path) -> None:
    """A stream's memory shares no storage with the streams that were decoded beside it."""
    code2wav = stage(nano, "stateful")
    ends, stays = (Sequence(name, Sampling(), {}, ("client",), {}) for name in "ab")
    for sequence in (ends, stays):
        code2wav.open(sequence)
        code2wav.receive(sequence, chunk(torch.randint(0, 256, (5, 16))))
    code2wav.step("vocode", [ends, stays])
    memories = [sequence.state.stream.memory for sequence in (ends, stays)]
    assert all(memory.untyped_storage().nbytes() == memory.nbytes for memory in memories)
    left = [weakref.ref(memory) for memory in memories]
    del memories
    code2wav.close(ends)
    assert left[0]() is None and left[1]() is not None
