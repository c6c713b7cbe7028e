"""The captured vocoder: the samples and the memory of the eager one, in passes of every shape, and really replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_lab.engine import cuda_graph
from omni_lab.engine.compiled import CompiledPass, GraphRefused, compile_graph
from omni_lab.engine.cuda_graph import BUCKETS, CudaPasses, Recording, buckets
from omni_lab.engine.traced import TracedPass
from omni_lab.families.qwen3_omni.vocoder_steps import BEGIN, GO_ON, CapturedPass, EagerPass, traced_pass
from omni_lab.families.qwen3_omni.vocoders import StatefulVocoder, WindowVocoder
from tests.oracle import OracleCase, load_oracle
from tests.pipelines import answers, experiment
from tests.test_code2wav import FRAME, TAIL, distance, load_ours
from tests.test_graphs import Scale
from tests.test_oracle import WHOLE_FIELD, check
from tests.test_vocoders import run

CAPTURED = "optimizations.graphs={thinker: false, talker: false, code2wav: true}"
TOLERANCE = 1e-5
CPU = torch.device("cpu")
ROWS, FRAMES = 6, 64


@dataclasses.dataclass(frozen=True)
class Rerun:
    """Stands for a CUDA graph on a CPU: computes from the same buffers into the same outputs."""

    function: Callable[[], tuple[torch.Tensor, ...]]
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        for buffer, output in zip(self.outputs, self.function(), strict=True):
            buffer.copy_(output)


@pytest.fixture(scope="module")
def bucketed_graphs(nano: Path) -> dict[str, CudaPasses]:
    """The passes as on CUDA, with buckets and buffers, but for the recording itself."""

    def record(function: Callable, batch: tuple[torch.Tensor, ...], pool: Any, shape: str) -> Recording:
        outputs = function()
        return Recording(Rerun(function, outputs), batch, outputs)

    network = load_ours(nano)
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(cuda_graph, "record", record)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        traced = [dataclasses.replace(traced_pass(network, ROWS, name), frames=FRAMES) for name in (BEGIN, GO_ON)]
        return {one.name: CudaPasses(one) for one in traced}


@pytest.fixture
def bucketed(bucketed_graphs: dict[str, CudaPasses]) -> Iterator[CapturedPass]:
    with torch.inference_mode():
        yield CapturedPass(bucketed_graphs, EagerPass(bucketed_graphs[BEGIN].traced.network))


def test_buckets_hold_every_shape_with_little_padding_and_are_bounded() -> None:
    shapes = buckets(6, 128)
    assert shapes[0] == (1, 4) and (6, 128) in shapes and len(shapes) == len(set(shapes)) == 4 * 6
    assert len(buckets(64, 128)) == BUCKETS and (64, 128) not in buckets(64, 128)
    assert buckets(1, 2) == [(1, 2)]


@pytest.mark.parametrize(("rows", "frames"), [(1, 4), (1, 29), (3, 25), (5, 33)])
def test_a_bucket_gives_the_samples_and_the_memory_of_the_pass_as_it_is(
    bucketed: CapturedPass, rows: int, frames: int
) -> None:
    network = bucketed.eager.network
    assert bucketed.graphs[BEGIN].shape(rows, frames) != (rows, frames) or frames == 4
    codes = torch.randint(0, 256, (rows, 16, 2 * frames), generator=torch.Generator().manual_seed(frames))
    first, then = codes[..., :frames], codes[..., frames:]
    starts = torch.zeros(rows, dtype=torch.int64)
    lengths = frames - torch.arange(rows) % 3
    wave, memory = (tensor.clone() for tensor in bucketed(first, starts, None, lengths))
    eager_wave, eager_memory = network.stream(first, starts, None, lengths)
    assert wave.shape == (rows, FRAME * frames - TAIL)
    for row, length in enumerate(lengths):
        end = FRAME * int(length) - TAIL
        assert distance(wave[row, :end], eager_wave[row, :end]) < TOLERANCE
    assert distance(memory, eager_memory) < TOLERANCE * eager_memory.abs().max()
    wave, again = bucketed(then, lengths, memory)
    eager_wave, eager_again = network.stream(then, lengths, eager_memory)
    assert distance(wave, eager_wave) < TOLERANCE
    assert distance(again, eager_again) < TOLERANCE * eager_again.abs().max()
    assert bucketed.counters == {"eager_steps": 0, "graph_replays": 2}


@pytest.mark.parametrize("vocoder", ["context", "stateful"])
def test_streams_through_buckets_equal_the_full_decode(bucketed: CapturedPass, vocoder: str) -> None:
    """Buffers of a bucket serve one pass after the other: nothing of a stream may stay in them."""
    network = bucketed.eager.network

    def step(*batch: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        samples, memory = bucketed(*batch)
        return samples.clone(), memory  # on CUDA the samples are copied to the host before the next pass

    build = {
        "context": lambda: WindowVocoder(network, CPU, 160, step),
        "stateful": lambda: StatefulVocoder(network, CPU, step),
    }
    codes = torch.randint(0, 256, (6, 60, 16), generator=torch.Generator().manual_seed(2))
    chunkings = [[4, 25, 25], [1, 2, 3, 5], [60], [25, 25, 9], [7, 7, 7], [4, 25, 3]]
    waves = run(build[vocoder](), list(zip(codes, chunkings, strict=True)))
    for frames, sizes, wave in zip(codes, chunkings, waves, strict=True):
        assert distance(wave, network.decode(frames[: sum(sizes)].T[None])[0]) < TOLERANCE, sizes
    assert bucketed.counters["eager_steps"] == 0 and bucketed.counters["graph_replays"] > 6


def test_a_shape_outside_the_buckets_runs_eager_and_is_counted(bucketed: CapturedPass) -> None:
    starts = torch.zeros(ROWS + 1, dtype=torch.int64)
    for rows, frames in ((1, FRAMES + 1), (ROWS + 1, 4)):
        codes = torch.randint(0, 256, (rows, 16, frames))
        wave, _ = bucketed(codes, starts[:rows])
        assert torch.equal(wave, bucketed.eager.network.decode(codes))
    assert bucketed.counters == {"eager_steps": 2, "graph_replays": 0}


def scale_pass(rows: int) -> TracedPass:
    def function(network: Scale, x: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * network.weight[:, None]).sum(1), starts + x.shape[2]

    def example(count: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(count, 16, frames), torch.arange(count)

    return TracedPass("scale", Scale(torch.full((16,), 3.0)), function, example, rows, 64)


def test_one_graph_takes_all_rows_and_frames_and_one_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    traced = scale_pass(6)
    compile_graph(traced, 1, tmp_path)
    graph = CompiledPass(traced, tmp_path)
    traced.network.weight.fill_(2.0)
    for rows, frames in ((1, 1), (1, 64), (2, 5), (6, 25)):
        assert graph.shape(rows, frames) == (rows, frames)
        x = torch.rand(rows, frames, 16).mT  # as codes come: not contiguous
        total, ends = graph.run(x, torch.arange(rows))
        assert torch.allclose(total, 2 * x.sum(1)) and torch.equal(ends, torch.arange(rows) + frames)
    assert graph.shape(7, 1) is None and graph.shape(1, 65) is None
    wrong = dataclasses.replace(traced, function=lambda network, x, *rest: traced.function(network, x * 1.01, *rest))
    with pytest.raises(GraphRefused, match=r"at \d rows of \d+ frames output 0 of the captured step is .* off"):
        CompiledPass(wrong, tmp_path)


@pytest.fixture(scope="module")
def cases() -> list[OracleCase]:
    return load_oracle()[::4]


@pytest.mark.parametrize("stateful", [True, False], ids=["stateful", "context"])
def test_a_captured_vocoder_answers_as_transformers_does(nano: Path, cases: list[OracleCase], stateful: bool) -> None:
    effective = {}
    toggle = f"optimizations.stateful_code2wav={str(stateful).lower()}"
    setup = experiment(nano, CAPTURED, toggle, "executor=inline", "connector=in_process", *WHOLE_FIELD)
    results, measured = answers(setup, [case.request for case in cases], (1, 7), effective)
    for concurrency, result in zip((1, 7), results, strict=True):
        for case, answer in zip(cases, result, strict=True):
            check(case, answer, f"captured vocoder, concurrency {concurrency}")
    assert effective["optimizations"]["graphs"]["code2wav"] and not effective["notes"]
    counters = measured.counters["code2wav_r0"]
    assert counters["eager_steps"] == 0 and counters["graph_replays"] > len(cases), counters
