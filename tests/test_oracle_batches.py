"""Why the oracle is transformers with a batch of one: its batches of chats of different lengths answer differently.

Everything is greedy. The longest chat of a batch needs no padding and serves as control: it answers as it does alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.make_oracle import STOP_TOKEN, Reference
from tests.oracle.requests import user

pytestmark = pytest.mark.filterwarnings("ignore:Passing .repetition_penalty. with")

LONG = [user("The third one turns the numbers into sound, so that somebody far away can listen to it.")]
SHORT = [user("Once upon a time.")]
ENDS = [user("door first")]
"""A chat to which `nano` answers with seven tokens and the end of the text."""


@pytest.fixture(scope="module")
def reference(nano: Path) -> Reference:
    return Reference(nano)


def answers(
    reference: Reference, chats: list[list[dict]], text: int, frames: int, **options: float
) -> list[tuple[list, torch.Tensor]]:
    """Text ids up to the end, and codes [16, frames], of each chat of a left-padded batch."""
    rows = [reference.inputs(chat)["input_ids"][0] for chat in chats]
    width = max(map(len, rows))
    ids = torch.stack([torch.cat([row.new_full((width - len(row),), 1000), row]) for row in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
    codes: list[torch.Tensor] = []
    original = reference.model.code2wav.chunked_decode
    reference.model.code2wav.chunked_decode = lambda batch, **more: (codes.append(batch), original(batch, **more))[1]
    try:
        result, _ = reference.model.generate(
            input_ids=ids,
            attention_mask=mask,
            thinker_max_new_tokens=text,
            thinker_eos_token_id=STOP_TOKEN,
            thinker_pad_token_id=1000,
            thinker_do_sample=False,
            talker_max_new_tokens=frames + 1,
            talker_do_sample=False,
            **options,
        )
    finally:
        del reference.model.code2wav.chunked_decode
    texts = [[token for token in row if token != 1000] for row in result[:, width:].tolist()]
    return list(zip(texts, codes[0], strict=True))


def first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The first codec frame in which two answers differ."""
    frames = min(one.shape[1], other.shape[1])
    differing = (one[:, :frames] != other[:, :frames]).any(0).nonzero().flatten()
    return int(differing[0]) if len(differing) else None


def test_padded_row_escapes_the_repetition_penalty(reference: Reference) -> None:
    """The processor skips as many generated codes as the row has padding, since its prompt holds no token ids.

    A strong penalty shows it within a few frames; without a penalty the same two rows agree.
    """
    limits = {"text": 8, "frames": 10}
    control, padded = answers(reference, [LONG, SHORT], **limits, talker_repetition_penalty=1.5)
    [alone] = answers(reference, [LONG], **limits, talker_repetition_penalty=1.5)
    assert control[0] == alone[0] and first_difference(control[1], alone[1]) is None
    [alone] = answers(reference, [SHORT], **limits, talker_repetition_penalty=1.5)
    assert padded[0] == alone[0] and first_difference(padded[1], alone[1]) == 7

    _, padded = answers(reference, [LONG, SHORT], **limits, talker_repetition_penalty=1.0)
    [alone] = answers(reference, [SHORT], **limits, talker_repetition_penalty=1.0)
    assert padded[0] == alone[0] and first_difference(padded[1], alone[1]) is None


def test_row_whose_text_ends_first_hears_its_end_one_frame_late(reference: Reference) -> None:
    """Alone, the end of the text takes the place of the stop token; in a batch it comes after the stop token."""
    limits = {"text": 12, "frames": 10, "talker_repetition_penalty": 1.0}
    _, padded = answers(reference, [LONG, ENDS], **limits)
    [alone] = answers(reference, [ENDS], **limits)
    assert padded[0] == alone[0] and padded[0].index(STOP_TOKEN) == 7
    assert first_difference(padded[1], alone[1]) == 7
