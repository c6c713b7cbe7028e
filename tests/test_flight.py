"""What waits for a client: its order, and text that is held until the next event is due."""

from __future__ import annotations

import asyncio

import pytest
import torch

from omni_lab.core import CLIENT, Payload, StageError
from omni_lab.pipeline.flight import Flight

LONG_S = 60.0


def text(*ids: int, final: bool = False) -> Payload:
    return Payload("r", "thinker", CLIENT, final=final, tensors={"token_ids": torch.tensor(ids)}, nbytes=8 * len(ids))


def audio(index: int = 0) -> Payload:
    return Payload("r", "code2wav", CLIENT, index, tensors={"audio": torch.zeros(4)}, nbytes=16)


def flight(interval_s: float) -> Flight:
    return Flight("r#0", "r", {}, interval_s)


async def begun() -> Flight:
    """A flight whose client has just got its first text: more of it is early."""
    one = flight(LONG_S)
    one.put(text(1))
    await one.take()
    return one


async def taken(one: Flight, *payloads: Payload) -> list[list[int] | int]:
    """What a client gets of payloads that arrive one after another while it reads as fast as it can."""
    got = []

    async def read() -> None:
        while True:
            payload = await one.take()
            tensors = payload.tensors
            got.append(tensors["token_ids"].tolist() if "token_ids" in tensors else payload.index)

    reader = asyncio.create_task(read())
    for payload in payloads:
        one.put(payload)
        for _ in range(3):
            await asyncio.sleep(0)
    reader.cancel()
    return got


def test_without_an_interval_each_token_is_an_event() -> None:
    assert asyncio.run(taken(flight(0.0), text(1), text(2), audio(), text(3, final=True))) == [[1], [2], 0, [3]]


def test_the_first_text_comes_at_once_and_what_follows_too_soon_is_held() -> None:
    assert asyncio.run(taken(flight(LONG_S), text(1), text(2), text(3))) == [[1]]


def test_audio_takes_the_held_text_with_it_in_order() -> None:
    assert asyncio.run(taken(flight(LONG_S), text(1), text(2), text(3), audio(7))) == [[1], [2, 3], 7]


def test_the_end_of_the_text_is_not_held_and_audio_never_is() -> None:
    got = asyncio.run(taken(flight(LONG_S), text(1), audio(0), audio(1), text(2), text(3, final=True), audio(2)))
    assert got == [[1], 0, 1, [2, 3], 2]


def test_held_text_comes_when_it_is_due_though_nothing_else_does() -> None:
    async def run() -> None:
        one = flight(0.01)
        one.put(text(1))
        await one.take()
        one.put(text(2))
        one.put(text(3))
        payload = await asyncio.wait_for(one.take(), LONG_S)
        assert payload.tensors["token_ids"].tolist() == [2, 3] and not one.timers and one.size == 0

    asyncio.run(run())


def test_text_is_not_held_behind_what_a_slow_client_has_not_taken() -> None:
    async def run() -> None:
        one = await begun()
        one.put(audio())
        one.put(text(2))
        assert not one.timers
        assert [(await one.take()).source for _ in range(2)] == ["code2wav", "thinker"]

    asyncio.run(run())


def test_text_that_the_client_has_not_taken_yet_is_joined() -> None:
    async def run() -> None:
        one = flight(LONG_S)
        one.put(text(1))
        one.put(text(2))
        assert (await one.take()).tensors["token_ids"].tolist() == [1, 2] and one.size == 0
        one.put(text(3))
        assert list(one.timers) == ["text"]
        one.land()

    asyncio.run(run())


def test_a_sound_is_not_held_behind_text() -> None:
    async def run() -> None:
        one = await begun()
        one.put(text(2))
        one.put(audio(4))
        one.put(text(3))
        assert not one.timers
        assert (await one.take()).tensors["token_ids"].tolist() == [2, 3] and (await one.take()).index == 4

    asyncio.run(run())


def test_an_error_does_not_wait_for_held_text() -> None:
    async def run() -> None:
        one = await begun()
        one.put(text(2))
        one.fail(StageError("gone"))
        with pytest.raises(StageError, match="gone"):
            await asyncio.wait_for(one.take(), LONG_S)

    asyncio.run(run())
