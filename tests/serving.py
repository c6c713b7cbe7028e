"""A real server on a real port, for tests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from omni_lab.experiment import Experiment
from omni_lab.serve import Server, listen, make_server, serve
from omni_lab.server.service import Service

READY_S = 60.0


@dataclass
class Served:
    """A running server: its address, and the service and server inside, to look at and to end."""

    url: str
    service: Service
    server: Server

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric as a scraper sees it; 0 if there is none yet."""
        shown = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{shown} ")), 0.0)

    def until(self, true, seconds: float = 20.0) -> None:
        """Wait until a condition holds; fails if it never does."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.01)

    @property
    def at_work(self) -> int:
        """Sequences that any stage still holds (inline executor)."""
        return sum(len(worker.sequences) for worker in self.service.pipeline.executor.workers)


@contextmanager
def served(experiment: Experiment, key: str | None = None) -> Iterator[Served]:
    """The experiment, served from a thread of this process until the block ends."""
    service = Service(experiment)
    server = make_server(service, key)
    listener = listen("127.0.0.1", 0, experiment.server.slow_reader_s)
    thread = threading.Thread(target=lambda: asyncio.run(serve(service, server, listener)))
    thread.start()
    running = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", service, server)
    try:
        running.until(lambda: service.unready is None, READY_S)
        yield running
    finally:
        server.should_exit = True
        thread.join(READY_S)
        assert not thread.is_alive()
