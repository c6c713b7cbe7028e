"""A server in a process group of its own: started, waited for until it is healthy, stopped with all its children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from omni_lab.core import PipelineError

POLL_S = 0.5
STOP_S = 30.0
"""Time that a server has to end by itself; then it is killed."""

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
    """Asks the server to end, then kills what is left of it: engines that have sessions of their own too."""
    family = _family(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(family, timeout=5)
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=5)


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
