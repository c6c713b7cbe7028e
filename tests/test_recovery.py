"""A pipeline that does not break: workers that end, clients that leave, read slowly or wait too long, its own end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from omni_lab.assemble import open_pipeline
from omni_lab.connectors.shared_memory import ChannelFull, MessageTooLarge
from omni_lab.connectors.wire import Message
from omni_lab.core import CLIENT, AudioChunk, DeadlineError, Payload, PipelineError, StageError, Unavailable
from omni_lab.engine.worker import Channel
from omni_lab.pipeline import flight, orchestrator, process, restarts
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.pipeline.restarts import LONGEST_S, MOST, WINDOW_S, Restarts
from omni_lab.pipeline.wiring import End
from tests.pipelines import Answer, ask, experiment
from tests.test_pipeline import INLINE, request, workers_at_rest


def same(one: Answer, other: Answer) -> bool:
    return one.text_ids == other.text_ids and np.array_equal(one.codes, other.codes)


async def outcome(pipeline: Pipeline, name: str, **options) -> Answer | Exception:
    try:
        return await ask(pipeline, request(name, **options))
    except Exception as error:
        return error


async def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


async def nothing_open(pipeline: Pipeline) -> bool:
    """No worker holds a sequence or a part of a chunk, at the turn at which it is asked."""
    counters = (await pipeline.take_records()).counters
    assert set(counters) == {f"{stage}_r{replica}" for stage, replica in pipeline.load}
    return not any(counts["open_sequences"] or counts["open_streams"] for counts in counters.values())


def test_a_worker_that_ends_is_replaced_and_only_its_requests_fail(nano: Path) -> None:
    long = {"text": 60, "frames": 80}

    async def lose(pipeline: Pipeline, end: End) -> list[Answer | Exception]:
        """Kill a worker while six requests are at work; what became of them."""
        killed = pipeline.executor.processes[end]
        tasks = [asyncio.create_task(outcome(pipeline, f"{index}", **long)) for index in range(6)]
        await until(lambda: sum(pipeline.load.values()) == 18)
        killed.kill()
        results = await asyncio.gather(*tasks)
        for index, error in enumerate(results):
            cause = f"stage {end.stage}, replica {end.replica}, request {index}: its process ended unexpectedly (kil"
            assert isinstance(error, Answer) or (isinstance(error, StageError) and str(error).startswith(cause))
        assert killed.returncode == -signal.SIGKILL
        return results

    async def run() -> None:
        descriptors = psutil.Process().num_fds()
        async with open_pipeline(experiment(nano, "stages.talker.replicas=2")) as pipeline:
            alone = await ask(pipeline, request("alone", **long))
            opened = psutil.Process().num_fds()
            for stage in ("thinker", "code2wav"):
                assert not any(isinstance(result, Answer) for result in await lose(pipeline, End(stage)))
                assert pipeline.unready.startswith(f"stage {stage} has no worker: replica 0: its process ended")
                with pytest.raises(Unavailable, match=f"stage {stage} has no worker"):
                    await ask(pipeline, request("refused"))
                if stage == "code2wav":
                    assert (await ask(pipeline, request("text", modalities=("text",)))).finished
                await until(lambda: not pipeline.unready)
                assert same(await ask(pipeline, request("later", **long)), alone)

            carried_on = [result for result in await lose(pipeline, End("talker", 1)) if isinstance(result, Answer)]
            assert len(carried_on) == 3 and all(same(answer, alone) for answer in carried_on)
            assert pipeline.unready is None
            assert same(await ask(pipeline, request("at once", **long)), alone)
            await until(lambda: not pipeline.down)
            later = await asyncio.gather(*(ask(pipeline, request(f"later{index}", **long)) for index in range(4)))
            assert all(same(answer, alone) for answer in later)

            counters = (await pipeline.take_records()).counters
            deaths = {worker: counts.get("deaths", 0) for worker, counts in counters.items()}
            assert deaths == {"thinker_r0": 1, "talker_r0": 0, "talker_r1": 1, "code2wav_r0": 1}
            assert counters["talker_r1"]["eager_steps"] > 0 and counters["talker_r1"]["lost_payloads"] >= 0
            assert await nothing_open(pipeline) and not pipeline.requests and not any(pipeline.load.values())
            assert psutil.Process().num_fds() == opened
        assert psutil.Process().num_fds() == descriptors

    asyncio.run(run())
    assert not psutil.Process().children()


def test_what_comes_for_a_worker_that_is_gone_is_counted(nano: Path) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano)) as pipeline:
            pipeline.executor.processes[End("thinker")].kill()
            await until(lambda: pipeline.unready)
            late = Payload("late", CLIENT, "thinker", tensors={"x": torch.zeros(1)})
            pipeline.executor.senders[End("thinker")].send(late)  # as another worker does, who knows nothing yet
            await until(lambda: not pipeline.unready)
            assert (await pipeline.take_records()).counters["thinker_r0"]["lost_payloads"] == 1

    asyncio.run(run())


def test_a_worker_that_cannot_come_back_breaks_the_pipeline_with_the_cause(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "MOST", 1)
    checkpoint = shutil.copytree(nano, tmp_path / "checkpoint")

    async def run() -> None:
        async with open_pipeline(experiment(checkpoint)) as pipeline:
            shutil.rmtree(checkpoint)
            pipeline.executor.processes[End("talker")].kill()
            await until(lambda: pipeline.broken)
            with pytest.raises(PipelineError, match=r"worker talker_r0: .*checkpoint.* ended too often"):
                await ask(pipeline, request())
            assert pipeline.unready == pipeline.broken

    asyncio.run(run())
    assert not psutil.Process().children()


def test_restarts_come_later_and_later_and_have_an_end() -> None:
    ends = Restarts()
    rests = [ends.rest(float(second)) for second in range(MOST)]
    assert rests[:3] == [0.2, 0.4, 0.8] and rests == sorted(rests) and rests[-1] == LONGEST_S
    assert ends.rest(MOST + 1.0) is None
    assert ends.rest(2 * WINDOW_S) == 0.2


def test_a_client_that_leaves_frees_every_stage_at_its_next_turn(nano: Path) -> None:
    async def leave(pipeline: Pipeline, name: str, events: int) -> None:
        async with aclosing(pipeline.generate(request(name, text=150, frames=200))) as stream:
            for _ in range(events):
                await anext(stream)

    async def run() -> None:
        async with open_pipeline(experiment(nano, "chunking.initial_frames=2")) as pipeline:
            alone = await ask(pipeline, request("alone"))
            for events in (1, 5, 20, 60):
                await asyncio.gather(*(leave(pipeline, f"{index}", events) for index in range(3)))
                assert await nothing_open(pipeline)
            task = asyncio.create_task(ask(pipeline, request("cancelled", text=150, frames=200)))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await nothing_open(pipeline) and same(await ask(pipeline, request("later")), alone)

    asyncio.run(run())


def test_a_slow_reader_is_bounded_keeps_no_cache_row_and_gets_everything(
    nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "HELD_BYTES", 60_000)
    long = {"text": 40, "frames": 80}

    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE, "chunking.frames=4")) as pipeline:
            alone = await ask(pipeline, request("alone", **long))
            thinker, talker, code2wav = pipeline.executor.workers
            slow = Answer()
            async with aclosing(pipeline.generate(request("slow", **long))) as stream:
                await anext(stream)
                (slow_flight,) = pipeline.requests.values()
                await until(lambda: not talker.sequences)
                await asyncio.sleep(0.2)
                (sequence,) = code2wav.sequences.values()
                assert sequence.held and sequence.state.chunks and not thinker.sequences
                assert slow_flight.size < 300_000 < alone.wave.nbytes
                assert same(await ask(pipeline, request("beside", **long)), alone)
                async for event in stream:
                    if isinstance(event, AudioChunk):
                        slow.chunks.append(event)
                    await asyncio.sleep(0)
            assert np.array_equal(slow.wave, alone.wave) and np.array_equal(slow.codes, alone.codes)
            assert event.text == alone.text and workers_at_rest(pipeline)

    asyncio.run(run())


def test_text_that_waits_is_joined_beyond_the_bound(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "HELD_BYTES", 8_000)
    long = {"text": 200, "modalities": ("text",)}

    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            alone = await ask(pipeline, request("alone", **long))
            async with aclosing(pipeline.generate(request("slow", **long))) as stream:
                events = [await anext(stream)]
                (slow,) = pipeline.requests.values()
                await until(lambda: not pipeline.executor.workers[0].sequences)
                assert slow.size < 8_000 + 4_096
                events += [event async for event in stream]
            assert [token for event in events[:-1] for token in event.token_ids] == alone.text_ids
            assert len(events) < 20 and events[-1].text == alone.text

    asyncio.run(run())


def test_a_reader_that_takes_nothing_is_let_go(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "HELD_BYTES", 50_000)
    monkeypatch.setattr(orchestrator, "READER_S", 0.2)

    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE, "chunking.frames=4")) as pipeline:
            async with aclosing(pipeline.generate(request("absent", text=60, frames=200))) as stream:
                await anext(stream)
                await until(lambda: not pipeline.requests)
                await until(lambda: workers_at_rest(pipeline))
                with pytest.raises(StageError, match=r"request absent: its client took nothing for 0.2 s .*code2wav"):
                    await anext(stream)
            assert not any(pipeline.load.values())

    asyncio.run(run())


@pytest.mark.parametrize("reads", [True, False])
def test_a_deadline_ends_a_request_whether_its_client_reads_or_not(nano: Path, reads: bool) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            with pytest.raises(DeadlineError, match=r"request late: not finished within 0.2 s by thinker replica 0, "):
                asked = request("late", text=400, frames=500)
                async with aclosing(pipeline.generate(asked, deadline_s=0.2)) as stream:
                    await anext(stream)
                    if not reads:
                        await until(lambda: workers_at_rest(pipeline))
                        assert not pipeline.requests
                    async for _ in stream:
                        pass
            await until(lambda: workers_at_rest(pipeline))
            assert (await ask(pipeline, request("later"))).finished

    asyncio.run(run())


@pytest.mark.parametrize("output", ["true", "false"], ids=["async output", "sync output"])
@pytest.mark.parametrize("error", [ChannelFull("no place"), OSError("no luck")], ids=["channel", "fault"])
def test_a_failed_hand_off_ends_its_request_and_nothing_of_it_stays(nano: Path, output: str, error: Exception) -> None:
    cause = f"stage talker, replica 0, request r: hand-off talker->code2wav failed: .*{error}"

    async def run() -> None:
        setup = experiment(nano, *INLINE, f"optimizations.async_output={output}")
        async with open_pipeline(setup) as pipeline:
            alone = await ask(pipeline, request("alone", frames=60))
            talker = next(worker for worker in pipeline.executor.workers if worker.stage.name == "talker")
            outbox = talker.outboxes["code2wav", 0]
            talker.outboxes["code2wav", 0] = Failing(outbox, error)
            with pytest.raises(StageError, match=cause):
                await ask(pipeline, request(frames=60))
            await until(lambda: workers_at_rest(pipeline))
            talker.outboxes["code2wav", 0] = outbox
            assert same(await ask(pipeline, request("later", frames=60)), alone)

    asyncio.run(run())


class Failing:
    """An outbox whose second send fails."""

    def __init__(self, outbox: Channel, error: Exception) -> None:
        self.outbox, self.error, self.sends = outbox, error, 0

    def send(self, *messages: Message) -> None:
        self.sends += 1
        if self.sends == 2:
            raise self.error
        self.outbox.send(*messages)


def test_nobody_waits_for_a_worker_that_hangs(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PING_S", 0.2)
    monkeypatch.setattr(orchestrator, "STALL_S", 60.0)

    def prompt(megabytes: int) -> Payload:
        return Payload("nobody", CLIENT, "thinker", tensors={"x": torch.zeros(megabytes << 20, dtype=torch.uint8)})

    async def run() -> None:
        async with open_pipeline(experiment(nano)) as pipeline:
            executor, workers = pipeline.executor, pipeline.executor.processes
            alone = await ask(pipeline, request("alone"))
            with pytest.raises(MessageTooLarge):
                executor.send("thinker", 0, prompt(40))

            monkeypatch.setattr(orchestrator, "STALL_S", 1.0)
            os.kill(workers[End("talker")].pid, signal.SIGSTOP)
            cause = "request r: no stage sent anything for 1 s; it is with thinker replica 0, talker replica 0, code2w"
            with pytest.raises(StageError, match=cause):
                await ask(pipeline, request())
            os.kill(workers[End("talker")].pid, signal.SIGCONT)
            assert await nothing_open(pipeline)

            os.kill(workers[End("thinker")].pid, signal.SIGSTOP)
            monkeypatch.setattr(orchestrator, "STALL_S", 60.0)
            for _ in range(5):
                executor.send("thinker", 0, prompt(15))
            assert executor.backlogs[End("thinker")]  # what finds no place in a full channel waits here
            executor.send("thinker", 0, prompt(40))
            waiting = asyncio.create_task(ask(pipeline, request("waiting")))
            await asyncio.sleep(0.1)
            os.kill(workers[End("thinker")].pid, signal.SIGCONT)
            assert same(await waiting, alone)
            await until(lambda: not executor.backlogs[End("thinker")])
            assert same(await ask(pipeline, request("later")), alone) and await nothing_open(pipeline)

            monkeypatch.setattr(process, "SILENT_S", 4.0)
            os.kill(workers[End("code2wav")].pid, signal.SIGSTOP)
            cause = "stage code2wav, replica 0, request r: it said nothing for 4 s and was killed"
            with pytest.raises(StageError, match=cause):
                await ask(pipeline, request())
            monkeypatch.setattr(process, "SILENT_S", 600.0)
            await until(lambda: not pipeline.unready)
            assert same(await ask(pipeline, request("last")), alone)
            assert pipeline.collector.gone.keys() == {("code2wav", 0)}

    asyncio.run(run())


def test_the_end_waits_a_bounded_time_for_those_at_work(nano: Path) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            short = asyncio.create_task(ask(pipeline, request("short")))
            await asyncio.sleep(0.02)
            closing = asyncio.create_task(pipeline.close(drain_s=30.0))
            await asyncio.sleep(0)
            assert pipeline.unready == "the pipeline is closing"
            with pytest.raises(Unavailable, match="the pipeline is closing"):
                await ask(pipeline, request("late"))
            assert (await short).finished
            await closing
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            long = asyncio.create_task(ask(pipeline, request("long", text=400, frames=500)))
            await asyncio.sleep(0.02)
            await pipeline.close(drain_s=0.1)
            with pytest.raises(PipelineError, match="the pipeline is closed"):
                await long

    asyncio.run(run())
