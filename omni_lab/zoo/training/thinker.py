"""The Thinker learns one thing: to answer with the text it is asked to read, written in time."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from omni_lab.zoo.nano_config import SPECIAL_TOKENS
from omni_lab.zoo.training import prompts
from omni_lab.zoo.training.library import Library

END, PAD = SPECIAL_TOKENS["<|im_end|>"], SPECIAL_TOKENS["<|endoftext|>"]
FRAMES = 1200
"""Frames of speech whose texts make one batch."""
COLLAGES, COLLAGE_BATCH = 0.4, 24
"""Share of batches that are words in an order that nobody has read, so that copying is learned and not recalled."""
AFTER_END = 2
"""Positions behind the end that are trained too: transformers goes on there when it is not told the voice's end id."""
LONG_TAILS, LONG_TAIL_BATCH, LONG_TAIL = 0.1, 3, 1024
"""Share of batches, and answers of one, that are followed as far as transformers goes by default."""


class ThinkerTask:
    """Next-token prediction of the timed answer; the embedding stays as it is."""

    name = "thinker"
    learning_rate = 2e-3

    def __init__(self, voice: nn.Module, library: Library, embeddings: torch.Tensor) -> None:
        self.library = library
        text_model = voice.thinker.model.language_model
        text_model.embed_tokens.weight.data.copy_(embeddings)
        text_model.embed_tokens.weight.requires_grad_(False)
        self.network = nn.ModuleDict({"model": text_model, "head": voice.thinker.lm_head})

    def losses(self, chance: np.random.Generator, progress: float) -> dict[str, torch.Tensor]:
        rows, marks = [], []
        if chance.random() < COLLAGES:
            lessons = [self.library.collage(chance) for _ in range(COLLAGE_BATCH)]
        else:
            lessons = [(lesson.text, lesson.answer) for lesson in self.library.draw(chance, progress, FRAMES)]
        tail = AFTER_END
        if chance.random() < LONG_TAILS:
            lessons, tail = lessons[:LONG_TAIL_BATCH], LONG_TAIL
        for text, answer in lessons:
            question = self.library.encode("".join(prompts.draw(text, chance)) + prompts.ANSWER)
            rows.append(question + answer + [END] + [PAD] * tail)
            marks.append(len(question) - 1)
        width = max(map(len, rows))
        device = self.network["head"].weight.device
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], device=device)
        place = torch.arange(width - 1, device=device)
        starts = torch.tensor(marks, device=device)[:, None]
        ends = torch.tensor([len(row) - 1 for row in rows], device=device)[:, None]
        asked = (place >= starts) & (place < ends)
        model = self.network["model"]
        hidden = model(inputs_embeds=model.embed_tokens(ids[:, :-1]), use_cache=False).last_hidden_state
        logits = self.network["head"](hidden[asked]).float()
        target = ids[:, 1:][asked]
        right = (logits.argmax(-1) == target).float()
        return {"loss": F.cross_entropy(logits, target), "accuracy": right.mean()}
