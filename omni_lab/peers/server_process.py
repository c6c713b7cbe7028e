"""A server in a process group of its own: started, waited for until it is healthy, stopped with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from omni_lab.core import PipelineError

POLL_S = 0.5
STOP_S = 30.0
"""Time that a server has to end by itself; then it is killed."""

LEFT_S = 5.0
"""Time that its children have after it, then after SIGTERM, then after SIGKILL."""

TAIL = 1500
"""Characters of the log that an error shows."""


@dataclass(frozen=True)
class ServerProcess:
    """What to start. `environment` is laid over ours; all output goes to `log`; `startup_s` bounds the start."""

    command: list[str]
    url: str
    log: Path
    startup_s: float
    environment: dict[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Healthy while the block runs, gone after it. Raises PipelineError with the end of the log if it fails."""
        if await _answers(f"{self.url}/health"):
            raise PipelineError(f"{self.url}: a server is there already; stop it, or measure it with --base-url")
        with self.log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    self.command,
                    env=os.environ | self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                message = f"{self.command[0]} cannot be started: {error.strerror}; see docs/peers.md (make peers)"
                raise PipelineError(message) from None
        try:
            await self._healthy(process)
            yield
        finally:
            await asyncio.to_thread(_stop, process)

    async def _healthy(self, process: subprocess.Popen) -> None:
        end = time.monotonic() + self.startup_s
        while time.monotonic() < end:
            if process.poll() is not None:
                raise PipelineError(f"{self.command[0]} ended with status {process.returncode}{self._tail()}")
            if await _answers(f"{self.url}/health"):
                return
            await asyncio.sleep(POLL_S)
        raise PipelineError(f"{self.url}/health was not healthy within {self.startup_s:g} s{self._tail()}")

    def _tail(self) -> str:
        return f"; {self.log} ends with:\n{self.log.read_text(encoding='utf-8', errors='replace')[-TAIL:]}"


async def _answers(url: str) -> bool:
    """Whether a GET is answered with 200 within two seconds."""
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session, session.get(url) as reply:
            return reply.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


def _stop(process: subprocess.Popen) -> None:
    """Asks the server to end, then ends what is left: children with sessions of their own, and late ones of its own.

    Python's resource trackers, which remove the shared memory of killed processes, ignore SIGTERM and so get the time.
    """
    family = _children(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs({*family, *_session(process.pid)}, LEFT_S)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for child in left:
            with suppress(psutil.NoSuchProcess):
                end(child)
        _, left = psutil.wait_procs(left, LEFT_S)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _session(leader: int) -> list[psutil.Process]:
    """The processes of a session, whose leader may have ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found
