"""The recipe of `voice`: each part on its own, and every stage in a small form, started and then continued."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from omni_lab.core import PipelineError
from omni_lab.zoo.__main__ import main
from omni_lab.zoo.training import (
    codes,
    corpus,
    evaluation,
    grammar,
    network,
    paces,
    pitch,
    plots,
    recipe,
    speech,
    talker,
    timing,
    work,
)
from omni_lab.zoo.training.library import Lesson

SMALL = recipe.Size(fitted=6, recorded=6, sentences=20, heard=1, heard_at_end=1, repertoire=10, longest=12)
SECONDS = 24
"""Of training in all, for the three networks together."""


def test_rotary_sections_fill_each_stages_own_heads():
    config = network.config()
    for stage in ("thinker_config", "talker_config"):
        text = config[stage]["text_config"]
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        assert 2 * sum(text["rope_parameters"]["mrope_section"]) == head


def test_a_frame_holds_whole_cycles_and_its_pitch_moves():
    all_codes = np.arange(codes.ENTRIES_A_BOOK)
    turns, frequency = pitch.phase(all_codes, pitch.FRAME)
    assert np.all(turns[:, 0] == 0)
    ends = turns[:, -1] + frequency[:, -1] / pitch.RATE
    assert np.abs(ends - np.round(ends)).max() < 2e-3
    rise = frequency[:, -1] - frequency[:, 0]
    assert set(np.sign(rise)) == {-1, 0, 1}


def test_a_glide_becomes_counts_of_cycles_with_slopes():
    seconds = np.arange(20 * pitch.FRAME) / pitch.RATE
    rising = 150 + 100 * seconds
    found = pitch.encode(rising, np.ones(len(rising), bool))
    _, frequency = pitch.phase(found, pitch.FRAME)
    assert np.abs(frequency.ravel() - rising).max() < 15  # a cycle a frame is 12.5 Hz
    assert (frequency[:, -1] >= frequency[:, 0]).all()


def test_grammar_is_large_and_keeps_its_held_out_sentences():
    held_out = grammar.held_out(120)
    assert len(set(held_out)) == 120
    assert grammar.size() > 1_000_000
    drawn = set(corpus.training_sentences(3000, seed=3))
    assert not drawn & set(held_out) and not drawn & set(corpus.repertoire())
    assert not any(grammar.is_held_out(grammar.sentence(random.Random(seed))) for seed in range(200))
    assert corpus.training_sentences(50, seed=3) == corpus.training_sentences(80, seed=3)[:50]


@pytest.mark.parametrize(("number", "words"), [(7, "seven"), (40, "forty"), (315, "three hundred and fifteen")])
def test_numbers_are_spoken(number: int, words: str):
    assert grammar.spoken(number) == words


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--hours", "0"], "--hours: expected a positive number, got 0"),
        (["--stages", "talker, sing"], "--stages: sing is unknown; stages are corpus, codes,"),
        (["--stages", "export"], "stage export: {work}/tokenizer is missing; run the stages before export first"),
        (["--stages", "codec"], "stage codec: {work}/codebooks.pt is missing; run the stages before codec first"),
    ],
)
def test_the_command_says_what_is_wrong(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "voice", "--work", str(tmp_path), *options]) == 2
    assert told.replace("{work}", str(tmp_path)) in capsys.readouterr().err


def test_a_work_folder_is_of_one_recipe_and_one_run(tmp_path: Path) -> None:
    new = tmp_path / "new" / "one"
    with work.held(new), pytest.raises(PipelineError, match=r"another run is in .*one; stop it"):
        work.held(new).__enter__()
    with work.held(new):
        pass
    with pytest.raises(PipelineError, match=r"another recipe began .* \(no VERSION, expected"):
        work.held(tmp_path).__enter__()
    with pytest.raises(PipelineError, match="cannot be made"):
        work.held(new / "VERSION" / "below").__enter__()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> recipe.Recipe:
    """Every stage from nothing, for half of the time."""
    training = recipe.Recipe(tmp_path_factory.mktemp("voice"), SECONDS / 3600, SMALL)
    training.run(rounds=(0.5,))
    return training


def test_every_stage_leaves_its_result(started: recipe.Recipe):
    from transformers import Qwen3OmniMoeForConditionalGeneration

    checkpoint = started.work / "voice"
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 24e6
    _, report = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    (scores,) = _lines(started, "scores.jsonl")
    assert {"repertoire", "held_out", "open"} < scores.keys()
    assert len(list((started.work / "sound").rglob("*.wav"))) == 3
    assert (started.work / "curves.html").stat().st_size > 10_000
    assert (started.work / "spectrograms.html").stat().st_size > 10_000
    assert {line["stage"] for line in _lines(started, "losses.jsonl")} == {"codec", "thinker", "talker"}


def test_training_goes_on_where_it_stopped_and_improves(started: recipe.Recipe):
    before = {line["stage"]: line for line in _lines(started, "losses.jsonl")}
    steps = {name: torch.load(started.work / f"{name}.pt")["step"] for name in before}
    again = recipe.Recipe(started.work, SECONDS / 3600, SMALL)
    again.run(("corpus", "codes", "codec", "paces", "tokenizer", "thinker", "talker"), rounds=(1.0,))
    after = {line["stage"]: line for line in _lines(started, "losses.jsonl")}
    for name, first in before.items():
        assert first["step"] == steps[name] < after[name]["step"]
        assert after[name]["loss"] < first["loss"]


def test_a_sentence_is_read_at_the_pace_at_which_it_is_understood(
    started: recipe.Recipe, monkeypatch: pytest.MonkeyPatch
):
    """The ear understands whatever lasts longer than 1.1 times the usual reading."""
    text = started.repertoire[4]
    usual = len(started.teacher.read(text).pitch)

    class Slow:
        def hear(self, wave: np.ndarray, rate: int) -> str:
            return text if len(wave) > 1.1 * usual * pitch.FRAME else "nothing"

    monkeypatch.setattr(paces, "Ear", Slow)
    decoder = network.build().code2wav
    chosen = paces.choose([text], started.teacher, started.codebooks, decoder, lambda line: None)
    assert chosen == {text: 0.75}
    folder = started.work / "paced"
    for told in (chosen, chosen, {}):
        speech.record(folder, [text], lambda: started.teacher, started.codebooks, False, print, told)
        (utterance,) = speech.utterances(folder)
        assert (len(utterance.codes) > 1.1 * usual) == bool(told)


def test_timed_text_is_the_text(started: recipe.Recipe):
    library = started.library
    for lesson in library.repertoire + library.others:
        spoken = [token for token in lesson.answer if token != network.HOLD_ID]
        assert spoken == library.encode(lesson.text)
        assert library.tokenizer.decode(lesson.answer) == lesson.text
        assert len(lesson.answer) <= len(lesson.codes)
    assert any(network.HOLD_ID in lesson.answer for lesson in library.repertoire)


def test_the_last_batches_are_mostly_of_the_bundled_sentences(started: recipe.Recipe):
    library, chance = started.library, np.random.default_rng(0)
    bundled = {lesson.text for lesson in library.repertoire}

    def share(progress: float) -> float:
        firsts = [library.draw(chance, progress, 1)[0] for _ in range(400)]
        return sum(lesson.text in bundled for lesson in firsts) / len(firsts)

    assert 0.25 < share(0.5) < 0.42 and 0.67 < share(0.99) < 0.83


def test_a_collage_is_a_text_in_time(started: recipe.Recipe):
    library = started.library
    for seed in range(50):
        text, answer = library.collage(np.random.default_rng(seed))
        assert [token for token in answer if token != network.HOLD_ID] == library.encode(text)


def test_words_come_ahead_of_their_sound(started: recipe.Recipe):
    text = "The number is seven three two."
    encoding = started.library.tokenizer.encode(text)
    begins = np.array([2, 4, 9, 12, 20, 30])
    answer = [token for word in timing.timed(text, encoding, begins) for token in word]
    first_tokens = [encoding.char_to_token(text.index(f" {word}")) for word in ("seven", "three", "two")]
    positions = [index for index, token in enumerate(answer) if token != network.HOLD_ID]
    assert [positions[token] for token in first_tokens] == [begin - timing.AHEAD for begin in begins[3:]]


def test_more_books_describe_the_spectrum_better(started: recipe.Recipe):
    features = np.load(started.work / "features.npy").astype(np.float32)
    errors = started.codebooks.error(features)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 2


def test_a_spectrogram_shows_a_rising_tone():
    turns = np.cumsum(np.linspace(500, 2500, 2 * pitch.RATE)) / pitch.RATE
    (picture,) = plots.spectrograms([("rising", np.sin(2 * np.pi * turns))]).data
    loudest = np.asarray(picture.z).argmax(0)[[20, 100, 180]] * picture.dy
    assert loudest == pytest.approx([700, 1500, 2300], abs=60)


class Middle:
    """A source of chance that always gives the middle, or the first: nothing is dropped, swapped or rephrased."""

    def random(self, size: tuple[int, ...] = ()) -> np.ndarray:
        return np.full(size, 0.5)

    def integers(self, limit: int, size: int) -> np.ndarray:
        return np.full(size, limit // 2)

    def choice(self, options: tuple[str, ...]) -> str:
        return options[0]


def test_the_talker_is_trained_on_the_rows_that_transformers_makes(started: recipe.Recipe):
    """Everything that `generate` hands to the Talker, against the rows of a lesson with the Thinker's answer."""
    reader = evaluation.Reader(started.work / "voice", SMALL.longest)
    thought, handed = _recorded(reader.voice.thinker), _recorded(reader.voice.talker)
    text = started.repertoire[3]
    reader.read(text)
    written = thought["result"].sequences[0, thought["input_ids"].shape[1] : -1].tolist()
    assert len(written) == SMALL.longest - 1

    weights = {name: value.clone() for name, value in reader.voice.talker.state_dict().items()}
    task = talker.TalkerTask(reader.voice, started.library, started.embeddings, started.codebooks)
    task.network.load_state_dict(weights)
    lesson = Lesson(text, [written], np.full((len(written) + 2, codes.INFORMATIVE), 3, np.uint8))
    with torch.no_grad():
        table = task.network.text_projection(started.embeddings)
        head, tail, wanted = task._rows(lesson, table, Middle())
        spoken = tail - task._embed(wanted)
    torch.testing.assert_close(head, handed["inputs_embeds"][0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(spoken[: len(written)], handed["trailing_text_hidden"][0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(spoken[len(written) :], handed["tts_pad_embed"][0].expand(2, -1), rtol=0.02, atol=0.02)


def _recorded(part: torch.nn.Module) -> dict:
    """What a part's `generate` is called with, and its result."""
    seen, real = {}, part.generate

    def generate(**arguments: object) -> object:
        seen.update(arguments)
        seen["result"] = real(**arguments)
        return seen["result"]

    part.generate = generate
    return seen


def _lines(training: recipe.Recipe, name: str) -> list[dict]:
    return [json.loads(line) for line in (training.work / name).read_text(encoding="utf-8").splitlines()]
