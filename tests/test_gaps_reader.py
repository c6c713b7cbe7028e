"""Reading Chrome traces: every way in which they are written, in blocks of any size, damaged ones too."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from omni_lab.tracing import chrome_json
from omni_lab.tracing.chrome_json import TraceError
from omni_lab.tracing.gaps import analyse
from omni_lab.tracing.intervals import covered, intersection, nested, union
from omni_lab.tracing.trace_file import Trace, read_trace
from tests.synthetic_traces import ORIGIN, PID, Program, decoder, write


def rows(trace: Trace) -> list[tuple]:
    found = []
    for table in (trace.ranges, trace.python, trace.calls, trace.device):
        for start, end, name, thread, correlation in zip(
            table.start, table.end, table.name, table.thread, table.correlation, strict=True
        ):
            found.append((trace.names[name], trace.threads[thread], int(start), int(end), int(correlation)))
    return found


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block", [64, 1000, 1 << 23])
def test_blocks_of_any_size_give_all_events(indent: int | None, block: int, tmp_path: Path, monkeypatch) -> None:
    program = decoder(12)
    names = ['a "quoted" name', "braces }, { in it", "ends with \\", "]", '"traceEvents": [', "漢字"]
    for index, name in enumerate(names):
        program.range(name, 10_000 + index, 10_000.5 + index, nested=[{"a": 1}, {"b": [{}, {}]}])
    monkeypatch.setattr(chrome_json, "BLOCK", block)
    trace = read_trace(program.write(tmp_path / "a.json", indent))
    expected = [
        (
            event["name"],
            (event["pid"], event["tid"]),
            round(event["ts"] * 1000),
            round((event["ts"] + event["dur"]) * 1000),
        )
        for event in program.events
    ]
    assert sorted(row[:4] for row in rows(trace)) == sorted(expected)
    assert trace.cut is None and trace.damaged == 0 and trace.processes == {PID: "python"}
    launches = [row[4] for row in rows(trace) if row[0] == "cudaLaunchKernel"]
    assert launches == list(range(1, 37))


def test_the_same_trace_however_it_is_written(tmp_path: Path) -> None:
    program = decoder(12)
    document = program.document()
    expected = rows(read_trace(write(document, tmp_path / "plain.json")))
    members = json.dumps(document).encode()
    (tmp_path / "members.json.gz").write_bytes(gzip.compress(members[:5000]) + gzip.compress(members[5000:]))
    others = [
        write(document, tmp_path / "packed.json.gz"),
        write(document["traceEvents"], tmp_path / "array.json"),
        write({"traceEvents": document["traceEvents"], "other": [{"a": 1}, {"b": 2}] * 4000}, tmp_path / "behind.json"),
        tmp_path / "members.json.gz",
    ]
    for path in others:
        trace = read_trace(path)
        assert rows(trace) == expected and trace.cut is None


def test_begin_and_end_pairs_are_ranges(tmp_path: Path) -> None:
    program = decoder(12)
    expected = analyse(program.write(tmp_path / "x.json"))
    pairs = []
    for event in program.events:
        if event["cat"] == "kernel":
            pairs.append(event)
            continue
        head = {key: event[key] for key in ("name", "cat", "pid", "tid", "args")}
        pairs.append(head | {"ph": "B", "ts": event["ts"]})
        pairs.append({"ph": "E", "pid": event["pid"], "tid": event["tid"], "ts": event["ts"] + event["dur"]})
    pairs.sort(key=lambda event: (event["ts"], event["ph"] == "B"))
    found = analyse(write({"traceEvents": [program.head(), *pairs]}, tmp_path / "pairs.json"))
    assert found.workers.status.tolist() == ["ok"]
    assert found.gaps.drop(columns="worker").equals(expected.gaps.drop(columns="worker"))


def test_numbers_and_letters_that_are_not_json_are_read(tmp_path: Path) -> None:
    """Kineto has written inf and nan, and names in another encoding; args are whatever a writer likes."""
    program = decoder(12)
    program.range("inf nan", 20_000, 20_001, bandwidth="@inf@", share="@nan@", text="it is -inf")
    program.range("odd", 20_002, 20_003, correlation="seven", device=[1, 2])
    program.events.append(
        {"ph": "X", "cat": "cpu_op", "name": "list", "pid": PID, "ts": ORIGIN, "dur": 1, "args": ["a"]}
    )
    text = json.dumps(program.document()).replace('"@inf@"', "-inf").replace('"@nan@"', "nan")
    (tmp_path / "a.json").write_bytes(text.encode().replace(b"detokenize", b"d\xe9tokenize"))
    trace = read_trace(tmp_path / "a.json")
    assert len(rows(trace)) == len(program.events) and trace.damaged == 0
    assert {"inf nan", "odd", "list", "d\ufffdtokenize"} <= set(trace.names)
    assert analyse(tmp_path / "a.json").workers.status.tolist() == ["ok"]


@pytest.mark.parametrize("content", [b"", b"hello", b'{"a": 1}', b"\x89PNG\r\n", b'"traceEvents"', b'{"cells": []}\n'])
def test_what_is_no_trace_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.json: expected a Chrome trace"):
        read_trace(tmp_path / "a.json")


def test_progress_adds_up_to_the_size_of_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(chrome_json, "BLOCK", 4096)
    path = decoder(200).write(tmp_path / "a.json.gz")
    told: list[int] = []
    read_trace(path, told.append)
    assert sum(told) == path.stat().st_size and len(told) > 2


def test_memory_stays_far_below_the_file(tmp_path: Path, monkeypatch) -> None:
    """Columns take a few tens of bytes an event, whatever the text of its arguments."""
    import tracemalloc

    monkeypatch.setattr(chrome_json, "BLOCK", 1 << 18)
    program = Program()
    for index in range(15_000):
        program.range(f"op {index % 50}", index, index + 0.5, shapes="[[1, 2, 3], [4, 5, 6]]" * 10)
    path = program.write(tmp_path / "a.json.gz")
    del program
    tracemalloc.start()
    trace = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace.ranges) == 15_000 and peak < 8_000_000


@pytest.mark.parametrize("seed", range(20))
def test_intervals_agree_with_counting(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 300

    def some(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start = random.integers(0, size - 20, count)
        end = start + random.integers(1, 20, count)
        line = np.zeros(size, bool)
        for one, other in zip(start, end, strict=True):
            line[one:other] = True
        return *union(start, end), line

    (start, end, line), (other_start, other_end, other) = some(int(random.integers(0, 20))), some(12)
    at = np.arange(size)
    assert covered(start, end, at).tolist() == [int(line[:one].sum()) for one in at]
    common = np.zeros(size, bool)
    for one, two in zip(*intersection(start, end, other_start, other_end), strict=True):
        common[one:two] = True
    assert (common == (line & other)).all()


def test_ranges_are_nested_and_end_with_what_is_around_them() -> None:
    start, end = np.array([0, 0, 1, 5, 10, 12, 12, 19, 20]), np.array([10, 5, 3, 9, 20, 15, 13, 22, 21])
    around, ends = nested(start, end)
    assert around.tolist() == [-1, 0, 1, 0, -1, 4, 5, 4, -1]
    assert ends.tolist() == [10, 5, 3, 9, 20, 15, 13, 20, 21]
