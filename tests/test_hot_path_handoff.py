"""The other sides of three pieces of the hot path: whole prefixes, serialized payloads, networks as processes.

They cost more and change nothing: text, codes and samples are those of the default pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from omni_lab.assemble import open_pipeline
from omni_lab.core import PipelineError, Prompt, Request, Sampling, StageError, Unavailable
from omni_lab.engine.blocks import gather, scatter
from omni_lab.engine.clock import PhaseTimer
from omni_lab.engine.output import AsyncOutput, SyncOutput
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.metrics.records import ChunkRow
from omni_lab.pipeline.handoff import ChunkedHandoff, PrefixHandoff
from omni_lab.pipeline.packing import Tensors, deserialize, mark_new, only_new, serialize
from tests.pipelines import Answer, answers, ask, experiment
from tests.test_handoff import push, raised
from tests.test_pipeline import INLINE, request, sampled

PREFIX_ALL = "optimizations.hot_path.decode_only_handoff=false"
SERIALIZED = "optimizations.hot_path.row_payloads=false"
TWO_PROCESSES = "optimizations.hot_path.single_process_executor=false"
EAGER = tuple(f"optimizations.graphs.{stage}=false" for stage in ("thinker", "talker", "code2wav"))
EDGES = ("thinker->talker", "talker->code2wav")


def mixed() -> list[Request]:
    return [
        request("greedy", "Hello.", text=20, frames=40),
        sampled("sampled", 3),
        request("text", modalities=("text",)),
        request("audio", modalities=("audio",), text=5, frames=30),
        sampled("other", 9, "What time is it?"),
    ]


def same(results: Iterable[Answer], others: Iterable[Answer]) -> bool:
    """Equal text, codes and number of samples; sample values within 1e-4, because windows are padded beside others."""
    return all(
        a.text_ids == b.text_ids
        and np.array_equal(a.codes, b.codes)
        and len(a.wave) == len(b.wave)
        and np.abs(a.wave - b.wave).max(initial=0.0) < 1e-4
        for a, b in zip(results, others, strict=True)
    )


def of_greedy(chunks: Iterable[ChunkRow], edge: str) -> list[ChunkRow]:
    return [row for row in chunks if row.edge == edge and row.request.startswith("greedy")]


@pytest.fixture(scope="module")
def default(nano: Path) -> tuple[list[Answer], list[ChunkRow]]:
    (result,), measured = answers(experiment(nano, *EAGER, *INLINE, "chunking.frames=8"), mixed(), [5])
    return result, measured.chunks


@pytest.mark.parametrize(
    "overrides",
    [
        [PREFIX_ALL],
        [SERIALIZED],
        [PREFIX_ALL, SERIALIZED, "optimizations.async_output=false", "connector=shared_memory"],
        [TWO_PROCESSES],
    ],
    ids=["prefix", "serialized", "both, sync", "two processes"],
)
def test_the_other_side_gives_the_same_answers(nano: Path, default, overrides: list[str]) -> None:
    setup = experiment(nano, *EAGER, *INLINE, "chunking.frames=8", *overrides)
    (result,), measured = answers(setup, mixed(), [5])
    assert same(result, default[0]) and all(answer.finished for answer in result)
    assert {row.stage for row in measured.steps} == {"thinker", "talker", "code2wav"}
    for edge in EDGES:
        rows = [(row.index, row.frames, row.final) for row in of_greedy(measured.chunks, edge)]
        assert rows == [(row.index, row.frames, row.final) for row in of_greedy(default[1], edge)]


def test_a_repeated_prefix_grows_and_new_rows_do_not(nano: Path, default) -> None:
    (_,), measured = answers(experiment(nano, *EAGER, *INLINE, "chunking.frames=8", PREFIX_ALL), mixed(), [5])
    for edge, row_bytes in zip(EDGES, (8, 16 * 8), strict=True):
        new, repeated = of_greedy(default[1], edge), of_greedy(measured.chunks, edge)
        assert len({row.bytes for row in new[1:-1]}) == 1
        growth = np.diff([row.bytes for row in repeated])
        assert growth.tolist() == [row_bytes * row.frames for row in repeated[1:]]
    client = [
        [row.bytes for row in chunks if row.edge == "code2wav->client"] for chunks in (default[1], measured.chunks)
    ]
    assert sorted(client[0]) == sorted(client[1])  # the client's stream stays incremental


def test_a_whole_handoff_has_no_prefix_to_repeat(nano: Path) -> None:
    whole = experiment(nano, *EAGER, *INLINE, "optimizations.async_chunk=false")
    repeated = experiment(nano, *EAGER, *INLINE, "optimizations.async_chunk=false", PREFIX_ALL)
    ((result,), expected), ((other,), measured) = (answers(setup, mixed(), [5]) for setup in (whole, repeated))
    assert same(result, other)
    assert sorted(row.bytes for row in expected.chunks) == sorted(row.bytes for row in measured.chunks)


TENSORS = {
    "ids": torch.arange(5),
    "hidden": torch.randn(3, 7).to(torch.bfloat16),
    "strided": torch.arange(12.0).view(3, 4).T,
    "media": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 4),
    "frames": torch.tensor(7),
}


@pytest.mark.parametrize("tensors", [TENSORS, {}], ids=["all kinds", "no rows"])
def test_a_blob_gives_back_what_was_put_in(tensors: Tensors) -> None:
    blob = serialize(tensors)
    assert [tensor.dtype for tensor in blob.values()] == [torch.uint8]
    back = deserialize(blob)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)


def test_the_receiver_of_a_prefix_takes_each_row_and_each_empty_tensor_once() -> None:
    handoff = PrefixHandoff("thinker", {"talker": (2,)})
    plain = ChunkedHandoff("thinker", {"talker": (2,)})
    owners = [Sequence("r", Sampling(), {}, ("talker",), {}) for _ in range(2)]
    for step in range(7):
        tensors = {"ids": torch.tensor([step])} if step < 6 else {}
        if step == 0:
            tensors |= {"user": torch.zeros(0, dtype=torch.int64), "positions": torch.arange(6).view(2, 3)}
        emissions = [Emission(owner, "talker", dict(tensors), step == 6) for owner in owners]
        repeated, new = map(push, (handoff, plain), emissions)
        assert (repeated is None) == (new is None)
        if new:
            taken = only_new(repeated.tensors)
            assert list(taken) == list(new.tensors)
            assert all(torch.equal(taken[name], new.tensors[name]) for name in taken)
            assert repeated.tensors["ids"].tolist() == list(range(min(step + 1, 6)))
    assert only_new(mark_new({}, {})) == {}


def test_blocks_give_every_emission_its_own_tensors_back() -> None:
    owners = [Sequence(f"r{index}", Sampling(), {}, (), {}) for index in range(3)]
    codes = torch.arange(3 * 16).view(3, 16)
    contents = [
        {"codes": codes[:1], "frames": torch.tensor(1)},
        {"audio": torch.arange(5.0), "frames": torch.tensor(2), "codes": codes[1:3]},
        {"codes": codes[:0]},
    ]
    emissions = [Emission(owner, "client", dict(content)) for owner, content in zip(owners, contents, strict=True)]
    blocks = gather(emissions)
    expected = [{name: tensor.clone() for name, tensor in content.items()} for content in contents]
    codes.fill_(-1)  # a step may reuse its buffers
    scatter(blocks, emissions)
    for emission, content in zip(emissions, expected, strict=True):
        assert list(emission.tensors) == list(content)
        assert all(torch.equal(emission.tensors[name], tensor) for name, tensor in content.items())


def test_each_worker_has_one_process_more_that_does_the_work_and_ends_with_it(nano: Path, default) -> None:
    facts: dict[str, dict] = {}

    async def run() -> list[psutil.Process]:
        setup = experiment(nano, *EAGER, "chunking.frames=8", TWO_PROCESSES)
        async with open_pipeline(setup, lambda worker, fact: facts.update({worker: fact})) as pipeline:
            workers = {end.stage: psutil.Process(p.pid) for end, p in pipeline.executor.processes.items()}
            networks = {stage: worker.children() for stage, worker in workers.items()}
            assert all(len(children) == 1 for children in networks.values())
            before = {stage: children[0].cpu_times().user for stage, children in networks.items()}
            result = await asyncio.gather(*(ask(pipeline, r) for r in mixed()))
            assert same(result, default[0])
            assert all(networks[stage][0].cpu_times().user > before[stage] for stage in networks)
            task = asyncio.create_task(ask(pipeline, request("long", text=200, frames=400)))
            await asyncio.sleep(0.3)
            networks["talker"][0].kill()
            with pytest.raises(StageError, match=r"the network of talker_r0 ended unexpectedly .killed by signal 9"):
                await task
            with pytest.raises(Unavailable, match="the network of talker_r0"):
                await ask(pipeline, request("later"))
            while pipeline.unready:  # another worker with another network takes its place
                await asyncio.sleep(0.05)
            assert same(await asyncio.gather(*(ask(pipeline, r) for r in mixed())), default[0])
            workers["thinker"].kill()
            assert not psutil.wait_procs(networks["thinker"], timeout=10)[1]
            return [*workers.values(), *(children[0] for children in networks.values())]

    processes = asyncio.run(run())
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not psutil.Process().children()
    assert all(fact["weight_bytes"] and fact["network_peak_rss_bytes"] for fact in facts.values()) and len(facts) == 3


class Spoiled:
    """The pipeline's own front-end, but for one prompt that a stage cannot use."""

    def __init__(self, front_end, spoil) -> None:
        self.front_end, self.spoil = front_end, spoil
        self.text_decoder = front_end.text_decoder

    def prepare(self, asked: Request, limit: int) -> Prompt:
        prompt = self.front_end.prepare(asked, limit)
        if asked.id.startswith("bad"):
            self.spoil(prompt.tensors)
        return prompt


def test_an_error_or_an_abort_in_the_other_process_is_the_requests_own(nano: Path) -> None:
    def lose(tensors: Tensors) -> None:
        del tensors["input_ids"]

    def exceed(tensors: Tensors) -> None:
        tensors["input_ids"] = tensors["input_ids"] + 10**6

    async def leave(pipeline, name: str, events: int) -> None:
        async with aclosing(pipeline.generate(request(name, text=40, frames=60))) as stream:
            for _ in range(events):
                await anext(stream)

    async def run() -> None:
        async with open_pipeline(
            experiment(nano, *EAGER, *INLINE, TWO_PROCESSES, "chunking.initial_frames=2")
        ) as pipeline:
            alone = await ask(pipeline, request("alone"))
            own = pipeline.front_end
            pipeline.front_end = Spoiled(own, lose)
            with pytest.raises(StageError, match=r"stage thinker, replica 0, request bad: .*KeyError: 'input_ids'"):
                await ask(pipeline, request("bad"))
            pipeline.front_end = Spoiled(own, exceed)
            with pytest.raises(StageError, match=r"stage thinker, replica 0, request bad: .*IndexError: index out of"):
                await ask(pipeline, request("bad"))
            stayed, *_ = await asyncio.gather(
                ask(pipeline, request("stays")), *(leave(pipeline, f"leaves{count}", count) for count in (0, 1, 8, 14))
            )
            assert same([alone], [stayed]) and same([alone], [await ask(pipeline, request("later"))])
            (network,) = (
                p for p in psutil.Process().children() if p.pid == pipeline.executor.workers[2].stage.process.pid
            )
            task = asyncio.create_task(ask(pipeline, request("long", text=200, frames=400)))
            await asyncio.sleep(0.3)
            network.kill()
            with pytest.raises(PipelineError, match="the network of code2wav_r0 ended unexpectedly"):
                await task

    asyncio.run(run())
    assert not psutil.Process().children()


def test_a_network_that_cannot_start_says_what_to_change(nano: Path) -> None:
    setup = experiment(
        nano, *EAGER, *INLINE, TWO_PROCESSES, "stages.thinker.kv_cache_mb=1", "stages.thinker.max_model_len=4096"
    )
    with pytest.raises(PipelineError, match=r"^stages.thinker: kv_cache_mb 1 does not hold .* max_model_len 4096"):
        answers(setup, [])
    assert not psutil.Process().children()


@pytest.mark.parametrize("output", [SyncOutput, AsyncOutput])
def test_rows_that_wait_for_their_chunk_survive_the_reuse_of_a_buffer(output) -> None:
    sent: list[Tensors] = []
    path = output(
        ChunkedHandoff("talker", {"code2wav": (5,)}),
        lambda pairs: sent.extend(p.tensors for _, p in pairs),
        raised,
        PhaseTimer(),
    )
    owners = [Sequence(f"r{index}", Sampling(), {}, ("code2wav",), {}) for index in range(3)]
    buffer = torch.zeros(3, 16, dtype=torch.int64)
    for step in range(5):
        buffer.copy_(torch.arange(3)[:, None] * 10 + step)
        path.emit([Emission(o, "code2wav", {"codes": buffer[i : i + 1]}) for i, o in enumerate(owners)], step)
    path.drain()
    path.close()
    assert [tensors["codes"][:, 0].tolist() for tensors in sent] == [list(range(i, i + 5)) for i in (0, 10, 20)]
