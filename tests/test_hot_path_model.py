"""The off sides of the hot-path toggles inside the stages: another way to the same answer, really taken."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration as TheirPredictor,
)

from omni_lab.assemble import open_pipeline
from omni_lab.engine.rows import HostRows, ResidentRows
from omni_lab.models.qwen3_omni.rotary import MultimodalRotation
from tests.oracle import OracleCase, load_oracle
from tests.pipelines import Answer, answers, ask_all, experiment
from tests.test_oracle import WHOLE_FIELD, check
from tests.test_pipeline import INLINE, request, sampled

EAGER = "optimizations.graphs={thinker: false, talker: false, code2wav: false}"
TOGGLES = ("code_predictor", "linear_positions", "resident_state")
OFF = [*((toggle,) for toggle in TOGGLES), TOGGLES]
MIXED = ("text_ends", "turns_two", "audio_half_second", "image_exact", "video_between_positions")
SAMPLED = [sampled(f"sampled{index}", 10 * index, "Tell me about the sea.") for index in range(4)]


@pytest.fixture(scope="module")
def cases() -> list[OracleCase]:
    return [case for case in load_oracle() if case.name in MIXED]


def run(nano: Path, cases: list[OracleCase], off: tuple[str, ...]) -> list[Answer]:
    """Greedy and sampled requests side by side, four at a time; each toggle of `off` is off."""
    overrides = [f"optimizations.hot_path.{toggle}=false" for toggle in off]
    chunks = ("chunking.initial_frames=40", "chunking.frames=40")
    setup = experiment(nano, *INLINE, EAGER, *WHOLE_FIELD, *chunks, *overrides)
    (result,), _ = answers(setup, [*(case.request for case in cases), *SAMPLED], [4])
    return result


@pytest.fixture(scope="module")
def all_on(nano: Path, cases: list[OracleCase]) -> list[Answer]:
    return run(nano, cases, ())


@pytest.mark.parametrize("off", OFF, ids="+".join)
def test_the_off_sides_answer_alike(
    nano: Path, cases: list[OracleCase], all_on: list[Answer], off: tuple[str, ...]
) -> None:
    result = run(nano, cases, off)
    assert len(cases) == len(MIXED)
    for case, answer in zip(cases, result, strict=False):
        check(case, answer, f"off: {off}")
    for answer, expected in zip(result[len(cases) :], all_on[len(cases) :], strict=True):
        assert answer.text_ids == expected.text_ids and len(answer.text_ids) > 1
        assert np.array_equal(answer.codes, expected.codes) and len(answer.codes)
    assert len({answer.codes.tobytes() for answer in result[len(cases) :]}) == len(SAMPLED)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """How often each off side's own work was done; the work is done all the same."""
    counts: Counter = Counter()

    def count(toggle: str, owner: type, name: str) -> None:
        original: Callable = getattr(owner, name)

        def counted(self, *args, **kwargs):
            counts[toggle] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count("code_predictor", TheirPredictor, "generate")
    count("passes", TheirPredictor, "forward")
    count("linear_positions", MultimodalRotation, "at")
    count("resident_state", HostRows, "batch")
    return counts


@pytest.mark.parametrize("off", [(), *OFF], ids=lambda off: "+".join(off) or "none")
def test_each_step_takes_the_named_part_and_no_other(nano: Path, calls: Counter, off: tuple[str, ...]) -> None:
    """Once a Talker step: transformers' generate and positions on three axes; once a step of either: state gathered."""
    setup = experiment(nano, *INLINE, EAGER, *(f"optimizations.hot_path.{toggle}=false" for toggle in off))

    async def steps() -> Counter:
        async with open_pipeline(setup) as pipeline:
            await ask_all(pipeline, [request("one", text=5, frames=6), request("two", text=3, frames=4)], 2)
            measured = await pipeline.take_records()
            return Counter(row.stage for row in measured.steps if row.kind == "decode")

    taken = asyncio.run(steps())
    assert taken["talker"] >= 6 and taken["thinker"] >= 4
    expected = {"code_predictor": taken["talker"], "linear_positions": taken["talker"], "resident_state": taken.total()}
    for toggle in TOGGLES:
        assert calls[toggle] == (expected[toggle] if toggle in off else 0), toggle
    assert calls["passes"] == 15 * calls["code_predictor"]


@pytest.mark.parametrize("axes, width", [((), 0), ((3,), 5)])
def test_rows_on_the_host_hold_what_resident_rows_hold(axes: tuple[int, ...], width: int) -> None:
    rows, device, draw = 6, torch.device("cpu"), random.Random(0)
    kinds = [kind(rows, device, axes, width) for kind in (ResidentRows, HostRows)]
    for row in range(rows):
        token, position, hidden = torch.tensor(row), torch.tensor(7 + row / 3), torch.randn(width)
        for kind in kinds:
            kind.enter(row, token, position, 4 + row, hidden if width else None)
    for step in range(40):
        taking = sorted(draw.sample(range(rows), draw.randint(1, rows)))
        tokens, hidden = torch.randint(0, 99, (len(taking),)), torch.randn(len(taking), width)
        source, target = draw.sample(range(rows), 2)
        for kind in kinds:
            kind.advance(taking, tokens, hidden if width else None)
            if step % 5 == 4:
                kind.move(source, target)
            if step % 9 == 8:
                kind.clear(source)
        for count in (1, rows):
            for name, resident, host in zip(kinds[0].batch(1)._fields, *(k.batch(count) for k in kinds), strict=True):
                assert resident.dtype == host.dtype and torch.equal(resident, host), name
        assert [kinds[0].length(row) for row in range(rows)] == [kinds[1].length(row) for row in range(rows)]
