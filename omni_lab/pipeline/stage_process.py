"""The main program of a network's own process. `RemoteStage` starts it; nobody else needs to."""

from __future__ import annotations

import json
import sys

from omni_lab.pipeline.lifeline import watch

ENDS = json.loads(sys.argv[1])
watch(ENDS["lifeline"])  # before the imports, which take seconds

import contextlib  # noqa: E402
import select  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import msgspec  # noqa: E402
import torch  # noqa: E402

from omni_lab.connectors.shared_memory import ChannelClosed, ChannelFull, Receiver, Sender  # noqa: E402
from omni_lab.connectors.wire import Abort, Admit, Broken, Message, Ready  # noqa: E402
from omni_lab.core import Payload, PipelineError  # noqa: E402
from omni_lab.engine.blocks import gather  # noqa: E402
from omni_lab.engine.clock import StepClock  # noqa: E402
from omni_lab.engine.stage import Sequence, Stage  # noqa: E402
from omni_lab.engine.worker import peak_rss_bytes  # noqa: E402
from omni_lab.families import qwen3_omni  # noqa: E402
from omni_lab.families.plan import StagePlan  # noqa: E402
from omni_lab.metrics.phases import PHASES  # noqa: E402
from omni_lab.pipeline.remote_calls import (  # noqa: E402
    CALL,
    Move,
    Profiled,
    Result,
    Sent,
    StartProfiler,
    State,
    Step,
    StopProfiler,
    from_payload,
    to_payload,
)
from omni_lab.tracing.profiler import CaptureError, LocalProfiler, Options  # noqa: E402


class Host:
    """The stage, its sequences, and what has changed about them since the last answer."""

    def __init__(self, stage: Stage, clock: StepClock) -> None:
        self.stage = stage
        self.clock = clock
        self.sequences: dict[str, Sequence] = {}
        self.touched: dict[str, Sequence] = {}
        self.rejected: dict[str, str] = {}
        self.memory: dict[str, int] = {}
        self.profiler = LocalProfiler()

    def handle(self, message: Message) -> Payload | None:
        """Do what a message says; the answer if it asks for one."""
        match message:
            case Payload(target=target) if target == CALL:
                match from_payload(message):
                    case Move(source, row):
                        self.stage.move(source, row)
                    case Step(kind, rows):
                        return self._answer(kind, rows)
                    case StartProfiler() | StopProfiler() as asked:
                        return to_payload(self._profile(asked))
            case Admit(request_id, sampling, options, targets, routes):
                sequence = self.sequences[request_id] = Sequence(request_id, sampling, options, targets, routes)
                with self._input_of(request_id):
                    self.stage.open(sequence)
            case Payload(request_id):
                with self._input_of(request_id):
                    self.stage.receive(self.sequences[request_id], message)
            case Abort(request_id):
                self.touched.pop(request_id, None)
                self.rejected.pop(request_id, None)
                self.stage.close(self.sequences.pop(request_id))
        return None

    @contextlib.contextmanager
    def _input_of(self, request_id: str) -> Iterator[None]:
        self.touched[request_id] = self.sequences[request_id]
        try:
            yield
        except Exception as error:
            self.rejected[request_id] = f"{type(error).__name__}: {error}"

    def _answer(self, kind: str | None, rows: dict[str, int]) -> Payload:
        result, tensors = Result(rejected=self.rejected), {}
        batch = [self.sequences[request_id] for request_id in rows]
        for sequence, row in zip(batch, rows.values(), strict=True):
            sequence.row = row
        if kind:
            try:
                tensors = self._step(kind, batch, result)
                self.touched |= zip(rows, batch, strict=True)
            except Exception as error:  # the worker ends the sequences of the batch
                result.error = f"{type(error).__name__}: {error}"
        if any(sequence.finished for sequence in batch):
            self.memory = {"network_peak_rss_bytes": peak_rss_bytes()}
        result.counters = self.stage.counters | self.memory
        result.states = [self._state(s) for name, s in self.touched.items() if name not in self.rejected]
        if self.clock.count:
            taken, _ = self.clock.take()
            result.steps = [row[: -len(PHASES)] for row in taken]
        self.touched, self.rejected = {}, {}
        return to_payload(result, tensors)

    @torch.inference_mode()
    def _step(self, kind: str, batch: list[Sequence], result: Result) -> dict[str, torch.Tensor]:
        """Take a step; its emissions go into the result, their tensors come back by name."""
        emissions, result.tokens = self.stage.step(kind, batch)
        result.sent = [Sent(e.sequence.request_id, e.target, list(e.tensors), e.final, e.reason) for e in emissions]
        blocks = gather(emissions)
        result.blocks = [(block.name, block.members, block.sizes) for block in blocks]
        return {block.name: block.tensor for block in blocks}

    def _profile(self, asked: StartProfiler | StopProfiler) -> Profiled:
        try:
            match asked:
                case StartProfiler(directory, stacks, memory):
                    return Profiled(self.profiler.start(Options(directory, stacks, memory)))
                case StopProfiler(path):
                    return Profiled(*self.profiler.stop(Path(path) if path else None))
        except (CaptureError, OSError, RuntimeError) as error:
            return Profiled(error=str(error))

    def _state(self, sequence: Sequence) -> State:
        kind = None if sequence.finished else self.stage.next_step(sequence)
        tokens = self.stage.step_tokens(sequence) if kind else 0
        return State(sequence.request_id, kind, tokens, sequence.finished)


def main() -> None:
    inbox, outbox = Receiver(*ENDS["inbox"]), Sender(*ENDS["outbox"])
    messages = received(inbox)
    with contextlib.suppress(ChannelClosed):
        plan = msgspec.json.decode(next(messages).plan, type=StagePlan)
        runtime = peak_rss_bytes()
        torch.set_num_threads(plan.threads)
        clock = StepClock()
        try:
            built = qwen3_omni.build_stage(plan, clock)
        except Exception as error:
            expected = isinstance(error, PipelineError)
            cause = str(error) if expected else f"{type(error).__name__}: {error}"
            outbox.send(Broken(plan.stage, plan.replica, cause))
            if expected:
                sys.exit(1)
            raise
        memory = {"network_runtime_rss_bytes": runtime, "network_peak_rss_bytes": peak_rss_bytes()}
        outbox.send(Ready(plan.stage, plan.replica, built.facts | {"rows": built.rows} | memory))
        serve(Host(built.stage, clock), messages, outbox)


def serve(host: Host, messages: Iterator[Message], outbox: Sender) -> None:
    for message in messages:
        answer = host.handle(message)
        if answer is None:
            continue
        try:
            outbox.send(answer)
        except ChannelFull as error:
            outbox.send(to_payload(Result(error=str(error))))


def received(inbox: Receiver) -> Iterator[Message]:
    """Messages as they come; in between, sleep until the doorbell rings."""
    poll = select.poll()
    poll.register(inbox, select.POLLIN)
    while True:
        if messages := inbox.receive():
            yield from messages
        else:
            poll.poll()


if __name__ == "__main__":
    main()
