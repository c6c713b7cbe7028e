"""One request at work: the replicas that serve it, and what its client has not taken yet."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import torch

from omni_lab.core import Payload

HELD_BYTES = 4 << 20
"""Of payloads that a client has not taken, 44 s of speech. With more, the stages that make sound leave it out."""

PAYLOAD_BYTES = 1 << 10
"""About what a payload costs beside its tensors."""


class Flight:
    """What arrives for a request waits here for its client, in order; an error goes before all of it.

    A client that reads slowly is bounded: `full` tells when to hold the stages that own no cache row and whose input is
    small, and text that comes meanwhile is joined to the text that waits. Text that comes sooner than `text_interval_s`
    after the last is held until then, or until something else comes: each event costs the client's loop the same.
    """

    def __init__(self, name: str, request_id: str, routes: dict[str, int], text_interval_s: float = 0.0) -> None:
        self.name = name
        self.request_id = request_id
        self.routes = routes
        self.text_interval_s = text_interval_s
        self.began = time.monotonic()
        self.held = False
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.size = 0
        self._waiting: deque[Payload] = deque()
        self._text: Payload | None = None
        self._text_due = 0.0
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def full(self) -> bool:
        return self.size > HELD_BYTES

    @property
    def drained(self) -> bool:
        """Enough was taken to go on."""
        return self.size <= HELD_BYTES // 2

    def put(self, payload: Payload) -> None:
        """A payload for the client has arrived."""
        text = "audio" not in payload.tensors
        if text and self._text and (self.full or self.text_interval_s):
            self.size += payload.tensors["token_ids"].nbytes
            join(self._text, payload)
        else:
            self.size += payload.nbytes + PAYLOAD_BYTES
            self._waiting.append(payload)
            if text:
                self._text = payload
        can_wait = text and not payload.final and len(self._waiting) == 1
        early = self._text_due - time.monotonic() if can_wait else 0.0
        if early <= 0.0:
            self._show()
        elif "text" not in self.timers:
            self.timers["text"] = asyncio.get_running_loop().call_later(early, self._show)

    def _show(self) -> None:
        """Nothing is held any more."""
        if timer := self.timers.pop("text", None):
            timer.cancel()
        self._arrived.set()

    async def take(self) -> Payload:
        """The next payload; raises what `fail` was given."""
        while not self._waiting or "text" in self.timers or self._error:
            if self._error:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        payload = self._waiting.popleft()
        if payload is self._text:
            self._text = None
            self._text_due = time.monotonic() + self.text_interval_s
        self.size -= payload.nbytes + PAYLOAD_BYTES
        return payload

    def fail(self, error: Exception) -> None:
        """The request has ended with an error: nothing else is delivered."""
        self._error = self._error or error
        self._waiting.clear()
        self._arrived.set()

    def land(self) -> None:
        """The request is over: nothing is due any more."""
        for timer in self.timers.values():
            timer.cancel()


def join(text: Payload, more: Payload) -> None:
    """Put the tokens of a payload behind those of one that waits."""
    text.tensors["token_ids"] = torch.cat([text.tensors["token_ids"], more.tensors["token_ids"]])
    text.nbytes += more.tensors["token_ids"].nbytes
    text.final, text.finish_reason, text.received_ns = more.final, more.finish_reason, more.received_ns
