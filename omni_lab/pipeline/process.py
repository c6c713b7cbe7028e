"""Executor `process`: every replica of every stage in a process of its own, joined by shared-memory channels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from omni_lab.connectors.shared_memory import ChannelFull, MessageTooLarge, Receiver, Sender, create_channel
from omni_lab.connectors.wire import Broken, Message, Ping, Ready, Shutdown, Start
from omni_lab.core import CLIENT, Payload, PipelineError, PipelineSpec
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.restarts import Restarts
from omni_lab.pipeline.wiring import End, channels

GRACE_S = 5.0
"""Time that workers have to end by themselves before they are killed."""

PING_S, SILENT_S, LOADING_S = 10.0, 600.0, 1800.0
"""Workers are asked every PING_S whether they turn; one silent for SILENT_S, or loading for LOADING_S, is killed."""

RETRY_S = 0.002
"""When a full channel to a worker is tried again."""


class ProcessExecutor:
    """Runs one `pipeline.worker_process` for each replica, talks to it over its channels, and replaces it if it ends.

    Channels are handed down as descriptors, and both ends of each stay open here. So a channel outlives the workers
    that it joins: a worker that takes another's place goes on where the ring ends, and its neighbours have nothing to
    change. What its predecessor left unread is read here and counted. Nothing has a name in the file system.
    """

    shared = False

    def __init__(
        self,
        spec: PipelineSpec,
        replicas: dict[str, int],
        plans: dict[End, StagePlan],
        progress: Callable[[str, dict], None],
    ) -> None:
        self.pairs = channels(spec, replicas)
        self.plans = plans
        self.progress = progress
        self.descriptors: dict[tuple[End, End], tuple[int, int, int]] = {}
        self.lifeline: tuple[int, ...] = ()
        self.senders: dict[End, Sender] = {}
        self.receivers: dict[End, Receiver] = {}
        self.backlogs: dict[End, deque[Message]] = {end: deque() for end in plans}
        self.processes: dict[End, Process] = {}
        self.ready: set[End] = set()
        self.given_up: set[End] = set()
        self.causes: dict[End, str] = {}
        self.missed: Counter[End] = Counter()
        self.heard: dict[End, float] = {}
        self.tasks: list[asyncio.Task] = []

    async def start(self, deliver: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        """Start all workers and wait until every one is ready; PipelineError with the cause if one is not.

        From then on a worker that ends is replaced. `deliver` hears of both, `Broken` when it ends and `Ready` when
        another serves in its place; `broken` hears when the last worker of a stage is given up.
        """
        self.loop = asyncio.get_running_loop()
        self.deliver = deliver
        self.broken = broken
        self.opened: asyncio.Future[None] = self.loop.create_future()
        self.lifeline = os.pipe()
        for source, target in self.pairs:
            memory, left, right = self.descriptors[source, target] = create_channel()
            if source.stage == CLIENT:
                self.senders[target] = Sender(memory, os.dup(left), timeout_s=0.0)
            if target.stage == CLIENT:
                self.receivers[source] = Receiver(memory, os.dup(right))
                self.loop.add_reader(self.receivers[source].fileno(), self._drain, source)
        self.tasks = [asyncio.create_task(work) for work in [*map(self._keep, self.plans), self._watch()]]
        for task in self.tasks:
            task.add_done_callback(self._stopped)
        await self.opened

    def send(self, stage: str, replica: int, message: Message) -> None:
        """Send a message to a worker without ever waiting; it is dropped if the worker is not there.

        What finds no place in a full channel is kept here, in order. Raises MessageTooLarge.
        """
        end = End(stage, replica)
        if end not in self.ready:
            return
        if not self.backlogs[end]:
            try:
                self.senders[end].send(message)
                return
            except MessageTooLarge:
                raise
            except ChannelFull:
                self.loop.call_later(RETRY_S, self._flush, end)
        self.backlogs[end].append(message)

    async def close(self) -> None:
        """End all workers: asked first, killed after GRACE_S. Returns when no process is left."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for end, receiver in self.receivers.items():
            self.loop.remove_reader(receiver.fileno())
            with contextlib.suppress(ChannelFull):
                self.senders[end].send(Shutdown())
        waits = [asyncio.create_task(process.wait()) for process in self.processes.values()]
        if waits:
            await asyncio.wait(waits, timeout=GRACE_S)
            for process in self.processes.values():
                kill(process)
            await asyncio.wait(waits)
        for channel in [*self.senders.values(), *self.receivers.values()]:
            channel.close()
        for descriptor in [*self.lifeline, *(each for three in self.descriptors.values() for each in three)]:
            os.close(descriptor)
        self.processes, self.senders, self.receivers, self.descriptors = {}, {}, {}, {}
        self.tasks, self.lifeline = [], ()
        self.ready.clear()

    async def _keep(self, end: End) -> None:
        """Run one replica for as long as the pipeline is open."""
        restarts = Restarts()
        while True:
            cause = await self._live(end)
            lost = self._discard(end) + sum(isinstance(message, Payload) for message in self.backlogs[end])
            self.backlogs[end].clear()
            if not self.opened.done() or self.opened.exception():
                self._break(f"worker {end}: {cause}")
                return
            rest = restarts.rest(time.monotonic())
            self.deliver(Broken(end.stage, end.replica, cause, lost))
            if rest is None:
                self._give_up(end, cause)
                return
            await asyncio.sleep(rest)

    async def _live(self, end: End) -> str:
        """One life of a worker, from its start to its end; why it ended."""
        self.missed[end] += self._discard(end)
        try:
            process = self.processes[end] = await self._spawn(end)
        except OSError as error:
            return f"its process cannot be started: {error}"
        self.heard[end] = time.monotonic()
        self.senders[end].send(Start(msgspec.json.encode(self.plans[end]).decode()))
        code = await process.wait()
        self._drain(end)
        self.ready.discard(end)
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return self.causes.pop(end, f"its process ended unexpectedly ({how})")

    async def _spawn(self, end: End) -> Process:
        """Start a worker's process with its ends of the channels."""
        inboxes = {str(s): (memory, right) for (s, t), (memory, _, right) in self.descriptors.items() if t == end}
        outboxes = [
            (target.stage, target.replica, memory, left)
            for (source, target), (memory, left, _) in self.descriptors.items()
            if source == end
        ]
        ends = {"inboxes": inboxes, "outboxes": outboxes, "lifeline": self.lifeline[0]}
        given = [each for pair in inboxes.values() for each in pair] + [each for four in outboxes for each in four[2:]]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_lab.pipeline.worker_process", json.dumps(ends)),
            pass_fds=[*given, self.lifeline[0]],
            process_group=0,  # Ctrl-C is for the parent, who then ends its workers
            stdin=DEVNULL,
            stdout=2,
            env=os.environ | {"OMP_NUM_THREADS": str(self.plans[end].threads)},
        )

    def _discard(self, end: End) -> int:
        """Read what nobody is there to read, so that its sender does not wait; how many payloads that were."""
        lost = 0
        for (_, target), (memory, _, right) in self.descriptors.items():
            if target == end:
                receiver = Receiver(memory, os.dup(right))
                lost += sum(isinstance(message, Payload) for message in receiver.receive())
                receiver.close()
        return lost

    def _flush(self, end: End) -> None:
        backlog = self.backlogs[end]
        try:
            while backlog:
                self.senders[end].send(backlog[0])
                backlog.popleft()
        except MessageTooLarge as error:
            refused = backlog.popleft()
            self.deliver(Payload(refused.request_id, end.stage, CLIENT, final=True, error=str(error)))
            self.loop.call_soon(self._flush, end)
        except ChannelFull:
            self.loop.call_later(RETRY_S, self._flush, end)

    def _drain(self, end: End) -> None:
        messages = self.receivers[end].receive()
        if messages:
            self.heard[end] = time.monotonic()
        for message in messages:
            match message:
                case Ready():
                    self._serves(end, message)
                case Broken():
                    self.causes[end] = message.error
                case Ping():
                    pass
                case _:
                    self.deliver(message)

    def _serves(self, end: End, message: Ready) -> None:
        self.ready.add(end)
        if self.opened.done():
            message.lost = self.missed.pop(end, 0)
            self.deliver(message)
            return
        self.progress(str(end), message.facts)
        if len(self.ready) == len(self.plans):
            self.opened.set_result(None)

    def _stopped(self, task: asyncio.Task) -> None:
        """A task that fails cannot keep its worker any more."""
        if not task.cancelled() and (error := task.exception()):
            self._break(f"the executor stopped: {type(error).__name__}: {error}")

    def _break(self, cause: str) -> None:
        if self.opened.done():
            self.broken(cause)
        else:
            self.opened.set_exception(PipelineError(cause))

    def _give_up(self, end: End, cause: str) -> None:
        self.given_up.add(end)
        if all(other in self.given_up for other in self.plans if other.stage == end.stage):
            self.broken(f"worker {end}: {cause}; it ended too often to be started again")

    async def _watch(self) -> None:
        """Ask every worker from time to time whether it turns, and end one that does not: then it is replaced."""
        while True:
            await asyncio.sleep(PING_S)
            for end, process in self.processes.items():
                self._drain(end)  # if this loop was late, not the worker
                limit = SILENT_S if end in self.ready else LOADING_S
                if time.monotonic() - self.heard[end] > limit and process.returncode is None:
                    self.causes[end] = f"it said nothing for {limit:.0f} s and was killed"
                    kill(process)
                self.send(end.stage, end.replica, Ping())


def kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        process.kill()
