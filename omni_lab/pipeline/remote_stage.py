"""A stage whose network lives in a process more: the worker schedules, the other process computes.

What serving engines do that keep the scheduler and the model in separate processes, even for one device.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from omni_lab.connectors.shared_memory import ChannelClosed, Receiver, Sender, create_channel
from omni_lab.connectors.wire import Abort, Admit, Broken, Message, Ready, Start
from omni_lab.core import Payload, PipelineError
from omni_lab.engine.blocks import Block, scatter
from omni_lab.engine.clock import FORWARD, PAYLOAD, PREPARE, StepClock
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.engine.worker import InputError
from omni_lab.families.plan import StagePlan
from omni_lab.pipeline.remote_calls import (
    Move,
    Profiled,
    Result,
    StartProfiler,
    Step,
    StopProfiler,
    from_payload,
    to_payload,
)
from omni_lab.tracing.profiler import Anchors, CaptureError, Options, Recorder

LOADING_S, ANSWER_S = 1800.0, 600.0
"""How long the process may take to start, and to answer a question."""


class RemoteError(RuntimeError):
    """The stage failed in its own process; the message is the cause there."""


@dataclass(slots=True)
class RemoteState:
    """What the process last said about a sequence."""

    kind: str | None = None
    tokens: int = 0


class RemoteProfiler:
    """The profiler of the network's process; `ask` sends it a call and waits for its answer."""

    def __init__(self, ask: Callable[[StartProfiler | StopProfiler], Profiled]) -> None:
        self.ask = ask

    def start(self, options: Options) -> Anchors:
        return self._answer(StartProfiler(options.directory, options.stacks, options.memory)).anchors

    def stop(self, path: Path | None) -> tuple[Anchors, int]:
        answer = self._answer(StopProfiler(str(path) if path else None))
        return answer.anchors, answer.nbytes

    def _answer(self, call: StartProfiler | StopProfiler) -> Profiled:
        answer = self.ask(call)
        if answer.error:
            raise CaptureError(answer.error)
        return answer


class RemoteStage:
    """The `Stage` of a plan in a process of its own, driven over two shared-memory channels.

    A step is one message there and one back. What arrives between steps is collected and sent with the next
    question; `next_step`, `step_tokens` and `finished` are answered from what came back, because they change only
    by a sequence's own input and steps. `facts` are those of the process, `recorder` records in it.

    Raises PipelineError if the process cannot start, has ended or does not answer, InputError at the sequence's next
    `next_step` if the stage could not take its input.
    """

    def __init__(self, plan: StagePlan, clock: StepClock) -> None:
        self.name = plan.stage
        self.title = f"the network of {plan.stage}_r{plan.replica}"
        self.clock = clock
        self.sequences: dict[str, Sequence] = {}
        self.rejected: dict[str, str] = {}
        self.outgoing: list[Message] = []
        self.counters: dict[str, int] = {}
        self.unanswered = False
        self.recorder = Recorder(RemoteProfiler(self.profile), f"-{plan.stage}_r{plan.replica}")
        self._spawn(plan)
        try:
            self.facts = self._start(plan)
        except BaseException:
            self.end()
            raise

    def open(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        sequence.state = RemoteState()
        self.outgoing.append(
            Admit(sequence.request_id, sequence.sampling, sequence.options, sequence.targets, sequence.routes)
        )
        self.unanswered = True

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        self.outgoing.append(payload)
        self.unanswered = True

    def next_step(self, sequence: Sequence) -> str | None:
        if self.unanswered:
            self._call(Step(None, {}))
        if cause := self.rejected.pop(sequence.request_id, None):
            raise InputError(sequence, cause)
        return sequence.state.kind

    def step_tokens(self, sequence: Sequence) -> int:
        return sequence.state.tokens

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        self.clock.enter(PREPARE)
        rows = {sequence.request_id: sequence.row for sequence in batch}
        self.clock.enter(FORWARD)
        result, answer = self._call(Step(kind, rows))
        self.clock.enter(PAYLOAD)
        if result.error:
            raise RemoteError(result.error)
        emissions = [
            Emission(self.sequences[sent.request_id], sent.target, dict.fromkeys(sent.names), sent.final, sent.reason)
            for sent in result.sent
        ]
        scatter([Block(name, *where, answer.tensors[name]) for name, *where in result.blocks], emissions)
        return emissions, result.tokens

    def profile(self, asked: StartProfiler | StopProfiler) -> Profiled:
        """What a capture asks of the network's process."""
        self.outgoing.append(to_payload(asked))
        self._send()
        return from_payload(self._wait(ANSWER_S))

    def move(self, source: int, target: int) -> None:
        self.outgoing.append(to_payload(Move(source, target)))

    def close(self, sequence: Sequence) -> None:
        """Sent at once: an idle worker asks for no step, and the sequence's memory should not wait for one."""
        del self.sequences[sequence.request_id]
        self.rejected.pop(sequence.request_id, None)
        sequence.state = None
        self.outgoing.append(Abort(sequence.request_id))
        self._send()

    def end(self) -> None:
        """End the process at once: it holds nothing that outlives it."""
        self.process.kill()
        self.process.wait()
        self.sender.close()
        self.receiver.close()
        os.close(self.lifeline)

    def _spawn(self, plan: StagePlan) -> None:
        (calls, left, inbox), (results, outbox, right) = create_channel(), create_channel()
        watched, self.lifeline = os.pipe()
        ends = {"inbox": (calls, inbox), "outbox": (results, outbox), "lifeline": watched}
        given = {calls, inbox, results, outbox, watched}
        self.sender, self.receiver = Sender(calls, left), Receiver(results, right)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "omni_lab.pipeline.stage_process", json.dumps(ends)],
            pass_fds=given,
            process_group=0,  # Ctrl-C is for the client, at whose end everything ends
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=os.environ | {"OMP_NUM_THREADS": str(plan.threads)},
        )
        for descriptor in given:
            os.close(descriptor)
        self.poll = select.poll()
        self.poll.register(self.receiver, select.POLLIN)

    def _start(self, plan: StagePlan) -> dict[str, Any]:
        self.outgoing.append(Start(msgspec.json.encode(plan).decode()))
        self._send()
        match self._wait(LOADING_S):
            case Ready(facts=facts):
                return facts
            case Broken(error=error):
                raise PipelineError(error)
            case other:
                raise PipelineError(f"{self.title} did not start; expected Ready or Broken, got {type(other).__name__}")

    def _call(self, step: Step) -> tuple[Result, Payload]:
        """Send what has been collected and a question; take in the answer."""
        self.outgoing.append(to_payload(step))
        self._send()
        answer = self._wait()
        result = from_payload(answer)
        self.unanswered = False
        self.rejected |= result.rejected
        self.counters |= result.counters
        for state in result.states:
            sequence = self.sequences[state.request_id]
            sequence.state.kind, sequence.state.tokens = state.kind, state.tokens
            sequence.finished |= state.finished
        for name, _, *row in result.steps:
            self.clock.add(name, *row)
        return result, answer

    def _send(self) -> None:
        messages, self.outgoing = self.outgoing, []
        try:
            self.sender.send(*messages)
        except ChannelClosed:
            self._gone()

    def _wait(self, limit_s: float = ANSWER_S) -> Message:
        """The process answers one question at a time, so there is exactly one message."""
        try:
            while not (messages := self.receiver.receive()):
                if not self.poll.poll(1000 * limit_s):
                    raise PipelineError(f"{self.title} did not answer for {limit_s:.0f} s")
        except ChannelClosed:
            self._gone()
        return messages[0]

    def _gone(self) -> None:
        code = self.process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        raise PipelineError(f"{self.title} ended unexpectedly ({how})")
