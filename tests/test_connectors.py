"""Messages arrive whole, in order and once, whatever their size; the ends notice when the other is gone."""

from __future__ import annotations

import multiprocessing as mp
import os
import select
import threading

import pytest
import torch

from omni_lab.connectors.in_process import InProcessChannel
from omni_lab.connectors.shared_memory import RESTART, ChannelClosed, ChannelFull, Receiver, Sender, create_channel
from omni_lab.connectors.wire import DTYPES, Abort, Admit, Records, decode, encode
from omni_lab.core import Payload, Sampling


def payload(index: int, size: int) -> Payload:
    return Payload("r", "a", "b", index, tensors={"x": torch.full((size,), index, dtype=torch.int32)})


def channel(capacity: int = 1 << 20, timeout_s: float = 5.0) -> tuple[Sender, Receiver]:
    memory, left, right = create_channel(capacity)
    return Sender(memory, left, timeout_s), Receiver(memory, right)


def round_trip(message):
    return decode(bytearray(b"".join(bytes(part) for part in encode(message))))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (4, 1, 7)])
def test_tensors_cross_the_wire_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    sent = Payload("request", "talker", "code2wav", 3, True, {"a": tensor, "b": torch.arange(5)}, "stop")
    got = round_trip(sent)
    assert (got.request_id, got.source, got.target, got.index, got.final) == ("request", "talker", "code2wav", 3, True)
    assert got.finish_reason == "stop"
    assert got.tensors["a"].dtype == dtype and got.tensors["a"].shape == tensor.shape
    assert torch.equal(got.tensors["a"], tensor) and torch.equal(got.tensors["b"], torch.arange(5))


def test_strided_tensors_cross_the_wire() -> None:
    tensor = torch.arange(24).reshape(4, 6).T[1:4]
    assert torch.equal(round_trip(Payload("r", "a", "b", tensors={"x": tensor})).tensors["x"], tensor)


def test_control_messages_cross_the_wire() -> None:
    admit = Admit("r", Sampling(temperature=0.9, seed=7), {"speaker": 2}, ("client",), {"talker": 1})
    assert round_trip(admit) == admit
    assert round_trip(Abort("r")) == Abort("r")
    records = Records("talker", 1, [("talker", 0, 1, 2, 3, 4, 5, "decode")], [], 0, {"late_payloads": 1})
    assert [tuple(row) for row in round_trip(records).steps] == records.steps


def test_many_messages_wrap_around_the_ring_in_order() -> None:
    sender, receiver = channel(1 << 16)
    got = []

    def read() -> None:
        while len(got) < 3000:
            select.select([receiver], [], [])
            got.extend(receiver.receive())

    reader = threading.Thread(target=read)
    reader.start()
    for index in range(3000):
        sender.send(payload(index, (index * 37) % 5000))
    reader.join()
    assert [message.index for message in got] == list(range(3000))
    assert all(torch.equal(m.tensors["x"], payload(m.index, (m.index * 37) % 5000).tensors["x"]) for m in got)


def test_one_thread_can_hold_both_ends_for_ever() -> None:
    sender, receiver = channel(1 << 14, timeout_s=1.0)
    for index in range(500):
        sender.send(payload(index, (index * 91) % 1500))
        (got,) = receiver.receive()
        assert torch.equal(got.tensors["x"], payload(index, (index * 91) % 1500).tensors["x"])


def test_an_idle_channel_stays_on_few_pages() -> None:
    sender, receiver = channel(1 << 24)
    positions = []
    for index in range(3000):
        sender.send(payload(index, 1000))
        receiver.receive()
        positions.append(sender.head % sender.capacity)
    assert max(positions) < RESTART + 10_000 and sender.head > 2 * sender.capacity


def test_a_message_larger_than_the_channel_is_refused() -> None:
    sender, _ = channel(1 << 16)
    with pytest.raises(ChannelFull, match="too large for a channel of 65536 bytes"):
        sender.send(payload(0, 1 << 16))


def test_a_sender_waits_a_bounded_time_for_space() -> None:
    sender, receiver = channel(1 << 16, timeout_s=0.2)
    with pytest.raises(ChannelFull, match="took nothing"):
        for index in range(100):
            sender.send(payload(index, 1000))
    assert [message.index for message in receiver.receive()] == list(range(15))


def test_the_end_of_the_other_side_is_noticed_after_all_its_messages() -> None:
    sender, receiver = channel()
    sender.send(payload(1, 10))
    sender.close()
    assert [message.index for message in receiver.receive()] == [1]
    with pytest.raises(ChannelClosed):
        receiver.receive()


def test_sending_to_a_closed_end_says_so() -> None:
    sender, receiver = channel()
    receiver.close()
    with pytest.raises(ChannelClosed):
        sender.send(payload(0, 1))


def _child(memory: int, bell: int) -> None:
    sender = Sender(memory, bell)
    for index in range(200):
        sender.send(payload(index, 10_000))
    os._exit(9)  # without any clean-up, as if it was killed


def test_a_channel_leaves_nothing_behind_when_a_process_dies() -> None:
    memory, left, right = create_channel(1 << 20)
    assert os.fstat(memory).st_nlink == 0, "a file with a name would outlive its users"
    process = mp.get_context("fork").Process(target=_child, args=(memory, left))
    process.start()
    os.close(left)
    receiver, got = Receiver(memory, right), []
    with pytest.raises(ChannelClosed):
        while True:
            select.select([receiver], [], [])
            got.extend(receiver.receive())
    process.join()
    assert [message.index for message in got] == list(range(200))


def test_an_in_process_channel_hands_tensors_over_without_a_copy() -> None:
    woken = []
    both = InProcessChannel(lambda: woken.append(1))
    sent = payload(0, 4)
    both.send(sent)
    (got,) = both.receive()
    assert got.tensors["x"].data_ptr() == sent.tensors["x"].data_ptr() and got.nbytes == 16
    assert got.sent_ns and got.received_ns >= got.sent_ns and woken == [1] and both.receive() == []
