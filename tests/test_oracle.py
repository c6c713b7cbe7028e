"""The oracle decides: every answer equals what transformers' generate gives for the request alone.

Text ids and all 16 codes of every frame are equal; waveforms agree within 1e-4 of full scale where the left
context covers the receptive field. A token could only differ by rounding where two logits are closer than NOISE;
the recorded margins tell, and such a difference is reported as a warning instead of passing in silence.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.oracle import OracleCase, load_oracle
from tests.pipelines import Answer, answers, experiment

NOISE = 1e-4
WAVE_TOLERANCE = 1e-4
CONCURRENCIES = (1, 2, 7, 16)
WHOLE_FIELD = ("chunking.left_context=160", "stages.thinker.max_model_len=2048", "stages.talker.max_model_len=2048")
SAMPLES_PER_FRAME, TAIL = 1920, 555


@pytest.fixture(scope="module")
def oracle() -> list[OracleCase]:
    return load_oracle()


def check(case: OracleCase, answer: Answer, setting: str) -> None:
    where = f"{case.name}, {setting}"
    rounded = min(case.margins.values()) < NOISE
    same = answer.text_ids == case.text_ids.tolist() and np.array_equal(answer.codes, case.codes)
    if not same and rounded:
        warnings.warn(f"{where}: a decision within {NOISE} fell the other way; margins {case.margins}", stacklevel=2)
        return
    assert answer.text_ids == case.text_ids.tolist(), f"{where}: text; margins {case.margins}"
    assert np.array_equal(answer.codes, case.codes), f"{where}: codes; margins {case.margins}"
    assert len(answer.wave) == max(0, SAMPLES_PER_FRAME * len(case.codes) - TAIL), f"{where}: samples"
    if case.wave is not None:
        assert np.abs(answer.wave - case.wave).max(initial=0.0) <= WAVE_TOLERANCE, f"{where}: waveform"


def test_the_oracle_is_broad_and_its_decisions_are_clear(oracle: list[OracleCase]) -> None:
    assert len(oracle) >= 30
    assert sum(min(case.margins.values()) < NOISE for case in oracle) <= 2
    kinds = {
        part["type"] for case in oracle for m in case.request.messages for part in m["content"] if type(part) is dict
    }
    assert {"audio", "image", "video"} <= {
        kind.split("_")[-1] if "input" in kind else kind.split("_")[0] for kind in kinds
    }


@pytest.mark.parametrize("executor, connector", [("inline", "in_process"), ("process", "shared_memory")])
@pytest.mark.parametrize("async_chunk", [True, False], ids=["chunked", "whole"])
def test_answers_equal_transformers(
    nano, oracle: list[OracleCase], executor: str, connector: str, async_chunk: bool
) -> None:
    setup = experiment(
        nano,
        f"executor={executor}",
        f"connector={connector}",
        f"optimizations.async_chunk={async_chunk}",
        f"optimizations.async_output={async_chunk}",
        *WHOLE_FIELD,
    )
    results, _ = answers(setup, [case.request for case in oracle], CONCURRENCIES)
    for concurrency, result in zip(CONCURRENCIES, results, strict=True):
        for case, answer in zip(oracle, result, strict=True):
            check(case, answer, f"{executor}, concurrency {concurrency}")


def test_transformers_answers_in_two_workers(nano, oracle: list[OracleCase]) -> None:
    """As the reference that uses both cores; each worker answers its share."""
    stage = "{engine: transformers, replicas: 2}"
    setup = experiment(
        nano,
        "executor=inline",
        "connector=in_process",
        f"stages={{thinker: {stage}, talker: {stage}, code2wav: {stage}}}",
    )
    cases = sorted(oracle, key=lambda case: len(case.codes))[:4]
    (result,), measured = answers(setup, [case.request for case in cases], (4,))
    for case, answer in zip(cases, result, strict=True):
        check(case, answer, "two workers")
    assert {row.replica for row in measured.steps if row.kind == "generate"} == {0, 1}


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizations.batching=false"],
        ["stages.thinker.replicas=2", "stages.talker.replicas=2", "stages.code2wav.replicas=2"],
        ["optimizations.async_output=false"],
        ["chunking.initial_frames=1", "chunking.frames=3"],
        ["chunking.ramp=[2,5,9]"],
        ["chunking.text_tokens=[1,2,4]"],
    ],
    ids=["one at a time", "replicas", "sync output", "small chunks", "ramp", "text chunks"],
)
def test_no_option_changes_the_answer(nano, oracle: list[OracleCase], overrides: list[str]) -> None:
    setup = experiment(nano, "executor=inline", "connector=in_process", *WHOLE_FIELD, *overrides)
    (result,), _ = answers(setup, [case.request for case in oracle], [7])
    for case, answer in zip(oracle, result, strict=True):
        check(case, answer, str(overrides))
