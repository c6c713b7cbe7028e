"""Sampling: transformers' filters, and draws that belong to the request and to nobody else."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_lab.core import Sampling
from omni_lab.engine.sampler import Sampler, draw, draw_residual

VOCABULARY = 50


def run(sampler: Sampler, rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Tokens of the rows over all steps of `logits` [steps, B, V]."""
    picked = []
    for step in logits:
        tokens = sampler.pick(step)
        sampler.commit(list(range(len(step))), tokens)
        picked.append(tokens.tolist())
    return [[tokens[row] for tokens in picked] for row in rows]


def sampler_for(samplings: list[Sampling]) -> Sampler:
    sampler = Sampler(len(samplings), VOCABULARY, stop_token=3, max_tokens=64)
    for row, sampling in enumerate(samplings):
        sampler.assign(row, sampling)
    return sampler


def test_greedy_with_all_filters_equals_transformers() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 1, VOCABULARY) * 3
    sampling = Sampling(repetition_penalty=1.3, min_tokens=30, max_tokens=64)
    (ours,) = run(sampler_for([sampling]), [0], logits.clone())
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            MinNewTokensLengthLogitsProcessor(0, 30, 3),
        ]
    )
    ids = torch.zeros(1, 0, dtype=torch.int64)
    for step in logits:
        ids = torch.cat([ids, processors(ids, step.clone()).argmax(-1, keepdim=True)], 1)
    assert ours == ids[0].tolist()
    assert 3 not in ours[:30]


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.6), (0.9, 20, 0.8)])
def test_draws_follow_the_distribution_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, VOCABULARY) * 2
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = LogitsProcessorList(warpers)(None, logits.clone()).softmax(-1)[0]
    count = 20000
    uniform = (torch.arange(count) + 0.5) / count
    parameters = (torch.tensor([[temperature]]), torch.tensor([[top_k]]), torch.tensor([[top_p]]))
    tokens = draw(logits.expand(count, -1), *(p.expand(count, 1) for p in parameters), uniform)
    frequency = torch.bincount(tokens, minlength=VOCABULARY) / count
    assert (frequency - expected).abs().max() < 2e-4
    assert not frequency[expected == 0].any()


def test_a_request_draws_the_same_alone_and_in_any_batch() -> None:
    torch.manual_seed(2)
    logits = torch.randn(30, 5, VOCABULARY)
    samplings = [
        Sampling(temperature=0.9, top_k=10, seed=11, max_tokens=64),
        Sampling(max_tokens=64),
        Sampling(temperature=1.5, top_p=0.7, seed=12, repetition_penalty=1.2, max_tokens=64),
        Sampling(temperature=0.5, seed=13, max_tokens=64),
        Sampling(temperature=0.9, top_k=10, seed=11, max_tokens=64),
    ]
    together = run(sampler_for(samplings), list(range(5)), logits)
    for row, sampling in enumerate(samplings):
        assert run(sampler_for([sampling]), [0], logits[:, row : row + 1]) == [together[row]]
    assert together[1] == logits[:, 1].argmax(-1).tolist()


def test_a_moved_row_goes_on_as_if_nothing_happened() -> None:
    torch.manual_seed(3)
    logits = torch.randn(20, 1, VOCABULARY)
    sampling = Sampling(temperature=1.0, top_k=20, seed=5, repetition_penalty=1.3, max_tokens=64)
    (whole,) = run(sampler_for([sampling]), [0], logits)
    sampler = sampler_for([Sampling(), sampling])
    first = [run(sampler, [1], torch.cat([step[None], step[None]], 1))[0][0] for step in logits[:8]]
    sampler.move(1, 0)
    (rest,) = run(sampler, [0], logits[8:])
    assert first + rest == whole


def test_rows_that_do_not_take_part_keep_their_draws() -> None:
    torch.manual_seed(4)
    logits = torch.randn(10, 2, VOCABULARY)
    samplings = [Sampling(temperature=1.0, seed=1, max_tokens=64), Sampling(temperature=1.0, seed=2, max_tokens=64)]
    alone = run(sampler_for([samplings[1]]), [0], logits[5:, 1:])
    sampler = sampler_for(samplings)
    for step in logits[:5]:
        sampler.commit([0], sampler.pick(step)[:1])
    assert run(sampler, [1], logits[5:]) == alone


def test_residual_codes_draw_from_the_frame_they_belong_to() -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 1, VOCABULARY)

    def frames(extra_rows: int) -> list[list[int]]:
        sampler = Sampler(1 + extra_rows, VOCABULARY, stop_token=3, max_tokens=8, columns=16)
        for row in range(1 + extra_rows):
            sampler.assign(row, Sampling(temperature=0.9, seed=7 + row, max_tokens=8))
        out = []
        for step in logits:
            tokens = sampler.pick(step.expand(1 + extra_rows, -1))
            sampler.commit(list(range(1 + extra_rows)), tokens)
            pick = sampler.residual(1 + extra_rows, 50, 0.8)
            residual = [pick(step.expand(1 + extra_rows, -1), group)[0].item() for group in (1, 2, 15)]
            out.append([tokens[0].item(), *residual])
        return out

    assert frames(0) == frames(3)
    assert len({tuple(frame) for frame in frames(0)}) == 4


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    logits = torch.randn(2, VOCABULARY)
    sampler = Sampler(2, VOCABULARY, stop_token=3, max_tokens=8, columns=16)
    sampler.assign(0, Sampling(max_tokens=8))
    sampler.assign(1, Sampling(temperature=2.0, seed=1, max_tokens=8))
    sampler.commit([0, 1], sampler.pick(logits))
    assert sampler.residual(2, 50, 0.8)(logits, 3)[0] == logits[0].argmax()


@pytest.mark.parametrize("top_k, top_p", [(50, 0.8), (5, 0.6), (8, 0.99)])
def test_residual_draws_are_those_of_draw(top_k: int, top_p: float) -> None:
    torch.manual_seed(6)
    logits = torch.randn(2000, VOCABULARY) * 2
    uniform = torch.rand(2000)
    columns = torch.ones(2000, 1), torch.full((2000, 1), top_k), torch.full((2000, 1), top_p)
    expected = draw(logits, *columns, uniform)
    assert torch.equal(draw_residual(logits, top_k, top_p, uniform[:, None].double()), expected)
