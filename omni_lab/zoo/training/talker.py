"""The Talker learns to speak timed text: eight codes a frame from the text so far and the frames so far.

The inputs are those of Qwen3-Omni: the user's turn, nine rows that open the answer, then one row a frame, which is
the sum of the frame's code embeddings and of one token of the answer.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from omni_lab.zoo.nano_config import SPECIAL_TOKENS
from omni_lab.zoo.training import prompts
from omni_lab.zoo.training.codes import ENTRIES_A_BOOK, GROUPS, INFORMATIVE, PITCH_BOOK, SPECTRUM_BOOKS, Codebooks
from omni_lab.zoo.training.library import Lesson, Library
from omni_lab.zoo.training.network import SPEAKER

END, PAD = SPECIAL_TOKENS["<|im_end|>"], SPECIAL_TOKENS["<|endoftext|>"]
TTS_PAD, TTS_BOS = SPECIAL_TOKENS["<tts_pad>"], SPECIAL_TOKENS["<tts_text_bos>"]
TTS_END = SPECIAL_TOKENS["<tts_text_eod>"]

FRAMES = 900
"""Frames of a batch."""
DROPPED, SWAPPED = 0.1, 0.05
"""Share of frames whose codes are hidden from the input, and of codes replaced by another frame's: what the Talker
says must follow from the text, since its own frames will not be the teacher's."""
CONSTANT_FRAMES = 24
"""Frames of a batch on which the constant books are trained; they are learned at once."""
WEIGHTS = {
    "pitch": 1.0,
    "fine_1": 1.0,
    "fine_2": 0.8,
    "fine_3": 0.7,
    "fine_4": 0.6,
    "fine_5": 0.5,
    "fine_6": 0.4,
    "constant": 1.0,
}
"""Of the predictor's informative books, of which the finest are nearly noise, and of all constant books together."""
NORMALIZER = 0.01
"""Weight of the squared logarithm of the softmax's sum. It keeps logits at logarithms of probabilities, so that the
repetition penalty of the Talker's sampling, which multiplies negative logits, leaves likely codes likely."""


class TalkerTask:
    """Cross-entropy of the first code by the decoder and of the other codes by the code predictor, on every frame."""

    name = "talker"
    learning_rate = 1.5e-3

    def __init__(self, voice: nn.Module, library: Library, embeddings: torch.Tensor, codebooks: Codebooks) -> None:
        self.library = library
        self.network = voice.talker
        self.embeddings = embeddings
        config = voice.config.talker_config
        self.end_code = config.codec_eos_token_id
        self.opening = torch.tensor(
            [
                config.codec_nothink_id,
                config.codec_think_bos_id,
                config.codec_think_eos_id,
                SPEAKER,
                config.codec_pad_id,
                config.codec_bos_id,
            ]
        )
        for parameter in self.network.hidden_projection.parameters():
            parameter.requires_grad_(False)  # there is no audio or picture to learn from
        _start_from(self.network, codebooks)

    def losses(self, chance: np.random.Generator, progress: float) -> dict[str, torch.Tensor]:
        network = self.network
        device = network.codec_head.weight.device
        lessons = self.library.draw(chance, progress, FRAMES)
        text = network.text_projection(self.embeddings.to(device))
        heads, tails, targets = zip(*(self._rows(lesson, text, chance) for lesson in lessons), strict=True)
        rows = [torch.cat(pair) for pair in zip(heads, tails, strict=True)]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        hidden = network.model(inputs_embeds=padded, use_cache=False).last_hidden_state
        spoken = [hidden[row, len(head) - 1 : len(rows[row])] for row, head in enumerate(heads)]
        logits = network.codec_head(torch.cat(spoken)).float()
        first = torch.cat([F.pad(codes[:, 0], (0, 1), value=self.end_code) for codes in targets])
        residual = self._residual_losses(torch.cat([part[:-1] for part in spoken]), torch.cat(targets), chance)
        losses = {"first": F.cross_entropy(logits, first)} | dict(zip(WEIGHTS, residual, strict=True))
        losses["normalizer"] = logits.logsumexp(-1).square().mean()
        weights = {"first": 1.0, "normalizer": NORMALIZER} | WEIGHTS
        return losses | {"loss": sum(weight * losses[name] for name, weight in weights.items())}

    def _rows(
        self, lesson: Lesson, text: torch.Tensor, chance: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows before the first frame [P, H], one row a frame [T, H], codes to predict [T, INFORMATIVE])."""
        library, answer = self.library, lesson.answer
        opening = library.encode(prompts.draw(lesson.text, chance)[1] + prompts.ANSWER)
        opening += [TTS_PAD] * 4 + [TTS_BOS, answer[0]]
        device = text.device
        head = text[torch.tensor(opening, device=device)]
        control = self.network.get_input_embeddings()(self.opening.to(device))
        head = head + F.pad(control, (0, 0, len(head) - len(control), 0))
        codes = torch.from_numpy(lesson.codes.astype(np.int64))
        count = len(codes)
        # transformers, not told the voice's end id, feeds the end and padding of the Thinker's answer instead
        ending = [TTS_END, *[TTS_PAD] * count] if chance.random() < 0.9 else [END, *[PAD] * count]
        stream = (answer[1:] + ending)[:count]
        heard = codes.clone()
        swapped = torch.from_numpy(chance.random(codes.shape) < SWAPPED)
        heard[swapped] = codes[torch.from_numpy(chance.integers(count, size=count))][swapped]
        frames = self._embed(heard.to(device))
        frames = frames * torch.from_numpy(chance.random((count, 1)) > DROPPED).to(device)
        return head, frames + text[torch.tensor(stream, device=device)], codes.to(device)

    def _embed(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of a frame's code embeddings; those of the constant books are zero."""
        books = self.network.code_predictor.get_input_embeddings()
        first = self.network.get_input_embeddings()(codes[:, 0])
        return first + sum(books[book - 1](codes[:, book]) for book in range(1, INFORMATIVE))

    def _residual_losses(
        self, hidden: torch.Tensor, codes: torch.Tensor, chance: np.random.Generator
    ) -> list[torch.Tensor]:
        """Of each informative book behind the first one, and of all constant ones together."""
        predictor = self.network.code_predictor
        logits = self._predict(hidden, codes, INFORMATIVE - 1)
        losses = [
            F.cross_entropy(predictor.lm_head[book](logits[:, book]).float(), codes[:, book + 1])
            for book in range(INFORMATIVE - 1)
        ]
        few = torch.from_numpy(chance.integers(len(codes), size=CONSTANT_FRAMES)).to(codes.device)
        states = self._predict(hidden[few].detach(), F.pad(codes[few], (0, GROUPS - INFORMATIVE)), GROUPS - 1)
        constant = torch.stack(
            [predictor.lm_head[book](states[:, book]).float() for book in range(INFORMATIVE - 1, GROUPS - 1)], 1
        )
        zeros = torch.zeros(constant.shape[:2], dtype=torch.int64, device=codes.device)
        return [*losses, F.cross_entropy(constant.flatten(0, 1), zeros.flatten())]

    def _predict(self, hidden: torch.Tensor, codes: torch.Tensor, books: int) -> torch.Tensor:
        """The predictor's states that the heads of the first `books` residual books read, [N, books, H]."""
        predictor = self.network.code_predictor
        embeddings = predictor.get_input_embeddings()
        rows = [hidden, self.network.get_input_embeddings()(codes[:, 0])]
        rows += [embeddings[book - 1](codes[:, book]) for book in range(1, books)]
        return predictor.model(inputs_embeds=torch.stack(rows, 1), use_cache=False).last_hidden_state[:, 1:]


@torch.no_grad()
def _start_from(talker: nn.Module, codebooks: Codebooks) -> None:
    """Codes that sound alike start with embeddings that are alike: the centres, turned at random to the right width."""
    books = talker.code_predictor.get_input_embeddings()
    first = talker.get_input_embeddings()
    width = first.weight.shape[1]
    turn = torch.linalg.qr(torch.randn(width, codebooks.books.shape[2], generator=torch.Generator().manual_seed(3)))[0]
    scale = 0.3 / codebooks.books[0].matmul(turn.T).std()
    for book, centres in zip(SPECTRUM_BOOKS, codebooks.books, strict=True):
        table = first if book == 0 else books[book - 1]
        table.weight[:ENTRIES_A_BOOK] = centres @ turn.T * scale
    books[PITCH_BOOK - 1].weight.normal_(std=0.3, generator=torch.Generator().manual_seed(4))
    for constant in books[INFORMATIVE - 1 :]:
        constant.weight.zero_()
        constant.weight.requires_grad_(False)
