"""One asyncio loop on a thread of its own: pipelines run there, and the kernel's thread stays free."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

CLOSE_S = 10.0
"""How long `close` waits for what tasks do when they are cancelled; workers that are asked to end may take 5 s."""

T = TypeVar("T")


class Job(Future[T]):
    """The result of a coroutine on the background loop. It is done when the coroutine's clean-up is."""

    def __init__(self, owner: BackgroundLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        super().__init__()
        self.owner = owner
        self.coroutine = coroutine
        self.task: asyncio.Task[T] | None = None

    def cancel(self) -> bool:
        """Cancels the coroutine and waits until it has ended (on the loop's own thread it does not wait).

        Returns whether it was cancelled; one that had ended before, or that ended by itself meanwhile, was not.
        """
        if not self.done():
            self.owner.call_soon(self._cancel_task)
            if threading.current_thread() is not self.owner.thread:
                wait([self])
        return self.cancelled()

    def start(self) -> None:
        """Called on the loop's thread."""
        self.task = asyncio.get_running_loop().create_task(self.coroutine)
        self.task.add_done_callback(self._ended)

    def _cancel_task(self) -> None:
        self.task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif error := task.exception():
            self.set_exception(error)
        else:
            self.set_result(task.result())


class BackgroundLoop:
    """An asyncio loop on a daemon thread, beside whatever loop the caller's thread runs. Use it from any thread."""

    def __init__(self) -> None:
        self.closed = False
        self._turn = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.thread = threading.Thread(target=self._run, name="omni_lab background loop", daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        """Runs a coroutine on the loop. Its result, or its error, is the future's.

        Raises RuntimeError if the loop is closed.
        """
        job = Job(self, coroutine)
        if not self.call_soon(job.start):
            coroutine.close()
            raise RuntimeError("the background loop is closed; omni_lab.workbench.background() gives a new one")
        return job

    def call_soon(self, callback: Any, *arguments: Any) -> bool:
        """Has the loop's thread call `callback`; False if the loop is closed."""
        with self._turn:
            if not self.closed:
                self._loop.call_soon_threadsafe(callback, *arguments)
            return not self.closed

    def close(self) -> None:
        """Cancels all coroutines and waits, at most CLOSE_S, until they have ended. May be called again."""
        with self._turn:
            if not self.closed:
                self.closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(CLOSE_S)

    def _run(self) -> None:
        """Until `close`; the runner then cancels what is still at work, and waits for it."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())


_one = threading.Lock()
_background: BackgroundLoop | None = None


def background() -> BackgroundLoop:
    """The loop of this process. It starts with the first call, and is closed when the process ends."""
    global _background
    with _one:
        if _background is None or _background.closed:
            _background = BackgroundLoop()
            atexit.register(_background.close)
        return _background
