"""How well a checkpoint reads: transformers' own `generate`, heard by whisper tiny.en.

The word error rate is `omni_lab.quality.words.SPELLED`: letters and digits that stand alone count written together.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from omni_lab.quality.ear import Ear
from omni_lab.quality.words import SPELLED, count
from omni_lab.zoo.training import prompts
from omni_lab.zoo.training.pitch import FRAME, RATE


@dataclass(frozen=True)
class Heard:
    text: str
    written: str
    """The Thinker's answer."""
    heard: str
    errors: int
    words: int
    seconds: float


@dataclass(frozen=True)
class Score:
    """Of one set of sentences; rates in percent."""

    sentences: int
    word_error_rate: float
    exact_texts: int
    without_error: int
    worst: float
    too_long: int
    words_per_second: float


def evaluate(
    checkpoint: Path,
    sets: dict[str, list[str]],
    longest: int,
    sound: Path,
    say: Callable[[str], None],
) -> dict[str, Score]:
    """Let the checkpoint read sets of sentences as it is meant to be used, `longest` frames each at most.

    Waveforms are kept under `sound`.
    """
    reader = Reader(checkpoint, longest)
    ear = Ear()
    scores = {}
    for name, texts in sets.items():
        began, results = time.perf_counter(), []
        for index, text in enumerate(texts):
            torch.manual_seed(index)
            written, wave = reader.read(text)
            results.append(listen(ear, text, written, wave))
            file = sound / name / f"{index:03}.wav"
            file.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(file, wave, RATE)
        scores[name] = summary(results, longest)
        say(f"{name}: {json.dumps(asdict(scores[name]))} in {time.perf_counter() - began:.0f} s")
        for result in sorted(results, key=lambda result: -result.errors / result.words)[:3]:
            say(f"    {result.text!r} was heard as {result.heard!r}")
    return scores


class Reader:
    """A checkpoint in transformers, with its default sampling."""

    def __init__(self, checkpoint: Path, longest: int) -> None:
        self.longest = longest
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.voice = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def encode(self, text: str) -> torch.Tensor:
        """Token ids [1, n] of a prompt that asks to read the text."""
        chat: list[dict[str, Any]] = [
            {"role": "system", "content": prompts.SYSTEM},
            {"role": "user", "content": prompts.REQUEST.replace("{}", text)},
        ]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return self.tokenizer(prompt, return_tensors="pt")["input_ids"]

    @torch.no_grad()
    def read(self, text: str) -> tuple[str, np.ndarray]:
        """(the answer, its waveform)."""
        ids = self.encode(text)
        # The large model's end id is an argument's default; the voice's own saves the text after the end.
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        tokens, wave = self.voice.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            thinker_eos_token_id=end,
            thinker_max_new_tokens=self.longest,
            talker_max_new_tokens=self.longest,
        )
        answer = self.tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        return answer, wave.reshape(-1).float().numpy()


def listen(ear: Ear, text: str, written: str, wave: np.ndarray) -> Heard:
    """Compare what is heard with what should be."""
    heard = ear.hear(wave, RATE)
    found = count(SPELLED, text, heard)
    return Heard(text, written, heard, found.errors, found.words, len(wave) / RATE)


def summary(results: list[Heard], longest: int) -> Score:
    """Rates over a whole set, each word counted once."""
    return Score(
        sentences=len(results),
        word_error_rate=round(100 * sum(r.errors for r in results) / sum(r.words for r in results), 1),
        exact_texts=sum(r.written == r.text for r in results),
        without_error=sum(r.errors == 0 for r in results),
        worst=round(100 * max(r.errors / r.words for r in results), 1),
        too_long=sum(r.seconds * RATE >= (longest - 2) * FRAME for r in results),
        words_per_second=round(sum(r.words for r in results) / sum(r.seconds for r in results), 2),
    )
