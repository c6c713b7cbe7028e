"""Executor `inline`: all stages take turns in the client's own thread. For notebooks and for debugging."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from omni_lab.connectors.in_process import InProcessChannel
from omni_lab.connectors.shared_memory import Receiver, Sender, create_channel
from omni_lab.connectors.wire import Message
from omni_lab.core import CLIENT, PipelineSpec
from omni_lab.engine.clock import SLOT
from omni_lab.engine.worker import Worker
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.build import build_worker
from omni_lab.pipeline.wiring import End, channels


class InlineExecutor:
    """Workers in one asyncio task: every round gives each worker one turn, then lets the client run."""

    shared = True

    def __init__(
        self,
        spec: PipelineSpec,
        replicas: dict[str, int],
        plans: dict[End, StagePlan],
        connector: str,
        progress: Callable,
    ) -> None:
        self.spec = spec
        self.replicas = replicas
        self.plans = plans
        self.connector = connector
        self.progress = progress
        self.workers: list[Worker] = []
        self.senders: dict[tuple[End, End], InProcessChannel | Sender] = {}
        self.receivers: dict[tuple[End, End], InProcessChannel | Receiver] = {}
        self.wake = asyncio.Event()
        self.task: asyncio.Task | None = None

    async def start(self, deliver: Callable[[Message], None], broken: Callable[[str], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.deliver = deliver
        pairs = channels(self.spec, self.replicas)
        for pair in pairs:
            self._open(pair)
        self.to_client = [pair for pair in pairs if pair[1].stage == CLIENT]
        for end, plan in self.plans.items():
            inboxes = {str(source): inbox for (source, target), inbox in self.receivers.items() if target == end}
            outboxes = {(t.stage, t.replica): outbox for (s, t), outbox in self.senders.items() if s == end}
            self.workers.append(build_worker(plan, inboxes, outboxes))
            self.progress(str(end), self.workers[-1].facts)
        self.task = asyncio.create_task(self._run(broken))

    def send(self, stage: str, replica: int, message: Message) -> None:
        self.senders[End(CLIENT), End(stage, replica)].send(message)

    async def close(self) -> None:
        if self.task:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        for worker in self.workers:
            worker.close()
        for receiver in self.receivers.values():
            if isinstance(receiver, Receiver):
                self.loop.remove_reader(receiver.fileno())
        for channel in {*self.senders.values(), *self.receivers.values()}:
            channel.close()
        self.workers, self.senders, self.receivers = [], {}, {}

    async def _run(self, broken: Callable[[str], None]) -> None:
        try:
            while True:
                self.wake.clear()
                worked = any([take_turn(worker) for worker in self.workers])
                for pair in self.to_client:
                    self._drain(pair)
                await (asyncio.sleep(0) if worked else self.wake.wait())
        except Exception as error:
            broken(f"the inline executor stopped: {type(error).__name__}: {error}")

    def _open(self, pair: tuple[End, End]) -> None:
        if self.connector == "in_process":
            channel = InProcessChannel(lambda: self.loop.call_soon_threadsafe(self.wake.set))
            self.senders[pair] = self.receivers[pair] = channel
        else:
            memory, left, right = create_channel()
            self.senders[pair], self.receivers[pair] = Sender(memory, left), Receiver(memory, right)
            os.close(memory)
            self.loop.add_reader(right, self.wake.set)

    def _drain(self, pair: tuple[End, End]) -> None:
        for message in self.receivers[pair].receive():
            self.deliver(message)


def take_turn(worker: Worker) -> bool:
    """One turn of a worker, which then waits for the thread if it could go on."""
    worked = worker.turn()
    if worked:
        worker.clock.enter(SLOT)
    return worked
