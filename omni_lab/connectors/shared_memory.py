"""A channel between two processes: a ring of bytes in shared memory and a socket as its doorbell.

The memory is a file without a name and the socket a pair, both handed to the child by descriptor, so there is
nothing in the file system to clean up: when the last process ends, however it ends, the kernel takes all back.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import tempfile
import threading
import time

from omni_lab.connectors.wire import ALIGNMENT, Message, decode, encode, padding
from omni_lab.core import Payload

HEADER = 64
JOINED = 4096
"""Up to so many bytes the parts of a message are joined and written at once."""
SKIP = (1 << 64) - 1
CAPACITY = 64 << 20
"""Bytes of one ring; pages that no message has touched cost nothing."""

RESTART = 4 << 20
"""An empty ring starts over after this many bytes, on pages that were touched before."""


class ChannelClosed(ConnectionError):
    """The process at the other end is gone."""


class ChannelFull(TimeoutError):
    """The receiver took nothing for the whole time allowed."""


class MessageTooLarge(ChannelFull):
    """The message is larger than the ring."""


def create_channel(capacity: int = CAPACITY) -> tuple[int, int, int]:
    """Descriptors of a new channel: (memory, sender's socket, receiver's socket)."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("omni_lab")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, HEADER + capacity)
    left, right = socket.socketpair()
    return memory, left.detach(), right.detach()


class Ring:
    """`head` and `tail` count bytes ever written and read; one process writes each.

    Each is one aligned word, written in one piece and after the bytes it counts: whenever a process is killed, the ring
    is whole, and another process can go on at its end.
    """

    def __init__(self, memory: int, doorbell: int) -> None:
        self.map = mmap.mmap(memory, 0)
        self.capacity = len(self.map) - HEADER
        self.doorbell = socket.socket(fileno=doorbell)
        self.doorbell.setblocking(False)

    @property
    def head(self) -> int:
        return struct.unpack_from("Q", self.map, 0)[0]

    @head.setter
    def head(self, value: int) -> None:
        struct.pack_into("Q", self.map, 0, value)

    @property
    def tail(self) -> int:
        return struct.unpack_from("Q", self.map, 8)[0]

    @tail.setter
    def tail(self, value: int) -> None:
        struct.pack_into("Q", self.map, 8, value)

    def fileno(self) -> int:
        return self.doorbell.fileno()

    def close(self) -> None:
        self.doorbell.close()
        self.map.close()


class Sender(Ring):
    """The writing end. A message lies in one piece: where the ring's end is too near, it is skipped."""

    def __init__(self, memory: int, doorbell: int, timeout_s: float = 60.0) -> None:
        super().__init__(memory, doorbell)
        self.timeout_s = timeout_s
        self.lock = threading.Lock()

    def send(self, *messages: Message) -> None:
        """Copy the messages into the ring and ring the bell once; waits for space at most `timeout_s` seconds."""
        with self.lock:
            for message in messages:
                if isinstance(message, Payload):
                    message.sent_ns = time.monotonic_ns()
                self._write(encode(message))
        self._ring()

    def _write(self, parts: list[bytes | memoryview]) -> None:
        size = sum(map(len, parts))
        if size + 2 * ALIGNMENT > self.capacity // 2:
            raise MessageTooLarge(f"a message of {size} bytes is too large for a channel of {self.capacity} bytes")
        record = ALIGNMENT + size + padding(size)
        start = self._reserve(record)
        struct.pack_into("<Q", self.map, start, size)
        offset = start + ALIGNMENT
        if size <= JOINED:
            parts = [b"".join(parts)]
        for part in parts:
            self.map[offset : offset + len(part)] = part
            offset += len(part)
        self.head += record

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full socket means that the receiver has yet to wake
            try:
                self.doorbell.send(b"\1")
            except (BrokenPipeError, ConnectionResetError):
                raise ChannelClosed("the receiving process is gone") from None

    def _reserve(self, size: int) -> int:
        """Wait until `size` bytes in one piece are free; the place where they begin."""
        head = self.head
        position = head % self.capacity
        rest = self.capacity - position
        start_over = self.tail == head and position >= max(size, RESTART)
        if rest < size or start_over:
            self._wait(head, rest)
            struct.pack_into("<Q", self.map, HEADER + position, SKIP)
            self.head = head = head + rest
        self._wait(head, size)
        return HEADER + head % self.capacity

    def _wait(self, head: int, size: int) -> None:
        if head + size - self.tail <= self.capacity:
            return
        self._ring()
        deadline = time.monotonic() + self.timeout_s
        while head + size - self.tail > self.capacity:
            if time.monotonic() > deadline:
                raise ChannelFull(f"the receiver took nothing for {self.timeout_s:.0f} s")
            with contextlib.suppress(BlockingIOError):
                if self.doorbell.recv(1) == b"":
                    raise ChannelClosed("the receiving process is gone")
            time.sleep(0.0005)


class Receiver(Ring):
    """The reading end; `fileno()` is readable when there may be something to receive.

    `watched`: the reader sleeps until it is readable, and calls `answer` then. To receive is no system call for it, and
    at a system call another thread takes Python's lock.
    """

    def __init__(self, memory: int, doorbell: int, watched: bool = False) -> None:
        super().__init__(memory, doorbell)
        self.watched = watched
        self.closed = False

    def answer(self) -> None:
        """Take note of the doorbell: it is not readable any more, until it rings again."""
        try:
            self.closed |= self.doorbell.recv(1 << 16) == b""
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True

    def receive(self) -> list[Message]:
        """All messages there are, in order; raises ChannelClosed when there are none and the sender is gone."""
        if not self.watched:
            self.answer()
        messages, tail = [], self.tail
        while tail < self.head:
            position = tail % self.capacity
            (size,) = struct.unpack_from("<Q", self.map, HEADER + position)
            if size == SKIP:
                tail += self.capacity - position
            else:
                start = HEADER + position + ALIGNMENT
                with memoryview(self.map) as view:
                    messages.append(decode(bytearray(view[start : start + size])))
                tail += ALIGNMENT + size + padding(size)
            self.tail = tail
        received_ns = time.monotonic_ns()
        for message in messages:
            if isinstance(message, Payload):
                message.received_ns = received_ns
        if self.closed and not messages:
            raise ChannelClosed("the sending process is gone")
        return messages
