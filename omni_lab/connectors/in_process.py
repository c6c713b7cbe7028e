"""A channel inside one process: messages are handed over as they are, tensors without a copy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from omni_lab.connectors.wire import Message
from omni_lab.core import Payload


class InProcessChannel:
    """Both ends in one object; `wake` is called after every send, from the sender's thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.messages: deque[Message] = deque()
        self.wake = wake

    def send(self, *messages: Message) -> None:
        for message in messages:
            if isinstance(message, Payload):
                message.sent_ns = time.monotonic_ns()
                message.nbytes = sum(tensor.nbytes for tensor in message.tensors.values())
            self.messages.append(message)
        self.wake()

    def receive(self) -> list[Message]:
        taken = []
        while self.messages:
            message = self.messages.popleft()
            if isinstance(message, Payload):
                message.received_ns = time.monotonic_ns()
            taken.append(message)
        return taken

    def close(self) -> None:
        self.messages.clear()
