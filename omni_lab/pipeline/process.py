"""Executor `process`: every replica of every stage in a process of its own, joined by shared-memory channels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from omni_lab.connectors.shared_memory import ChannelClosed, Receiver, Sender, create_channel
from omni_lab.connectors.wire import Broken, Message, Ready, Shutdown, Start
from omni_lab.core import CLIENT, PipelineError, PipelineSpec
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.wiring import End, channels

GRACE_S = 5.0
"""Time that workers have to end by themselves before they are killed."""


class ProcessExecutor:
    """Starts one `pipeline.worker_process` for each replica and talks to it over its channels.

    Channels are handed down as descriptors, so a worker sees the end of its parent (and of its neighbours) as the
    end of a stream. Nothing has a name in the file system.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        replicas: dict[str, int],
        plans: dict[End, StagePlan],
        progress: Callable[[str, dict], None],
    ) -> None:
        self.spec = spec
        self.replicas = replicas
        self.plans = plans
        self.progress = progress
        self.processes: dict[End, subprocess.Popen] = {}
        self.senders: dict[End, Sender] = {}
        self.receivers: dict[End, Receiver] = {}
        self.lifeline: int | None = None

    async def start(self, deliver: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        """Start all workers and wait until every one is ready; PipelineError with the cause if one is not."""
        self.loop = asyncio.get_running_loop()
        self.deliver = deliver
        self.broken = broken
        self.failure: asyncio.Future[str] = self.loop.create_future()
        self.ready = {end: asyncio.Event() for end in self.plans}
        self._spawn()
        for end, plan in self.plans.items():
            self.senders[end].send(Start(msgspec.json.encode(plan).decode()))
            self.loop.add_reader(self.receivers[end].fileno(), self._drain, end)
        waits = [asyncio.ensure_future(event.wait()) for event in self.ready.values()]
        everyone = asyncio.gather(*waits)
        await asyncio.wait({everyone, self.failure}, return_when=asyncio.FIRST_COMPLETED)
        if self.failure.done():
            everyone.cancel()
            await asyncio.gather(everyone, return_exceptions=True)
            raise PipelineError(self.failure.result())

    def send(self, stage: str, replica: int, message: Message) -> None:
        with contextlib.suppress(ChannelClosed):  # its reader reports the end of the worker
            self.senders[End(stage, replica)].send(message)

    async def close(self) -> None:
        """End all workers: asked first, killed after GRACE_S. Returns when no process is left."""
        for end, receiver in self.receivers.items():
            self.loop.remove_reader(receiver.fileno())
            self.send(end.stage, end.replica, Shutdown())
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in self.processes.values()):
            if time.monotonic() > deadline:
                for process in self.processes.values():
                    process.kill()
            await asyncio.sleep(0.01)
        for channel in [*self.senders.values(), *self.receivers.values()]:
            channel.close()
        if self.lifeline is not None:
            os.close(self.lifeline)
        self.processes, self.senders, self.receivers, self.lifeline = {}, {}, {}, None

    def _spawn(self) -> None:
        """Make all channels, give each worker its ends of them, and keep the client's."""
        inboxes: dict[End, dict[str, tuple[int, int]]] = {end: {} for end in self.plans}
        outboxes: dict[End, list[tuple[str, int, int, int]]] = {end: [] for end in self.plans}
        given: list[int] = []
        for source, target in channels(self.spec, self.replicas):
            memory, left, right = create_channel()
            if source.stage == CLIENT:
                self.senders[target] = Sender(memory, left)
            else:
                outboxes[source].append((target.stage, target.replica, memory, left))
                given.append(left)
            if target.stage == CLIENT:
                self.receivers[source] = Receiver(memory, right)
            else:
                inboxes[target][str(source)] = (memory, right)
                given.append(right)
            given.append(memory)
        watched, self.lifeline = os.pipe()
        for end in self.plans:
            ends = {"inboxes": inboxes[end], "outboxes": outboxes[end], "lifeline": watched}
            passed = [fd for pair in inboxes[end].values() for fd in pair]
            passed += [fd for outbox in outboxes[end] for fd in outbox[2:]]
            self.processes[end] = subprocess.Popen(
                [sys.executable, "-m", "omni_lab.pipeline.worker_process", json.dumps(ends)],
                pass_fds=[*passed, watched],
                process_group=0,  # Ctrl-C is for the parent, who then ends its workers
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | {"OMP_NUM_THREADS": str(self.plans[end].threads)},
            )
        for descriptor in {*given, watched}:
            os.close(descriptor)

    def _drain(self, end: End) -> None:
        try:
            messages = self.receivers[end].receive()
        except ChannelClosed:
            self.loop.remove_reader(self.receivers[end].fileno())
            self._fail(f"worker {end} ended unexpectedly ({self._exit(end)})")
            return
        for message in messages:
            match message:
                case Ready():
                    self.progress(str(end), message.facts)
                    self.ready[end].set()
                case Broken():
                    self._fail(f"worker {end}: {message.error}")
                case _:
                    self.deliver(message)

    def _fail(self, cause: str) -> None:
        if not self.failure.done():
            self.failure.set_result(cause)
        self.broken(cause)

    def _exit(self, end: End) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.processes[end].wait(timeout=1.0)
            return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "still running, but its channel is closed"
