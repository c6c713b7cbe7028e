"""The embedded voice speaks: transformers' own `generate`, its default sampling, heard by a recogniser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_lab import zoo
from omni_lab.quality.ear import Ear
from omni_lab.zoo.training import corpus, evaluation, grammar
from omni_lab.zoo.training.pitch import FRAME

LONGEST = 400


@pytest.fixture(scope="module")
def reader(voice: Path) -> evaluation.Reader:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return evaluation.Reader(voice, LONGEST)


def test_five_sentences_are_understood(reader: evaluation.Reader) -> None:
    texts = corpus.repertoire()[20::50]
    assert len(texts) == 5
    ear, results = Ear(), []
    for seed, text in enumerate(texts):
        torch.manual_seed(seed)
        results.append(evaluation.listen(ear, text, *reader.read(text)))
    score = evaluation.summary(results, LONGEST)
    assert score.word_error_rate <= 10, results
    assert (score.exact_texts, score.too_long) == (5, 0), results


def test_generate_needs_no_special_arguments(reader: evaluation.Reader) -> None:
    """Not told the voice's end id, transformers goes on to its 1,024 tokens: nothing may be written or said there."""
    text = corpus.repertoire()[121]
    ids = reader.encode(text)
    torch.manual_seed(0)
    tokens, wave = reader.voice.generate(input_ids=ids)
    answer = tokens[0, ids.shape[1] :]
    assert len(answer) == 1024 and reader.tokenizer.decode(answer, skip_special_tokens=True) == text
    assert 5 * FRAME < wave.numel() < 60 * FRAME
    heard = evaluation.listen(Ear(), text, text, wave.reshape(-1).float().numpy())
    assert heard.errors == 0, heard


def test_the_listed_sets_are_the_recipes() -> None:
    """Sentences that no training step sees, as a file that experiments can name."""
    lines = zoo.bundled_set().with_name("held_out.lst").read_text(encoding="utf-8").splitlines()
    assert [line.split("|")[3] for line in lines] == grammar.held_out(120)
    assert len(set(corpus.open_english())) == 50
