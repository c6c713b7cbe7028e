"""Stop texts: the text is cut before them wherever tokens end, and the speech ends with the text handed on by then."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from omni_lab.core import Request, RequestError, Sampling
from omni_lab.pipeline.stop import StopText
from tests.pipelines import answers, experiment

CASES = [
    ("hello world", ["wor"], "hello "),
    ("aabaac", ["aac"], "aab"),
    ("a b c", ["c", "b"], "a "),
    ("abc", ["bcd"], "abc"),
    ("ababab", ["abb", "bab"], "a"),
    ("x", ["x"], ""),
    ("nothing", [], "nothing"),
]


@pytest.mark.parametrize(("text", "stops", "shown"), CASES)
def test_every_way_to_cut_a_text_into_pieces_gives_the_same(text, stops, shown):
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, start = [], 0
        for end in [*(index + 1 for index, cut in enumerate(cuts) if cut), len(text)]:
            pieces.append(text[start:end])
            start = end
        stop = StopText(stops)
        told = ""
        for index, piece in enumerate(pieces):
            told += stop.push(piece, index == len(pieces) - 1)
            assert shown.startswith(told)
        assert told == shown
        assert stop.found == (shown != text)


@pytest.mark.parametrize("toggles", [[], ["optimizations.async_chunk=false", "optimizations.async_output=false"]])
def test_a_stop_text_ends_the_answer_in_every_stage(voice, toggles):
    setup = experiment(voice, "executor=inline", *toggles)
    sampling = {"thinker": Sampling(), "talker": Sampling(max_tokens=200)}
    text = "Could you tell me where the nearest train station is?"
    whole = Request("whole", [{"role": "user", "content": f"Please read: {text}"}], sampling=sampling)
    cut = dataclasses.replace(whole, id="cut", stop=(" me",))
    spoken = dataclasses.replace(cut, id="spoken", modalities=("audio",))
    written = dataclasses.replace(cut, id="written", modalities=("text",))
    (full, short, only_speech, only_text), *_ = answers(setup, [whole, cut, spoken, written])[0]
    assert short.text == only_text.text == short.finished.text == full.text.partition(" me")[0] != full.text
    assert short.finished.reasons["text"] == "stop"
    assert short.text_ids == full.text_ids[: len(short.text_ids)]
    assert 0 < len(short.wave) < len(full.wave)
    assert len(only_speech.wave) > 0
    assert not only_speech.text_ids
    assert len(only_speech.wave) < len(full.wave)


def test_stop_texts_are_checked(voice):
    request = Request("1", [{"role": "user", "content": "x"}], stop=("",))
    with pytest.raises(RequestError, match="stop: expected texts"):
        answers(experiment(voice, "executor=inline"), [request])
