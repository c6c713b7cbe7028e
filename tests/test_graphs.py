"""Captured steps: the same answers as eager ones, really replayed, and refused when they would not be the same."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_lab.assemble import plan_stage
from omni_lab.core import Sampling
from omni_lab.engine.compiled import CompiledGraphs, GraphRefused, compile_graph, graph_file, sizes
from omni_lab.engine.traced import TracedStep, tensors_of
from omni_lab.families.qwen3_omni import STAGED
from omni_lab.pipeline.graphs import compile_graphs
from tests.oracle import OracleCase, load_oracle
from tests.pipelines import answers, experiment
from tests.test_oracle import check

INLINE = ("executor=inline", "connector=in_process")
CAPTURED = "optimizations.graphs={thinker: true, talker: true}"
SAMPLED = {
    "thinker": Sampling(temperature=1.0, seed=1, max_tokens=24),
    "talker": Sampling(0.9, 50, seed=7, max_tokens=24),
}


@dataclasses.dataclass
class Scale:
    """A network of one weight."""

    weight: torch.Tensor


def scale_step(rows: int) -> TracedStep:
    """Each row times the weight, which stays in the row's memory."""

    def function(
        network: Scale, x: torch.Tensor, window: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        memory[: x.shape[0]] = x * network.weight
        return memory[: x.shape[0]] * 1, (x * window.shape[0]).sum(1).long()

    network = Scale(torch.full((16,), 3.0))
    return TracedStep(
        "scale", network, function, lambda count: (torch.ones(count, 16),), [torch.zeros(rows + 1, 16)], rows, 64, 32
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs")
    for size in sizes(6):
        compile_graph(scale_step(6), size, path)
    return path


def test_a_graph_reads_weights_and_writes_memory_where_they_are(folder: Path) -> None:
    step = scale_step(6)
    graphs = CompiledGraphs(step, folder)
    step.network.weight.fill_(2.0)
    for count in (1, 4, 5, 6):
        x = torch.rand(count, 16)
        before = step.memory[0].clone()
        total, whole = graphs.run(33, x)
        assert torch.equal(total, 2 * x) and torch.equal(total, step.memory[0][:count])
        assert torch.equal(step.memory[0][count:], before[count:])
        assert torch.equal(whole, (x * 64).sum(1).long())
    assert [graphs.width(count) for count in (1, 2, 3, 4, 5)] == [1, 4, 4, 4, 5]


def test_a_graph_that_computes_something_else_is_refused(folder: Path) -> None:
    step = scale_step(6)
    wrong = dataclasses.replace(step, function=lambda network, x, *rest: step.function(network, x * 1.01, *rest))
    with pytest.raises(GraphRefused, match=r"at batch 1 output 0 of the captured step is .* off"):
        CompiledGraphs(wrong, folder)


def test_a_batch_without_a_graph_is_left_to_the_eager_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copy = shutil.copytree(folder, tmp_path / "copy")  # a library is opened once
    graphs = CompiledGraphs(scale_step(3), copy)
    assert list(tmp_path.iterdir()) == [copy], "an unpacked library was left behind"
    assert sizes(3) == [1] and graphs.width(2) == 2
    assert graphs.run(32, torch.ones(2, 16)) is None and graphs.run(32, torch.ones(1, 16)) is not None


def test_a_damaged_graph_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    package = graph_file(copy, "scale", 1)
    whole = package.read_bytes()
    package.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GraphRefused, match=r"scale-1.pt2 cannot be opened \(.+\); delete it"):
        CompiledGraphs(scale_step(6), copy)
    with zipfile.ZipFile(package, "w") as empty:
        empty.writestr("version", "1")
    with pytest.raises(GraphRefused, match=r"cannot be opened \(there is no library in it\); delete it"):
        CompiledGraphs(scale_step(6), copy)


def test_closed_graphs_keep_no_weight(folder: Path) -> None:
    step = scale_step(6)
    storage = step.network.weight.untyped_storage()
    before = torch._C._storage_Use_Count(storage._cdata)
    graphs = CompiledGraphs(step, folder)
    assert torch._C._storage_Use_Count(storage._cdata) == before
    del graphs
    step.network.weight = torch.zeros(16)
    assert torch._C._storage_Use_Count(storage._cdata) == before - 1


def test_all_weights_of_a_network_have_names() -> None:
    network = {"a": [torch.zeros(1), Scale(torch.zeros(2))], "b": (torch.zeros(3), "text", None)}
    assert {name: len(tensor) for name, tensor in tensors_of(network).items()} == {
        "weight_a_0": 1,
        "weight_a_1_weight": 2,
        "weight_b_0": 3,
    }


@pytest.fixture(scope="module")
def cases() -> list[OracleCase]:
    every = load_oracle()
    return every[::3] + [case for case in every if case.name == "video_between_positions"]


def test_captured_steps_answer_as_transformers_does(nano: Path, cases: list[OracleCase]) -> None:
    concurrencies = (1, 2, 7)
    setup = experiment(nano, CAPTURED, "chunking.left_context=160")
    results, measured = answers(setup, [case.request for case in cases], concurrencies)
    for concurrency, result in zip(concurrencies, results, strict=True):
        for case, answer in zip(cases, result, strict=True):
            check(case, answer, f"captured, concurrency {concurrency}")
    for worker in ("thinker_r0", "talker_r0"):
        counters = measured.counters[worker]
        decodes = sum(f"{step.stage}_r{step.replica}" == worker and step.kind == "decode" for step in measured.steps)
        assert counters["graph_replays"] == decodes > 100 and counters["eager_steps"] == 0, counters
        prefills = sum(f"{step.stage}_r{step.replica}" == worker and step.kind == "prefill" for step in measured.steps)
        assert counters["captured_prefills"] + counters["eager_prefills"] == prefills
        assert counters["captured_prefills"] > 10
        assert (counters["eager_prefills"] > 0) == (worker == "thinker_r0"), "only images and videos run eager"


@pytest.mark.parametrize(
    "others",
    [
        ["optimizations.hot_path.resident_state=false"],
        ["optimizations.hot_path.single_process_executor=false"],
        ["optimizations.async_chunk=false", "optimizations.async_output=false"],
        ["optimizations.stateful_code2wav=true", "optimizations.hot_path.row_payloads=false"],
    ],
    ids=["host state", "two processes", "whole, sync", "stateful, serialized"],
)
def test_captured_steps_go_with_the_other_toggles(nano: Path, cases: list[OracleCase], others: list[str]) -> None:
    setup = experiment(nano, CAPTURED, *INLINE, "chunking.left_context=160", *others)
    (result,), measured = answers(setup, [case.request for case in cases[::2]], (5,))
    for case, answer in zip(cases[::2], result, strict=True):
        check(case, answer, f"captured, {others}")
    assert measured.counters["talker_r0"]["graph_replays"] > 20 and not measured.counters["talker_r0"]["eager_steps"]


def test_a_request_is_the_same_captured_and_eager_alone_and_beside_others(nano: Path, cases: list[OracleCase]) -> None:
    """Greedy and seeded ones: a batch in which all rows are greedy has a graph of its own."""
    requests = [dataclasses.replace(case.request, sampling=SAMPLED) for case in cases[:6]]
    requests += [dataclasses.replace(case.request, id=f"{case.request.id}-greedy") for case in cases[:3]]
    (eager,), _ = answers(experiment(nano, *INLINE), requests)
    (alone, together), measured = answers(experiment(nano, CAPTURED, *INLINE), requests, (1, len(requests)))
    assert measured.counters["talker_r0"]["graph_replays"] > 20
    for one, two, three in zip(eager, alone, together, strict=True):
        assert one.text_ids == two.text_ids == three.text_ids
        assert np.array_equal(one.codes, two.codes) and np.array_equal(one.codes, three.codes)


def test_without_a_compiler_the_steps_run_eager_and_the_record_says_so(
    nano: Path, cases: list[OracleCase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("OMNI_LAB_CACHE", str(tmp_path / "cache"))
    effective = {}
    (result,), measured = answers(experiment(nano, CAPTURED, *INLINE), [cases[0].request], effective=effective)
    check(cases[0], result[0], "without a compiler")
    note = "there is no C++ compiler to compile it with (install g++); the step runs eager"
    assert effective["notes"] == {"graphs.thinker": note, "graphs.talker": note}
    assert effective["optimizations"]["graphs"] == {"thinker": False, "talker": False, "code2wav": False}
    assert measured.counters["thinker_r0"]["eager_steps"] > 0
    assert not (tmp_path / "cache").exists()


def test_a_process_that_ends_over_a_graph_is_followed_by_another(nano: Path, tmp_path: Path) -> None:
    stage = next(stage for stage in STAGED.stages if stage.name == "thinker")
    lost = plan_stage(experiment(nano, CAPTURED), str(tmp_path / "no checkpoint"), stage, 0)
    heard = []
    jobs = [(lost, "thinker", 1)] * (os.cpu_count() + 1)
    asyncio.run(compile_graphs(jobs, lambda: heard.append("done")))
    assert len(heard) == len(jobs)
