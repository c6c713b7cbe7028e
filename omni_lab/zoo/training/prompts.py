"""How the voice is asked to read, in training as in use: the chat template written out for one turn."""

from __future__ import annotations

import numpy as np

SYSTEM = "You are a helpful voice assistant."
REQUEST = "Please read: {}"
_SYSTEMS = (SYSTEM, SYSTEM, "You are a helpful assistant.", "")
_REQUESTS = (
    *(REQUEST,) * 6,
    "{}",
    "Please read the text: {}",
    "Please read this sentence aloud: {}",
    "Say: {}",
    "Repeat after me: {}",
    "Read: {}",
)


def draw(text: str, chance: np.random.Generator) -> tuple[str, str]:
    """(system turn, user turn) that ask for a text."""
    system, request = chance.choice(_SYSTEMS), chance.choice(_REQUESTS)
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return head, f"<|im_start|>user\n{request.replace('{}', text)}<|im_end|>\n"


ANSWER = "<|im_start|>assistant\n"
