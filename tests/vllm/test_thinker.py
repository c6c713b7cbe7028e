"""The Thinker in vLLM's engine, through the real pipeline: transformers' answers, errors of one request, aborts."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from omni_lab.assemble import open_pipeline
from omni_lab.core import PipelineError, Request, Sampling, StageError
from omni_lab.experiment import Experiment
from tests.oracle import OracleCase, load_oracle
from tests.pipelines import answers, ask, ask_all, experiment
from tests.test_oracle import WHOLE_FIELD, check

EAGER = tuple(f"optimizations.graphs.{stage}=false" for stage in ("thinker", "talker", "code2wav"))
VLLM = ("stages.thinker.engine=vllm", *EAGER)
INLINE = ("executor=inline", "connector=in_process", *VLLM)
PROCESS = ("executor=process", "connector=shared_memory", *VLLM)
MEDIA = ("audio", "image", "video")


def has_media(case: OracleCase) -> bool:
    return case.name.startswith(MEDIA)


@pytest.fixture(scope="module")
def texts() -> list[OracleCase]:
    cases = [case for case in load_oracle() if not has_media(case)]
    assert len(cases) >= 24
    return cases


def text_request(name: str, **sampling) -> Request:
    thinker = Sampling(**{"max_tokens": 12} | sampling)
    return Request(name, [{"role": "user", "content": "Tell me a story."}], ("text",), sampling={"thinker": thinker})


@pytest.mark.parametrize("overrides, concurrencies", [(PROCESS, (1, 32)), (INLINE, (7,))], ids=["process", "inline"])
def test_answers_equal_transformers(
    nano: Path, texts: list[OracleCase], overrides: tuple[str, ...], concurrencies: tuple[int, ...]
) -> None:
    """Text, codes and waveform, alone and in batches: the Talker gets what it gets of our own Thinker."""
    setup = experiment(nano, *overrides, *WHOLE_FIELD)
    results, measured = answers(setup, [case.request for case in texts], concurrencies)
    for concurrency, result in zip(concurrencies, results, strict=True):
        for case, answer in zip(texts, result, strict=True):
            check(case, answer, f"vllm, concurrency {concurrency}")
    steps = [row for row in measured.steps if row.stage == "thinker"]
    sampled = sum(len(answer.text_ids) for result in results for answer in result)
    assert sum(row.tokens for row in steps) == sampled
    assert max(row.batch for row in steps) > max(concurrencies) // 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizations.batching=false"],
        ["optimizations.async_chunk=false", "optimizations.async_output=false"],
        ["stages.thinker.replicas=2"],
        ["optimizations.hot_path.single_process_executor=false"],
        ["stages.thinker.kv_cache_mb=10"],  # room for two sequences
    ],
    ids=["one at a time", "whole and sync", "replicas", "two processes", "little memory"],
)
def test_no_option_changes_the_answer(nano: Path, texts: list[OracleCase], overrides: list[str]) -> None:
    setup = experiment(nano, *PROCESS, *WHOLE_FIELD, *overrides)
    cases = texts[:10]
    (result,), measured = answers(setup, [case.request for case in cases], [7])
    for case, answer in zip(cases, result, strict=True):
        check(case, answer, str(overrides))
    if overrides == ["stages.thinker.kv_cache_mb=10"]:
        assert max(row.batch for row in measured.steps if row.stage == "thinker") == 2


def test_compiled_answers_equal_transformers(nano: Path, texts: list[OracleCase]) -> None:
    setup = experiment(nano, *PROCESS, *WHOLE_FIELD, "optimizations.graphs.thinker=true")

    async def run() -> None:
        async with open_pipeline(setup) as pipeline:
            assert pipeline.effective["optimizations"]["graphs"]["thinker"] is True
            result = await ask_all(pipeline, [case.request for case in texts], 7)
        for case, answer in zip(texts, result, strict=True):
            check(case, answer, "compiled")

    asyncio.run(run())


def test_sampled_answers_have_their_seed_and_their_limits(nano: Path) -> None:
    draw = {"temperature": 1.5, "top_p": 0.95, "top_k": 200, "repetition_penalty": 1.1}
    requests = [text_request(f"seed{seed}", seed=seed, **draw) for seed in range(6)]
    requests += [text_request("unseeded", **draw), text_request("again", **draw)]
    requests += [text_request("long", seed=1, min_tokens=30, max_tokens=30, **draw)]
    (alone, together), _ = answers(experiment(nano, *INLINE), requests, [1, 9])
    for one, other in zip(alone[:6], together[:6], strict=True):
        assert one.text_ids == other.text_ids
    assert len({tuple(answer.text_ids) for answer in alone}) == len(alone)
    assert len(alone[8].text_ids) == 30 and alone[8].finished.reasons == {"text": "length"}


def test_media_are_refused_for_their_request_alone(nano: Path) -> None:
    cases = {case.name: case for case in load_oracle()}
    plain = cases["text_plain"]

    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE, *WHOLE_FIELD)) as pipeline:
            for name, words in (("audio_turns", "audio"), ("audio_image", "audio and image"), ("video_odd", "video")):
                good = asyncio.create_task(ask(pipeline, plain.request))
                with pytest.raises(StageError, match=f"vllm answers text only, and the prompt has {words};"):
                    await ask(pipeline, cases[name].request)
                check(plain, await good, f"beside {name}")

    asyncio.run(run())


@pytest.mark.parametrize("events", [0, 1, 5])
def test_an_abort_leaves_nothing_in_the_engine_and_disturbs_nobody(nano: Path, events: int) -> None:
    plain = next(case for case in load_oracle() if case.name == "text_long_answer")

    async def leave(pipeline, name: str) -> None:
        async with aclosing(pipeline.generate(text_request(name, max_tokens=200, min_tokens=200))) as stream:
            for _ in range(events):
                await anext(stream)

    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE, *WHOLE_FIELD)) as pipeline:
            engine = pipeline.executor.workers[0].stage.engine
            stayed, *_ = await asyncio.gather(
                ask(pipeline, plain.request), *(leave(pipeline, f"leaves{index}") for index in range(4))
            )
            check(plain, stayed, "beside aborts")
            for _ in range(100):
                await asyncio.sleep(0.01)
                if not pipeline.executor.workers[0].sequences:
                    break
            assert not pipeline.executor.workers[0].sequences
            assert not engine.has_unfinished_requests()
            assert engine.engine_core.engine_core.scheduler.get_num_unfinished_requests() == 0

    asyncio.run(run())


def test_every_request_hears_of_a_failing_engine_and_later_ones_are_served(
    nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with open_pipeline(experiment(nano, *INLINE)) as pipeline:
            stage = pipeline.executor.workers[0].stage
            expected = await ask(pipeline, text_request("before"))

            def fail(*arguments, **options) -> None:
                raise RuntimeError("no memory left")

            with monkeypatch.context() as broken:
                broken.setattr(stage.engine.model_executor, "execute_model", fail)
                results = await asyncio.gather(
                    *(ask(pipeline, text_request(f"r{index}")) for index in range(3)), return_exceptions=True
                )
            for index, result in enumerate(results):
                assert isinstance(result, StageError) and f"request r{index}: " in str(result)
                assert "no memory left" in str(result)
            assert (await ask(pipeline, text_request("after"))).text_ids == expected.text_ids

    asyncio.run(run())


def start(setup: Experiment) -> None:
    async def run() -> None:
        async with open_pipeline(setup):
            pass

    asyncio.run(run())


def test_a_checkpoint_with_a_tensor_too_few_names_it(nano: Path, tmp_path: Path) -> None:
    for file in nano.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(nano / "model.safetensors")
    del tensors["thinker.model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(PipelineError, match=r"thinker\.model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing"):
        start(experiment(tmp_path, *INLINE))


def test_a_budget_too_small_for_one_sequence_says_so(nano: Path) -> None:
    with pytest.raises(PipelineError, match="kv_cache_mb 1 does not hold one sequence of max_model_len 1024"):
        start(experiment(nano, *INLINE, "stages.thinker.kv_cache_mb=1"))


def test_text_alone_needs_no_other_stage(nano: Path, texts: list[OracleCase]) -> None:
    requests = [dataclasses.replace(case.request, modalities=("text",)) for case in texts[:8]]
    (result,), measured = answers(experiment(nano, *INLINE, *WHOLE_FIELD), requests, [8])
    for case, answer in zip(texts, result, strict=False):
        assert np.array_equal(answer.text_ids, case.text_ids)
    assert {row.stage for row in measured.steps} == {"thinker"}
