"""The whole training in rounds: every stage for a part of its time, then a checkpoint that can be listened to.

A stage looks at what the work folder holds and goes on from there, so the recipe can be killed at any moment and
started again:

    features.npy codebooks.pt tokenizer/    made once
    paces.json                              made once: bundled sentences that are read at another pace
    recordings/                             what the teacher read for the codec, with waveforms
    repertoire/                             what it read of the bundled sentences, for all three networks
    sentences/                              what it read for Thinker and Talker: texts, word times, codes
    codec.pt thinker.pt talker.pt           states of training
    losses.jsonl curves.html                curves
    voice/ scores.jsonl sound/              the checkpoint, and how it read after each round
    spectrograms.html                       its sound beside the teacher's
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import soundfile
import torch
from tokenizers import Tokenizer

from omni_lab.zoo import nano_tokenizer
from omni_lab.zoo.training import (
    codes,
    corpus,
    evaluation,
    grammar,
    network,
    paces,
    plots,
    speech,
    tokenizer,
    trainer,
    work,
)
from omni_lab.zoo.training.codec import CodecTask, averaged_decoder
from omni_lab.zoo.training.codes import Codebooks
from omni_lab.zoo.training.export import export
from omni_lab.zoo.training.library import Library
from omni_lab.zoo.training.talker import TalkerTask
from omni_lab.zoo.training.teacher import Teacher
from omni_lab.zoo.training.thinker import ThinkerTask

STAGES = ("corpus", "codes", "codec", "paces", "tokenizer", "thinker", "talker", "export", "evaluate")
SHARES = {"codec": 0.44, "thinker": 0.1, "talker": 0.46}
"""Of the hours."""
ROUNDS = (0.06, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Portions of the hours after which a checkpoint is written and heard."""

PACES_FROM = 0.8
"""The part of the hours from which it is judged how Code2Wav sounds."""

WORTH_COMPILING = 600
"""Seconds of training from which compiling the decoder's activations pays."""


@dataclass(frozen=True)
class Size:
    """How much is read and heard."""

    fitted: int
    """Sentences that the codebooks are fitted on, beside the repertoire."""
    recorded: int
    """Sentences with waveforms, for the codec."""
    sentences: int
    """Sentences for Thinker and Talker in the last round; each round adds its part."""
    heard: int
    """Sentences of each set that are heard after a round."""
    heard_at_end: int | None
    """The same after the last round; None: all."""
    paces: bool = True
    """Whether bundled sentences are read again at other paces, once Code2Wav has had most of its time."""
    repertoire: int | None = None
    """Of the bundled sentences; None: all."""
    longest: int = 400
    """Frames after which a reading is cut off."""

    @classmethod
    def for_hours(cls, hours: float) -> Size:
        """More hours learn from more sentences; in a few minutes there is time to hear four of each set."""
        scale = min(2.0, hours / 5)
        long = hours >= 1
        return cls(
            fitted=1200,
            recorded=max(200, round(2500 * scale)),
            sentences=max(500, round(18000 * scale)),
            heard=40 if long else 4,
            heard_at_end=None if long else 4,
            paces=long,
        )


class Recipe:
    """One training in one work folder."""

    def __init__(
        self, folder: Path, hours: float, size: Size | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.work, self.seconds, self.size, self.say = folder, hours * 3600, size or Size.for_hours(hours), say
        torch.manual_seed(0)

    def run(self, stages: tuple[str, ...] = STAGES, rounds: tuple[float, ...] | None = None) -> None:
        """Every stage in every round that has not been heard yet. Less than an hour is one round.

        With `rounds` given, those are run whatever has been done. Raises PipelineError if the work folder cannot be
        used, or lacks what a stage needs of those before it.
        """
        hours = self.seconds / 3600
        with work.held(self.work):
            done = max((line["hours"] for line in plots.lines(self.work / "scores.jsonl")), default=0.0)
            if not rounds:
                rounds = tuple(part for part in (ROUNDS if hours >= 1 else ROUNDS[-1:]) if done < part * hours)
            if not rounds:
                self.say(f"{done:.3g} hours are done and heard; give more --hours to go on")
            for portion in rounds:
                self.say(f"round up to {portion:.0%} of {hours:g} hours")
                for stage in stages:
                    work.check(self.work, stage)
                    getattr(self, stage)(portion)

    def corpus(self, portion: float) -> None:
        """The features that the codebooks are fitted on."""
        file = self.work / "features.npy"
        if file.exists():
            return
        texts = self.repertoire + corpus.training_sentences(self.size.fitted, seed=1)
        self.say(f"corpus: the teacher reads {len(texts)} sentences")
        scratch = file.with_suffix(".tmp.npy")
        np.save(scratch, speech.features(self.teacher, texts).astype(np.float16))
        os.replace(scratch, file)

    def codes(self, portion: float) -> None:
        """The codebooks; then recordings as codes, of more sentences in every round."""
        file = self.work / "codebooks.pt"
        if not file.exists():
            features = np.load(self.work / "features.npy").astype(np.float32)
            books = codes.fit(features)
            errors = ", ".join(f"{error:.3f}" for error in books.error(features))
            self.say(f"codes: rms error of log amplitudes with one book, two, and so on: {errors}")
            books.save(file)
        sentences = corpus.training_sentences(round(portion * self.size.sentences), seed=3)
        self._record_repertoire()
        for folder, texts, waves in (
            ("recordings", corpus.training_sentences(self.size.recorded, seed=2), True),
            ("sentences", sentences, False),
        ):
            speech.record(self.work / folder, texts, lambda: self.teacher, self.codebooks, waves, self.say)

    def codec(self, portion: float) -> None:
        """Code2Wav."""
        folders = self.work / "repertoire", self.work / "recordings"
        long_enough = SHARES["codec"] * self.seconds > WORTH_COMPILING
        self._train(CodecTask(network.build(), *folders, self.codebooks, long_enough), portion)

    def paces(self, portion: float) -> None:
        """Bundled sentences that Code2Wav does not make understood are read at another pace."""
        if not self.size.paces or portion < PACES_FROM or self._paces_file.exists():
            return
        decoder = network.build().code2wav
        decoder.load_state_dict(averaged_decoder(self.work))
        chosen = paces.choose(self.repertoire, self.teacher, self.codebooks, decoder, self.say)
        scratch = self._paces_file.with_suffix(".tmp")
        scratch.write_text(json.dumps(chosen, indent=1), encoding="utf-8")
        os.replace(scratch, self._paces_file)
        self._record_repertoire()

    def tokenizer(self, portion: float) -> None:
        """The pieces of text."""
        folder, scratch = self.work / "tokenizer", self.work / ".tokenizer"
        if folder.exists():
            return
        texts = self.repertoire * 3 + corpus.training_sentences(6000, seed=3)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        nano_tokenizer.save(tokenizer.train(texts), scratch)
        scratch.rename(folder)

    def thinker(self, portion: float) -> None:
        """Text in, timed text out."""
        self._train(ThinkerTask(network.build(), self.library, self.embeddings), portion)

    def talker(self, portion: float) -> None:
        """Timed text in, codes out."""
        self._train(TalkerTask(network.build(), self.library, self.embeddings, self.codebooks), portion)

    def export(self, portion: float) -> None:
        """The checkpoint of this round."""
        export(self.work, self.work / "voice")

    def evaluate(self, portion: float) -> None:
        """Read sentences of the repertoire, of the grammar's held-out part, and of open English."""
        count = self.size.heard if portion < 1 else self.size.heard_at_end
        sets = {
            "repertoire": self.repertoire[:: len(self.repertoire) // count][:count] if count else self.repertoire,
            "held_out": grammar.held_out(count or 120),
            "open": corpus.open_english()[:count],
        }
        scores = evaluation.evaluate(self.work / "voice", sets, self.size.longest, self.work / "sound", self.say)
        page = self.work / "spectrograms.html"
        plots.spectrograms(self._beside_the_teacher(sets)).write_html(page, include_plotlyjs=True)
        used = {line["stage"]: line["seconds"] for line in plots.lines(self.work / "losses.jsonl")}
        hours = min(used[stage] / share for stage, share in SHARES.items()) / 3600
        line = {"hours": hours} | {name: asdict(score) for name, score in scores.items()}
        with (self.work / "scores.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        plots.curves(self.work)

    def _beside_the_teacher(self, sets: dict[str, list[str]]) -> list[tuple[str, np.ndarray]]:
        """The first sentence of each set in both voices."""
        sounds = []
        for name, texts in sets.items():
            reading = self.teacher.read(texts[0])
            patterns = codes.noise_pattern(self.codebooks.encode(reading.features, reading.pitch))
            sounds.append((f"teacher: {texts[0]}", self.teacher.wave(reading, patterns)))
            sounds.append((f"voice: {texts[0]}", soundfile.read(self.work / "sound" / name / "000.wav")[0]))
        return sounds

    def _record_repertoire(self) -> None:
        file = self._paces_file
        chosen = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        folder, texts = self.work / "repertoire", self.repertoire
        speech.record(folder, texts, lambda: self.teacher, self.codebooks, True, self.say, chosen)

    def _train(self, task: trainer.Task, portion: float) -> None:
        budget = SHARES[task.name] * self.seconds
        trainer.train(task, self.work, budget, portion, self.say)
        plots.curves(self.work)

    @property
    def _paces_file(self) -> Path:
        return self.work / "paces.json"

    @property
    def repertoire(self) -> list[str]:
        return corpus.repertoire()[: self.size.repertoire]

    @cached_property
    def teacher(self) -> Teacher:
        return Teacher()

    @property
    def codebooks(self) -> Codebooks:
        return Codebooks.load(self.work / "codebooks.pt")

    @property
    def library(self) -> Library:
        return Library(self.work, self._pieces)

    @property
    def embeddings(self) -> torch.Tensor:
        return tokenizer.embeddings(self._pieces)

    @property
    def _pieces(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.work / "tokenizer" / "tokenizer.json"))
