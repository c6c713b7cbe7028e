"""Every combination of toggles answers as transformers does: pairwise here, all of them in `make test-matrix`.

The fast subset holds all on, all off, and rows in which each pair of toggles takes all four values. Captured steps are
part of the full matrix alone, which compiles several graphs (tests/test_graphs.py has them in the fast suite).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from pathlib import Path

import numpy as np
import pytest

from omni_lab.core import Request, Sampling
from tests.oracle import OracleCase, load_oracle
from tests.pipelines import answers, experiment
from tests.test_oracle import check

TOGGLES = (
    "optimizations.batching",
    "optimizations.async_chunk",
    "optimizations.async_output",
    "optimizations.stateful_code2wav",
    *(
        f"optimizations.hot_path.{key}"
        for key in (
            "decode_only_handoff",
            "row_payloads",
            "code_predictor",
            "resident_state",
            "linear_positions",
            "single_process_executor",
        )
    ),
)
INLINE = ("executor=inline", "connector=in_process", "chunking.left_context=160")
SEEDED = {
    "thinker": Sampling(temperature=1.0, seed=3, max_tokens=12),
    "talker": Sampling(0.9, 50, seed=5, max_tokens=8),
}


def pairwise(count: int, seed: int = 0) -> list[tuple[bool, ...]]:
    """Few rows of `count` switches in which every two switches take all four pairs of values."""
    draw = random.Random(seed)
    missing = {(a, b, x, y) for a, b in itertools.combinations(range(count), 2) for x in (0, 1) for y in (0, 1)}
    rows = [(True,) * count, (False,) * count]
    for row in rows:
        missing -= covered(row)
    while missing:
        candidates = [tuple(draw.random() < 0.5 for _ in range(count)) for _ in range(200)]
        best = max(candidates, key=lambda row: len(missing & covered(row)))
        missing -= covered(best)
        rows.append(best)
    return rows


def covered(row: tuple[bool, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, b, int(row[a]), int(row[b])) for a, b in itertools.combinations(range(len(row)), 2)}


FULL = os.environ.get("OMNI_LAB_MATRIX") == "full"
GRAPHS = "optimizations.graphs={thinker: true, talker: true, code2wav: false}"
ROWS = list(itertools.product((True, False), repeat=len(TOGGLES))) if FULL else pairwise(len(TOGGLES))


@pytest.fixture(scope="module")
def cases() -> list[OracleCase]:
    """Five requests: text, several turns, audio, image and video."""
    oracle = load_oracle()
    kinds = ("text", "turns", "audio", "image", "video")
    return [next(case for case in oracle if case.name.startswith(kind) and case.wave is not None) for kind in kinds]


@pytest.fixture(scope="module")
def seeded(nano: Path, cases: list[OracleCase]) -> list[np.ndarray]:
    """Codes of the sampled answers with everything on."""
    (result,), _ = answers(experiment(nano, *INLINE), [sampled(case) for case in cases], (5,))
    return [answer.codes for answer in result]


def sampled(case: OracleCase) -> Request:
    return dataclasses.replace(case.request, sampling=SEEDED)


def test_pairs_are_all_covered() -> None:
    rows = pairwise(len(TOGGLES))
    pairs = set().union(*map(covered, rows))
    assert len(pairs) == 4 * len(TOGGLES) * (len(TOGGLES) - 1) // 2 and len(rows) < 16


@pytest.mark.parametrize("graphs", [[], [GRAPHS]] if FULL else [[]], ids=["eager", "captured"] if FULL else ["eager"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "".join("01"[on] for on in row))
def test_a_combination_answers_as_transformers_does(
    nano: Path, cases: list[OracleCase], seeded: list[np.ndarray], row: tuple[bool, ...], graphs: list[str]
) -> None:
    switches = (f"{key}={on}".lower() for key, on in zip(TOGGLES, row, strict=True))
    setup = experiment(nano, *INLINE, *graphs, *switches)
    requests = [case.request for case in cases] + [
        dataclasses.replace(sampled(case), id=f"{case.request.id}-sampled") for case in cases
    ]
    (result,), _ = answers(setup, requests, (5,))
    for case, answer in zip(cases, result, strict=False):
        check(case, answer, f"toggles {row}")
    for codes, answer in zip(seeded, result[len(cases) :], strict=True):
        assert np.array_equal(answer.codes, codes), row
