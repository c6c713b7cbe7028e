"""Hand-off and output path: chunk sizes, whole payloads, order, back-pressure, errors of the builder."""

from __future__ import annotations

import threading

import pytest
import torch

from omni_lab.core import CLIENT, Payload, Sampling
from omni_lab.engine.clock import OTHER, SLOT, PhaseTimer
from omni_lab.engine.output import KEPT, AsyncOutput, SyncOutput
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.pipeline.handoff import ChunkedHandoff, WholeHandoff, chunk_sizes


def sequence(name: str = "r") -> Sequence:
    return Sequence(name, Sampling(), {}, ("code2wav",), {})


def frames(owner: Sequence, start: int, count: int = 1, final: bool = False, target: str = "code2wav") -> Emission:
    codes = torch.arange(start, start + count)[:, None].expand(-1, 16).contiguous()
    return Emission(owner, target, {"codes": codes} if count else {}, final, "stop" if final else None)


def push(handoff: ChunkedHandoff, emission: Emission) -> Payload | None:
    """As the output path does."""
    emission.due = handoff.count(emission)
    return handoff.push(emission, 1)


def raised(emissions: list[Emission], error: Exception) -> None:
    raise error


def stream(handoff: ChunkedHandoff, total: int) -> list[Payload]:
    owner = sequence()
    emissions = [frames(owner, index, final=index == total - 1) for index in range(total)]
    return [payload for emission in emissions if (payload := push(handoff, emission))]


@pytest.mark.parametrize(
    "initial, steady, ramp, total, sizes",
    [
        (4, 25, None, 3, [3]),
        (4, 25, None, 4, [4]),
        (4, 25, None, 5, [4, 1]),
        (4, 25, None, 79, [4, 25, 25, 25]),
        (4, 25, None, 80, [4, 25, 25, 25, 1]),
        (4, 25, [4, 8, 16], 60, [4, 8, 16, 25, 7]),
        (1, 1, None, 3, [1, 1, 1]),
        (9, 2, None, 14, [9, 2, 2, 1]),
    ],
)
def test_chunks_have_the_sizes_asked_for(initial, steady, ramp, total, sizes) -> None:
    payloads = stream(ChunkedHandoff("talker", {"code2wav": chunk_sizes(initial, steady, ramp)}), total)
    assert [len(payload.tensors["codes"]) for payload in payloads] == sizes
    assert [payload.index for payload in payloads] == list(range(len(sizes)))
    assert [payload.final for payload in payloads] == [False] * (len(sizes) - 1) + [True]
    assert torch.cat([payload.tensors["codes"] for payload in payloads])[:, 0].tolist() == list(range(total))


def test_a_whole_payload_comes_at_the_end_and_the_client_does_not_wait() -> None:
    handoff = WholeHandoff("talker", {"code2wav": (4, 25)})
    (payload,) = stream(handoff, 30)
    assert payload.final and payload.index == 0 and len(payload.tensors["codes"]) == 30
    owner = sequence()
    client = [push(handoff, frames(owner, index, target=CLIENT)) for index in range(3)]
    assert [payload.index for payload in client] == [0, 1, 2]


def test_an_end_without_rows_is_a_payload_of_its_own() -> None:
    handoff, owner = ChunkedHandoff("talker", {"code2wav": (2,)}), sequence()
    push(handoff, frames(owner, 0))
    assert push(handoff, frames(owner, 1)).tensors["codes"].shape == (2, 16)
    end = push(handoff, frames(owner, 2, 0, final=True))
    assert end.final and end.tensors == {} and end.index == 1 and end.finish_reason == "stop"
    assert not handoff.streams


def test_requests_do_not_mix_and_a_dropped_one_is_forgotten() -> None:
    handoff = ChunkedHandoff("talker", {"code2wav": (2,)})
    one, two = sequence("one"), sequence("two")
    assert push(handoff, frames(one, 0)) is None and push(handoff, frames(two, 10)) is None
    handoff.drop("one")
    assert push(handoff, frames(two, 11)).tensors["codes"][:, 0].tolist() == [10, 11]
    assert push(handoff, frames(sequence("one"), 5)) is None


@pytest.mark.parametrize("output", [SyncOutput, AsyncOutput])
def test_output_keeps_order_and_its_own_copy_of_the_buffers(output) -> None:
    sent: list[Payload] = []
    handoff = ChunkedHandoff("talker", {"code2wav": (1,)})
    path = output(handoff, lambda pairs: sent.extend(p for _, p in pairs), raised, PhaseTimer())
    owner, buffer = sequence(), torch.zeros(1, 16, dtype=torch.int64)
    for step in range(50):
        buffer.fill_(step)
        path.emit([Emission(owner, "code2wav", {"codes": buffer})], step)
        if output is SyncOutput:
            sent[-1].tensors = {name: tensor.clone() for name, tensor in sent[-1].tensors.items()}
    path.drain()
    assert [payload.tensors["codes"][0, 0].item() for payload in sent] == list(range(50))
    assert [payload.produced_ns for payload in sent] == list(range(50))
    path.close()


def test_the_builder_of_an_async_output_sleeps_until_a_payload_is_due() -> None:
    sent: list[Payload] = []
    handoff = ChunkedHandoff("talker", {"code2wav": (4,)})
    path = AsyncOutput(handoff, lambda pairs: sent.extend(p for _, p in pairs), raised, PhaseTimer())
    owner, buffer = sequence(), torch.zeros(1, 16, dtype=torch.int64)
    for step in range(7):
        buffer.fill_(step)
        path.emit([Emission(owner, "code2wav", {"codes": buffer})], step)
        if step == 2:
            assert len(path.kept) == 3 and not handoff.streams
    path.drain()
    assert [payload.tensors["codes"][:, 0].tolist() for payload in sent] == [[0, 1, 2, 3]] and len(path.kept) == 3
    path.drop("r")
    path.drain()
    assert not path.kept and not handoff.streams
    path.close()


def test_steps_that_complete_nothing_do_not_pile_up() -> None:
    path = AsyncOutput(WholeHandoff("talker", {"code2wav": (4, 25)}), lambda pairs: None, raised, PhaseTimer())
    owner, most = sequence(), 0
    for step in range(40):
        path.emit([frames(owner, step)], step)
        most = max(most, len(path.kept))
    assert most < KEPT
    path.close()


def test_an_async_output_waits_for_its_builder_instead_of_filling_the_memory() -> None:
    gate, started = threading.Event(), []

    def send(payloads: list[tuple[Emission, Payload]]) -> None:
        gate.wait()

    path = AsyncOutput(ChunkedHandoff("talker", {"code2wav": (1,)}), send, raised, PhaseTimer(), depth=2)
    owner = sequence()

    def steps() -> None:
        for step in range(6):
            path.emit([frames(owner, step)], step)
            started.append(step)

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive() and len(started) <= 3
    gate.set()
    thread.join()
    path.drain()
    assert started == list(range(6))
    assert path.timer.totals[SLOT] >= 200_000_000 and path.timer.phase == OTHER
    path.close()


@pytest.mark.parametrize("output", [SyncOutput, AsyncOutput])
def test_an_error_ends_the_requests_of_its_step_and_no_other(output) -> None:
    sent, failed = [], []

    def send(payloads: list[tuple[Emission, Payload]]) -> None:
        if any(payload.request_id == "bad" for _, payload in payloads):
            raise ValueError("no space")
        sent.extend(payload.request_id for _, payload in payloads)

    def fail(emissions: list[Emission], error: Exception) -> None:
        failed.extend((emission.sequence.request_id, str(error)) for emission in emissions)

    path = output(ChunkedHandoff("talker", {"code2wav": (1,)}), send, fail, PhaseTimer())
    for name in ("one", "bad", "two"):
        path.emit([frames(sequence(name), 0)], 0)
    path.drain()
    assert (sent, failed) == (["one", "two"], [("bad", "no space")])
    path.close()
