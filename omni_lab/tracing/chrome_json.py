"""The events of a Chrome trace, one block after the other: plain or gzip, whole or cut off, in bounded memory.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

BLOCK = 8 << 20
"""Decompressed bytes that are taken apart at a time."""
LONGEST = 64 << 20
"""Bytes before the first event (device properties, distributed groups), or within which an event must end."""

BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
BETWEEN = re.compile(rb"\}\s*,\s*\{")
SEPARATOR = re.compile(rb"\s*,?\s*")
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]"]', re.DOTALL)
NOT_JSON = re.compile(rb'("(?:[^"\\]|\\.)*")|[-+]?\b(?:inf(?:inity)?|nan)\b', re.IGNORECASE)


class TraceError(Exception):
    """A file that is no trace. The message names the file and what was expected."""


class Args(msgspec.Struct, gc=False):
    """What is needed of an event's arguments."""

    name: str | int | float | None = None
    correlation: int | None = None
    device: int | str | None = None


class Event(msgspec.Struct, gc=False):
    """An event; `ts` and `dur` in µs."""

    ph: str = ""
    name: str | None = None
    cat: str | None = None
    ts: float | None = None
    dur: float | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: Args | None = None


class EventStream:
    """Yields lists of events. Afterwards `cut` says why the file ended early, if it did, and `damaged` counts what was
    no event. Iterating raises TraceError for what is no Chrome trace, and OSError; `advance` is told of bytes read.
    """

    def __init__(self, path: Path, advance: Callable[[int], object]) -> None:
        self.path, self.advance = path, advance
        self.cut: str | None = None
        self.damaged = 0
        self.decoder = msgspec.json.Decoder(list[Event])

    def __iter__(self) -> Iterator[list[Event]]:
        text, opened, closed = bytearray(), False, False
        for block in self._blocks():
            if closed:  # behind the events is nothing that is needed, but the file must be whole
                continue
            text += block
            if not opened:
                begin = _begin(text)
                if begin is None and len(text) <= LONGEST:
                    continue
                if begin is None:
                    break
                opened = True
                del text[:begin]
            end = 1
            while end and not closed:
                events, end, closed = self._complete(text)
                del text[:end]
                yield events
            if len(text) > LONGEST and not closed:
                self.cut = f"no event ends within {LONGEST >> 20} MB: the file is damaged"
                return
        if not opened and self.cut is None and not _unfinished(text):
            raise TraceError(f'{self.path}: expected a Chrome trace, JSON with "traceEvents" or an array of events')
        if not closed and self.cut is None:
            self.cut = "the file ends within its events"

    def _blocks(self) -> Iterator[bytes]:
        with self.path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            source = gzip.GzipFile(fileobj=raw) if packed else raw
            position, parts, size = 0, [], 0
            while True:
                try:
                    part = source.read1(1 << 20)  # what could be unpacked is not lost where the file breaks off
                except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                    part, self.cut = b"", f"the file is cut off or damaged ({error})"
                parts.append(part)
                size += len(part)
                if size >= BLOCK or not part:
                    yield b"".join(parts)
                    self.advance(raw.tell() - position)
                    position, parts, size = raw.tell(), [], 0
                if not part:
                    return

    def _complete(self, text: bytearray) -> tuple[list[Event], int, bool]:
        """The complete events at the beginning of `text`, where they end, and whether the array ends there.

        A piece that is valid JSON between brackets ends between two events, whatever its strings hold: so the last
        place that looks like one is tried first, and every token is looked at only if that is none.
        """
        for between in list(BETWEEN.finditer(text, max(0, len(text) - (1 << 16))))[-3:][::-1]:
            try:
                return self.decoder.decode(b"[" + text[: between.start() + 1] + b"]"), between.end() - 1, False
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
        spans, closed = self._scan(text)
        if not spans:
            return [], 0, closed
        end = spans[-1][1]
        try:
            events = self.decoder.decode(b"[" + text[:end] + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            events = [event for begin, stop in spans if (event := self._repaired(text[begin:stop])) is not None]
        return events, SEPARATOR.match(text, end).end(), closed

    def _scan(self, text: bytearray) -> tuple[list[tuple[int, int]], bool]:
        """Begin and end of every complete object, and whether the array that they are in ends."""
        depth, begin, found, stray = 0, 0, [], 0
        closed = False
        for token in TOKEN.finditer(text):
            kind = text[token.start()]
            if kind in b"{[":
                begin = begin if depth else token.start()
                depth += 1
            elif kind in b"}]" and depth:
                depth -= 1
                if depth == 0:
                    found.append((begin, token.end()))
                    self.damaged, stray = self.damaged + stray, 0
            elif kind in b"]":
                closed = True
                break
            elif token.end() - token.start() == 1 and kind in b'"':  # without its partner: the rest is still to come
                break
            elif not depth:  # between objects is nothing but commas
                stray += 1
        return found, closed

    def _repaired(self, text: bytearray) -> Event | None:
        """An event that is not as expected: with inf or nan, broken letters, or other types of arguments."""
        piece = NOT_JSON.sub(lambda found: found[1] or b"null", text)
        try:
            raw = msgspec.json.decode(piece.decode("utf-8", "replace"))
            args = raw["args"] if isinstance(raw.get("args"), dict) else {}
            scalars = {key: args[key] for key in ("name", "device") if isinstance(args.get(key), int | str)}
            if isinstance(args.get("correlation"), int):
                scalars["correlation"] = args["correlation"]
            return msgspec.convert(raw | {"args": scalars}, Event, strict=False)
        except (msgspec.MsgspecError, AttributeError, RecursionError):
            self.damaged += 1
            return None


def _begin(text: bytearray) -> int | None:
    """Where the first event starts, None if that is not read yet."""
    if text.lstrip()[:1] == b"[":
        return text.index(b"[") + 1
    found = BEGIN.search(text)
    return found.end() if found else None


def _unfinished(text: bytearray) -> bool:
    """Whether this may be the beginning of a trace: an object that does not end."""
    if text.lstrip()[:1] != b"{" or len(text) > LONGEST:
        return False
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return True
    return False
