"""The stage graph at work: modalities, sampling, aborts, limits, dying workers, and an end without leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import pytest

from omni_lab.assemble import open_pipeline
from omni_lab.core import (
    AudioChunk,
    Finished,
    PipelineError,
    Request,
    RequestError,
    Sampling,
    StageError,
    TextDelta,
    Unavailable,
)
from omni_lab.pipeline.orchestrator import Measured, Pipeline
from tests.pipelines import Answer, answers, ask, ask_all, experiment

INLINE = ("executor=inline", "connector=in_process")


def request(name: str = "r", words: str = "What is the weather like today?", **options) -> Request:
    sampling = {
        "thinker": Sampling(max_tokens=options.pop("text", 12)),
        "talker": Sampling(repetition_penalty=1.05, max_tokens=options.pop("frames", 12) + 1),
    }
    sampling |= options.pop("sampling", {})
    return Request(name, [{"role": "user", "content": words}], sampling=sampling, return_codes=True, **options)


def sampled(name: str, seed: int, words: str = "What is the weather like today?") -> Request:
    sampling = {
        "thinker": Sampling(temperature=0.8, top_k=20, seed=seed, max_tokens=10),
        "talker": Sampling(0.9, top_k=50, repetition_penalty=1.05, seed=seed + 1, max_tokens=14),
    }
    return request(name, words, sampling=sampling)


def workers_at_rest(pipeline: Pipeline) -> bool:
    """No stage of an inline pipeline holds a sequence, a cache row, or an emission."""
    workers = pipeline.executor.workers
    schedulers = [worker.scheduler for worker in workers]
    held = [getattr(s, name) for s in schedulers for name in ("waiting", "running", "sequences") if hasattr(s, name)]
    emitted = [getattr(worker.output, "inside", worker.output).handoff.streams for worker in workers]
    emitted += [getattr(worker.output, "kept", []) for worker in workers]
    return not any(held) and not any(worker.sequences for worker in workers) and not any(emitted)


def test_text_only_requests_never_touch_the_speaking_stages(nano: Path) -> None:
    setup = experiment(nano, "executor=process", "connector=shared_memory")
    ((answer,),), measured = answers(setup, [request(modalities=("text",))])
    assert answer.text_ids and not answer.chunks and set(answer.finished.reasons) == {"text"}
    assert {row.stage for row in measured.steps} == {"thinker"} and not measured.chunks[1:]


def test_audio_only_requests_speak_the_same_and_show_no_text(nano: Path) -> None:
    ((both, audio),), _ = answers(experiment(nano, *INLINE), [request("both"), request("audio", modalities=("audio",))])
    assert audio.text_ids == [] and set(audio.finished.reasons) == {"audio"}
    assert np.array_equal(audio.wave, both.wave) and len(audio.wave)


def test_sampled_answers_belong_to_the_request_alone(nano: Path) -> None:
    words = ["Hello.", "The third one turns the numbers into sound.", "What time is it?", "One."]
    requests = [sampled(f"r{index}", 10 * index, words[index % 4]) for index in range(12)]
    requests += [sampled("twin", 0, words[0])]
    settings = [INLINE, ("executor=process", "connector=shared_memory"), (*INLINE, "stages.talker.replicas=2")]
    results = [result for s in settings for result in answers(experiment(nano, *s), requests, [1, 5, 13])[0]]
    for result in results[1:]:
        for first, other in zip(results[0], result, strict=True):
            assert first.text_ids == other.text_ids and np.array_equal(first.codes, other.codes)
    assert len({tuple(answer.text_ids) for answer in results[0]}) > 8
    assert results[0][-1].text_ids == results[0][0].text_ids and np.array_equal(results[0][-1].wave, results[0][0].wave)


@pytest.mark.parametrize("events", [0, 1, 3, 8, 14])
@pytest.mark.parametrize("async_output", [True, False])
def test_an_abort_at_any_point_frees_everything_and_disturbs_nobody(
    nano: Path, events: int, async_output: bool
) -> None:
    setup = experiment(nano, *INLINE, f"optimizations.async_output={async_output}", "chunking.initial_frames=2")

    async def leave(pipeline: Pipeline, name: str) -> None:
        async with aclosing(pipeline.generate(request(name, text=40, frames=60))) as stream:
            for _ in range(events):
                await anext(stream)

    async def run() -> None:
        async with open_pipeline(setup) as pipeline:
            alone = await ask(pipeline, request("alone"))
            stayed, *_ = await asyncio.gather(
                ask(pipeline, request("stays")), *(leave(pipeline, f"leaves{i}") for i in range(3))
            )
            assert stayed.text_ids == alone.text_ids and np.array_equal(stayed.codes, alone.codes)
            task = asyncio.create_task(ask(pipeline, request("cancelled", text=40, frames=60)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(200):
                await asyncio.sleep(0.01)
                if workers_at_rest(pipeline):
                    break
            assert workers_at_rest(pipeline) and not pipeline.requests and not any(pipeline.load.values())

    asyncio.run(run())


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"words": ""}, "empty"),
        ({"speaker": "nobody"}, "speaker: unknown speaker 'nobody'"),
        ({"modalities": ("smell",)}, "modalities"),
        ({"modalities": ()}, "modalities"),
        ({"words": "long " * 2000}, "the prompt has .* tokens and the limit is 1024"),
        ({"text": 1020}, "do not fit into the 1024 of stages.thinker.max_model_len"),
        ({"frames": 1020}, "do not fit into the 1024 of stages.talker.max_model_len"),
    ],
)
def test_a_bad_request_is_refused_alone(nano: Path, wrong: dict, message: str) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            good = asyncio.create_task(ask(pipeline, request("good")))
            with pytest.raises(RequestError, match=message):
                await ask(pipeline, request("bad", **wrong))
            assert (await good).finished and workers_at_rest(pipeline)

    asyncio.run(run())


def test_an_id_in_use_is_refused(nano: Path) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            first = asyncio.create_task(ask(pipeline, request("same")))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="'same' is in use"):
                await ask(pipeline, request("same"))
            assert (await first).finished

    asyncio.run(run())


@pytest.mark.parametrize("text, frames", [(1, 12), (2, 0), (2, 1)])
def test_short_answers_have_a_defined_end(nano: Path, text: int, frames: int) -> None:
    ((answer,),), _ = answers(experiment(nano, *INLINE), [request(text=text, frames=frames)])
    spoken = 0 if text == 1 else frames
    assert len(answer.text_ids) == text and answer.finished.reasons["text"] == "length"
    assert answer.codes.shape == (spoken, 16) and len(answer.wave) == max(0, 1920 * spoken - 555)
    assert answer.chunks[-1].final and answer.finished.reasons["audio"] == ("stop" if text == 1 else "length")


def test_a_prompt_without_a_user_turn_speaks(nano: Path) -> None:
    alone = request()
    alone.messages = [{"role": "system", "content": "Say something."}]
    ((answer,),), _ = answers(experiment(nano, *INLINE), [alone])
    assert answer.text_ids and len(answer.codes) > 0 and answer.finished


def test_a_small_cache_makes_requests_wait_and_never_fails_them(nano: Path) -> None:
    requests = [request(f"r{index}") for index in range(6)]
    wide, _ = answers(experiment(nano, *INLINE), requests, [6])
    setup = experiment(nano, *INLINE, "stages.thinker.kv_cache_mb=4", "stages.talker.kv_cache_mb=4")
    narrow, measured = answers(setup, requests, [6])
    assert max(row.batch for row in measured.steps if row.stage in ("thinker", "talker")) <= 2
    assert [answer.text_ids for answer in narrow[0]] == [answer.text_ids for answer in wide[0]]
    assert all(np.array_equal(a.codes, b.codes) for a, b in zip(narrow[0], wide[0], strict=True))


@pytest.mark.parametrize("executor", ["inline", "process"])
def test_a_cache_too_small_for_one_sequence_says_what_to_change(nano: Path, executor: str) -> None:
    setup = experiment(nano, f"executor={executor}", "stages.talker.kv_cache_mb=1", "stages.talker.max_model_len=4096")
    with pytest.raises(PipelineError, match=r"stages.talker: kv_cache_mb 1 does not hold .* max_model_len 4096"):
        answers(setup, [])
    assert not psutil.Process().children()


def test_chunks_arrive_in_order_with_the_sizes_asked_for(nano: Path) -> None:
    ((answer,),), measured = answers(experiment(nano, "chunking.frames=10"), [request(frames=38, text=20)])
    assert [chunk.frames for chunk in answer.chunks] == [4, 10, 10, 10, 4]
    assert [chunk.index for chunk in answer.chunks] == [0, 1, 2, 3, 4]
    edge = [row for row in measured.chunks if row.edge == "talker->code2wav"]
    assert [row.frames for row in edge] == [4, 10, 10, 10, 4]
    assert all(row.produced_ns <= row.sent_ns <= row.received_ns and row.bytes > 0 for row in edge)
    times = [chunk.received_ns for chunk in answer.chunks]
    assert times == sorted(times)


def test_text_arrives_before_speech_and_audio_before_the_end_of_speech(nano: Path) -> None:
    async def run() -> list:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            return [event async for event in pipeline.generate(request(frames=60, text=20))]

    kinds = [type(event) for event in asyncio.run(run())]
    assert kinds[0] is TextDelta and kinds[-1] is Finished and kinds.count(AudioChunk) == 4
    assert kinds.index(AudioChunk) < len(kinds) - 4


@pytest.mark.parametrize("output", ["true", "false"], ids=["async output", "sync output"])
def test_text_goes_over_in_the_sizes_asked_for(nano: Path, output: str) -> None:
    toggles = (f"optimizations.async_output={output}", "chunking.text_tokens=[1, 2, 4]")
    setup = experiment(nano, *INLINE, *toggles)

    async def run() -> tuple[list[int], Measured]:
        async with open_pipeline(setup) as pipeline:
            events = [event async for event in pipeline.generate(request(frames=30, text=20))]
            shown = [len(event.token_ids) for event in events if isinstance(event, TextDelta)]
            return shown, await pipeline.take_records()

    shown, measured = asyncio.run(run())
    handed = [row.frames for row in measured.chunks if row.edge == "thinker->talker"]
    assert shown == [1, 2, 4, 4, 4, 4, 1] and handed == [1, 2, 4, 4, 4, 4, 0]


def test_a_stop_text_is_looked_for_in_every_token_whatever_goes_over_at_once(nano: Path) -> None:
    async def run(sizes: str, stop: tuple[str, ...]) -> Answer:
        async with open_pipeline(experiment(nano, *INLINE, f"chunking.text_tokens={sizes}")) as pipeline:
            return await ask(pipeline, request(text=40, frames=60, stop=stop))

    whole = asyncio.run(run("[1]", ()))
    single, many = (asyncio.run(run(sizes, (whole.text[4:6],))) for sizes in ("[1]", "[16]"))
    assert len(single.text_ids) < 16 and single.text == many.text == whole.text[:4]
    assert single.text_ids == many.text_ids


def test_replicas_share_the_requests(nano: Path) -> None:
    setup = experiment(nano, *INLINE, "stages.talker.replicas=2")
    _, measured = answers(setup, [request(f"r{index}") for index in range(8)], [8])
    frames = {
        replica: sum(r.tokens for r in measured.steps if (r.stage, r.replica) == ("talker", replica))
        for replica in (0, 1)
    }
    assert frames[0] == frames[1] == 4 * 12


def test_a_killed_worker_ends_its_requests_with_the_cause_and_leaves_no_process(nano: Path) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano)) as pipeline:
            task = asyncio.create_task(ask(pipeline, request(text=200, frames=400)))
            await asyncio.sleep(0.5)
            talker = next(p for end, p in pipeline.executor.processes.items() if end.stage == "talker")
            talker.kill()
            cause = "stage talker, replica 0, request r: its process ended unexpectedly .killed by signal 9."
            with pytest.raises(StageError, match=cause):
                await task
            with pytest.raises(Unavailable, match="stage talker has no worker: replica 0: its process ended"):
                await ask(pipeline, request("later"))

    asyncio.run(run())
    assert not psutil.Process().children()


def test_workers_end_by_themselves_when_they_are_asked(nano: Path) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano)) as pipeline:
            await ask(pipeline, request())
            processes = list(pipeline.executor.processes.values())
        assert [process.returncode for process in processes] == [0, 0, 0]

    asyncio.run(run())


SCRIPT = """
import asyncio, signal, sys
from tests.pipelines import ask_all, experiment
from tests.test_pipeline import request
from omni_lab.assemble import open_pipeline

async def main():
    async with open_pipeline(experiment(sys.argv[1])) as pipeline:
        print("ready", flush=True)
        await ask_all(pipeline, [request(f"r{i}", text=200, frames=500) for i in range(100)], 8)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_end_of_the_parent_is_the_end_of_its_workers(nano: Path, how: signal.Signals) -> None:
    memory = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    root = Path(__file__).parent.parent
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(nano)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=root
    )
    assert parent.stdout.readline() == b"ready\n"
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 3
    time.sleep(0.5)
    parent.send_signal(how)
    parent.wait(timeout=20)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) == memory


def test_workers_need_little_more_memory_than_their_weights(voice: Path) -> None:
    facts: dict[str, dict] = {}

    async def run() -> None:
        setup = experiment(voice)
        async with open_pipeline(setup, lambda worker, fact: facts.update({worker: fact})) as pipeline:
            await ask_all(pipeline, [request(f"r{index}") for index in range(4)], 4)

    asyncio.run(run())
    assert set(facts) == {"thinker_r0", "talker_r0", "code2wav_r0"}
    for worker, fact in facts.items():
        # How much of torch's libraries is resident after an import (200 to 300 MB) is the kernel's choice, so what
        # counts is what the worker adds: its weights once, pages of the checkpoint, and kernels as they are first used.
        added = fact["peak_rss_bytes"] - fact["runtime_rss_bytes"]
        assert added <= 1.25 * fact["weight_bytes"] + 100e6, (worker, fact)


@pytest.mark.parametrize(
    "wrong, field",
    [
        ({"id": 5}, "id"),
        ({"id": ""}, "id"),
        ({"id": "\ud800"}, "id"),
        ({"modalities": None}, "modalities"),
        ({"modalities": (["text"],)}, "modalities"),
        ({"return_codes": "yes"}, "return_codes"),
        ({"sampling": None}, "sampling"),
        ({"sampling": {"taker": Sampling()}}, "sampling.taker"),
        ({"sampling": {"thinker": None}}, "sampling.thinker"),
        ({"sampling": {"thinker": Sampling(temperature="hot")}}, "sampling.thinker.temperature"),
        ({"sampling": {"thinker": Sampling(temperature=float("nan"))}}, "sampling.thinker.temperature"),
        ({"sampling": {"thinker": Sampling(temperature=-1.0)}}, "sampling.thinker.temperature"),
        ({"sampling": {"thinker": Sampling(top_p=0.0)}}, "sampling.thinker.top_p"),
        ({"sampling": {"thinker": Sampling(repetition_penalty=0.0)}}, "sampling.thinker.repetition_penalty"),
        ({"sampling": {"thinker": Sampling(top_k=2**63)}}, "sampling.thinker.top_k"),
        ({"sampling": {"talker": Sampling(seed=2**64)}}, "sampling.talker.seed"),
        ({"sampling": {"talker": Sampling(seed=True)}}, "sampling.talker.seed"),
        ({"sampling": {"talker": Sampling(max_tokens=0)}}, "sampling.talker.max_tokens"),
        ({"sampling": {"talker": Sampling(max_tokens=3.5)}}, "sampling.talker.max_tokens"),
        ({"sampling": {"talker": Sampling(min_tokens=9, max_tokens=8)}}, "sampling.talker.min_tokens"),
    ],
)
def test_a_malformed_request_never_reaches_a_stage(nano: Path, wrong: dict, field: str) -> None:
    bad = request("bad")
    for name, value in wrong.items():
        setattr(bad, name, value)

    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            with pytest.raises(RequestError, match=f"^{field}: "):
                await ask(pipeline, bad)
            assert workers_at_rest(pipeline) and not pipeline.requests

    asyncio.run(run())


@pytest.mark.parametrize("executor", [INLINE, ("executor=process", "connector=shared_memory")])
def test_an_id_can_be_used_again_at_once(nano: Path, executor: tuple[str, ...]) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *executor)) as pipeline:
            expected = await ask(pipeline, request("same", "Once upon a time."))
            for _ in range(5):
                async with aclosing(pipeline.generate(request("same", text=40, frames=60))) as stream:
                    await anext(stream)
                await ask(pipeline, request("same", modalities=("audio",), text=30, frames=2))
                answer = await ask(pipeline, request("same", "Once upon a time."))
                assert answer.text_ids == expected.text_ids and np.array_equal(answer.codes, expected.codes)
            rows = (await pipeline.take_records()).chunks
            assert {row.request for row in rows} == {"same"}

    asyncio.run(run())


def test_many_records_come_in_parts(nano: Path) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE, "connector=shared_memory")) as pipeline:
            talker = next(worker for worker in pipeline.executor.workers if worker.stage.name == "talker")
            talker.chunks.extend(
                [("thinker->talker", f"r#{index}", index, 1, 10, 1, 2, 3, False) for index in range(50_000)]
            )
            for step in range(40_000):
                talker.clock.add("talker", step, step + 1, 1, 1, "decode")
            measured = await pipeline.take_records()
            assert [row.index for row in measured.chunks] == list(range(50_000))
            assert [row.step for row in measured.steps] == list(range(40_000)) and measured.lost_steps == 0

    asyncio.run(run())


def test_an_inline_pipeline_gives_back_its_descriptors(nano: Path) -> None:
    async def run() -> int:
        async with open_pipeline(experiment(nano, *INLINE, "connector=shared_memory")):
            pass
        return psutil.Process().num_fds()

    assert len({asyncio.run(run()) for _ in range(3)}) == 1
