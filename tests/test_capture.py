"""Captures of running pipelines: what the traces hold, on which clock, and what happens when there is none to write."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import record_function

from omni_lab.assemble import open_pipeline
from omni_lab.core import Request, Sampling
from omni_lab.metrics.records import StepRow
from omni_lab.metrics.relative import undisturbed
from omni_lab.pipeline.orchestrator import Pipeline
from omni_lab.run import main
from omni_lab.tracing.activity import NOTHING
from omni_lab.tracing.capture import Traces, capture
from omni_lab.tracing.gaps import analyse
from omni_lab.tracing.merge import merge_traces
from omni_lab.tracing.profiler import CaptureError, LocalProfiler, Options, Recorder, read_piece
from tests.pipelines import ask_all, experiment

Events = list[dict[str, Any]]
STAGES = ["thinker", "talker", "code2wav"]


@dataclass
class Session:
    """What was captured, one thing after the other, from one pipeline."""

    text: Traces
    speech: Traces
    small: Traces
    idle: Traces
    refused: dict[str, str]
    token_ids: list[list[int]]


def request(name: str, tokens: int, frames: int | None = None) -> Request:
    """An answer of `tokens` text tokens and, if so asked, `frames` codec frames."""
    sampling = {"thinker": Sampling(min_tokens=tokens, max_tokens=tokens)}
    if frames:
        sampling["talker"] = Sampling(min_tokens=frames, max_tokens=frames)
    return Request(
        name,
        [{"role": "user", "content": "Please read: Good morning."}],
        ("text", "audio") if frames else ("text",),
        sampling=sampling,
    )


async def refusal(doing: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        await doing
    return str(caught.value)


async def run_session(pipeline: Pipeline, folder: Path) -> Session:
    refused = {
        "stop": await refusal(pipeline.captures.stop()),
        "stage": await refusal(pipeline.captures.start(folder, ["talkr"])),
        "steps": await refusal(pipeline.captures.start(folder, steps=0)),
    }
    (folder / "file").touch()
    refused["directory"] = await refusal(pipeline.captures.start(folder / "file"))
    async with capture(pipeline, folder / "text", ["thinker"], skip_steps=3, steps=25) as text:
        refused["second"] = await refusal(pipeline.captures.start(folder))
        answers = await ask_all(pipeline, [request("a", 40)], 1)
    answers += await ask_all(pipeline, [request("a", 40)], 1)
    async with capture(pipeline, folder / "speech", steps=4) as speech:
        await ask_all(pipeline, [request("b", 6, 14), request("c", 6, 14)], 2)
    async with capture(pipeline, folder / "small", ["thinker"], steps=25, max_mb=0.1) as small:
        await ask_all(pipeline, [request("d", 12)], 1)
    async with capture(pipeline, folder / "idle", ["thinker", "talker"], skip_steps=5, steps=2) as idle:
        await ask_all(pipeline, [request("e", 3)], 1)
    await pipeline.captures.start(folder / "left", ["thinker"])  # nobody stops this one
    await ask_all(pipeline, [request("f", 4)], 1)
    return Session(text, speech, small, idle, refused, [answer.text_ids for answer in answers])


@pytest.fixture(scope="module")
def session(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    async def run() -> Session:
        chunks = ["chunking.initial_frames=2", "chunking.frames=3"]
        async with open_pipeline(experiment(nano, "executor=inline", "connector=in_process", *chunks)) as pipeline:
            return await run_session(pipeline, tmp_path_factory.mktemp("captured"))

    return asyncio.run(run())


def read(path: Path | str) -> tuple[Events, dict[str, Any]]:
    trace = json.loads(gzip.decompress(Path(path).read_bytes()))
    return trace.pop("traceEvents"), trace


def ranges(events: Events, kind: str = "user_annotation") -> Events:
    return [event for event in events if event["ph"] == "X" and event.get("cat") == kind]


def steps_of(events: Events) -> Events:
    return [event for event in ranges(events) if event["name"].startswith("step ")]


def test_the_window_is_so_many_steps_after_those_skipped(session: Session) -> None:
    (worker,) = session.text.workers
    assert (worker.stage, worker.replica, worker.steps, worker.stopped_by) == ("thinker", 0, 25, "steps")
    assert Path(worker.path).name == "thinker_r0.pt.trace.json.gz"
    assert Path(worker.path).stat().st_size == worker.bytes
    assert len(gzip.decompress(Path(worker.path).read_bytes())) == worker.json_bytes
    events, head = read(worker.path)
    found = steps_of(events)
    assert [event["args"]["step"] for event in found] == list(range(3, 28))
    assert {event["name"].split(" ", 2)[2] for event in found} == {"decode batch=1 tokens=1"}
    assert {(event["args"]["stage"], event["args"]["replica"]) for event in found} == {("thinker", 0)}
    assert head["omni_lab"]["worker"] == "thinker_r0"
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["thinker_r0"]
    assert ranges(events, "cpu_op"), "the operators are the point"
    assert not [event for event in events if event.get("cat") in ("python_function", "cpu_instant_event")]
    assert sorted(path.name for path in session.text.directory.iterdir()) == [
        "merged.json.gz",
        "thinker_r0.pt.trace.json.gz",
    ]


def test_answers_are_the_same_while_captured(session: Session) -> None:
    captured, plain = session.token_ids
    assert captured == plain and len(plain) == 40


def test_a_closed_pipeline_leaves_no_piece_behind(session: Session) -> None:
    assert list((session.text.directory.parent / "left").iterdir()) == []


def test_the_step_clock_agrees_with_the_profiler(session: Session) -> None:
    events, head = read(session.text.workers[0].path)
    rows = {row.step: row for row in session.text.measured.steps if row.stage == "thinker"}
    found = {event["args"]["step"]: event for event in steps_of(events)}
    clock = sum(rows[step].end_ns - rows[step].start_ns for step in found) / 1e3
    profiler = sum(event["dur"] for event in found.values())
    assert profiler == pytest.approx(clock, rel=0.05)
    for phase in ("forward", "sample"):
        own = sum(event["dur"] for event in ranges(events) if event["name"] == phase)
        assert own <= sum(getattr(row, f"{phase}_ns") for row in rows.values()) / 1e3
    off = head["omni_lab"]["alignment_us"]
    assert 0 < off < 100
    for step, event in found.items():
        assert rows[step].start_ns / 1e3 - off <= event["ts"]
        assert event["ts"] + event["dur"] <= rows[step].end_ns / 1e3 + off


def test_ranges_nest(session: Session) -> None:
    """No viewer can draw ranges of one thread that overlap without one holding the other."""
    for traces in (session.text, session.speech):
        for path in traces.paths:
            events, head = read(path)
            own = [e for e in events if e["ph"] == "X" and e["tid"] == head["omni_lab"]["thread"]]
            assert not overlapping(own), path


def overlapping(events: Events) -> list[tuple[str, str]]:
    found, around = [], []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + 0.01:
            around.pop()
        if around and event["ts"] + event["dur"] > around[-1]["ts"] + around[-1]["dur"] + 0.01:
            found.append((around[-1]["name"], event["name"]))
        around.append(event)
    return found


def test_stages_of_one_process_are_told_apart(session: Session) -> None:
    """One profiler records the three stages; each operator belongs to the stage that had the thread."""
    operators = {worker.stage: {e["name"] for e in ranges(read(worker.path)[0])} for worker in session.speech.workers}
    assert set(operators) == set(STAGES)
    for worker in session.speech.workers:
        events, head = read(worker.path)
        assert len(steps_of(events)) == worker.steps == 4
        assert head["omni_lab"]["events_of_others"] > 0
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps_of(events)]
        inside = [op for op in ranges(events, "cpu_op") if any(a <= op["ts"] <= b for a, b in spans)]
        assert len(inside) > 0.5 * len(ranges(events, "cpu_op"))
    convolution = "aten::conv1d"  # only the vocoder has one
    found = {w.stage for w in session.speech.workers if any(e["name"] == convolution for e in read(w.path)[0])}
    assert found == {"code2wav"}


def test_merged_trace(session: Session) -> None:
    events, head = read(session.speech.merged)
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"client", *(f"{stage}_r0" for stage in STAGES)}
    assert len(set(names.values())) == 4
    assert {worker["worker"] for worker in head["omni_lab"]["workers"]} == set(names) - {"client"}
    arrows = paired(events, "s", "f", "handoff")
    assert {(start["pid"], end["pid"]) for start, end in arrows} == {
        (names["thinker_r0"], names["talker_r0"]),
        (names["talker_r0"], names["code2wav_r0"]),
    }
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    for start, end in arrows:
        assert start["ts"] < end["ts"]
        assert around(start, steps) and around(end, steps)
    chunks = session.speech.measured.chunks
    spoken = paired(events, "b", "e", "audio")
    assert 0 < len(spoken) <= sum(chunk.edge == "code2wav->client" for chunk in chunks)
    requests = {start["args"]["request"] for start, _ in paired(events, "b", "e", "request")}
    assert requests == {"b", "c"}
    for start, end in [*spoken, *paired(events, "b", "e", "handoff")]:
        assert start["ts"] <= start["args"]["sent_us"] <= end["ts"]


def paired(events: Events, begin: str, end: str, kind: str) -> list[tuple[dict, dict]]:
    found: dict[int, dict[str, dict]] = defaultdict(dict)
    for event in events:
        if event["ph"] in (begin, end) and event["cat"] == kind:
            assert event["ph"] not in found[event["id"]]
            found[event["id"]][event["ph"]] = event
    return [(pair[begin], pair[end]) for pair in found.values()]


def around(event: dict[str, Any], steps: Iterable[dict[str, Any]]) -> bool:
    thread = (event["pid"], event["tid"])
    return any((s["pid"], s["tid"]) == thread and s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in steps)


def test_steps_outside_of_the_windows_are_drawn_from_the_step_clock(session: Session) -> None:
    events, head = read(session.speech.merged)
    start_ns, end_ns = head["omni_lab"]["window_ns"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    drawn = {
        (names[e["pid"]], int(e["name"].split()[1])) for e in events if e["ph"] == "X" and e["name"].startswith("step ")
    }
    rows: list[StepRow] = session.speech.measured.steps
    assert drawn == {(f"{row.stage}_r0", row.step) for row in rows if row.end_ns > start_ns and row.start_ns < end_ns}


def test_gaps_from_the_step_clock_are_drawn_as_phases(session: Session, tmp_path: Path) -> None:
    """Two workers without a trace: their phases, in and between their steps, touch and nothing is left out."""
    (path,) = [worker.path for worker in session.speech.workers if worker.stage == "code2wav"]
    rows = session.speech.measured.steps
    merge_traces(tmp_path / "merged.json.gz", [path], rows, session.speech.measured.chunks)
    events, head = read(tmp_path / "merged.json.gz")
    start_ns, end_ns = head["omni_lab"]["window_ns"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    drawn = ranges(events, "step_clock")
    for worker in ("thinker_r0", "talker_r0"):
        own = [event for event in drawn if event["pid"] == names[worker]]
        steps = [row for row in rows if f"{row.stage}_r0" == worker and start_ns < row.end_ns and row.start_ns < end_ns]
        phases = sorted((e for e in own if not e["name"].startswith("step ")), key=lambda event: event["ts"])
        assert len(steps) > 1 and not overlapping(own)
        assert {"payload", "schedule", "prepare", "forward"} <= {event["name"] for event in phases}
        for before, after in pairwise(phases):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=0.01)
        assert all(event["ts"] >= min(start_ns, steps[0].start_ns) / 1e3 for event in phases)
    analysis = analyse(tmp_path / "merged.json.gz")
    workers = analysis.workers.set_index("worker")
    causes = analysis.causes.set_index(["worker", "cause"]).share
    assert workers.status["talker_r0"] == "ok" and workers.work_us_median["talker_r0"] > 0
    assert causes["talker_r0"].get(NOTHING, 0.0) < 0.01 < causes["talker_r0"]["payload"]


def test_the_bound_on_size_ends_a_window(session: Session) -> None:
    (worker,) = session.small.workers
    assert worker.stopped_by == "max_mb"
    assert 1 <= worker.steps < 11
    assert worker.path and not worker.error


def test_what_is_in_the_way_is_said(session: Session) -> None:
    assert session.refused["stop"] == "no capture runs; start one first"
    assert session.refused["second"] == "a capture runs already; stop it first"
    assert "talkr" in session.refused["stage"] and str(STAGES) in session.refused["stage"]
    assert "steps of at least 1" in session.refused["steps"]
    assert "expected a directory" in session.refused["directory"]


def test_a_stage_without_a_step_in_its_window_says_so(session: Session) -> None:
    thinker, talker = session.idle.workers
    assert (thinker.path, thinker.steps) == ("", 0)
    assert "took only 3 steps and skip_steps is 5" in thinker.error
    assert "took only 0 steps" in talker.error
    assert session.idle.merged is None
    assert list(session.idle.directory.iterdir()) == []


PARTNER = """
import sys
from torch.profiler import record_function
from omni_lab.tracing.profiler import LocalProfiler, Options, Recorder, read_piece
import json
recorder = Recorder(LocalProfiler())
recorder.open(Options(sys.argv[1]))
recorder.start()
for number in range(int(sys.argv[2])):
    sys.stdin.buffer.read(1)
    with record_function(f"partner {number}"):
        pass
    sys.stdout.buffer.write(b"x")
    sys.stdout.buffer.flush()
recorder.stop()
events = [e for piece in recorder.pieces for e in read_piece(piece).events if e.name.startswith("partner")]
print(json.dumps([(e.ts, e.ts + e.dur) for e in events]))
recorder.close()
"""


def test_two_processes_lie_on_one_clock(tmp_path: Path) -> None:
    """A byte goes to and fro: no range may begin before the one that it answers to has ended.

    By how much the ways there and back seem to differ is twice the error of the clocks.
    """
    rounds = 200
    command = [sys.executable, "-c", PARTNER, str(tmp_path), str(rounds)]
    recorder = Recorder(LocalProfiler())
    recorder.open(Options(str(tmp_path)))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent
    ) as p:
        p.stdin.write(b"x")
        p.stdin.flush()
        p.stdout.read(1)  # it is there
        recorder.start()
        for number in range(1, rounds):
            with record_function(f"own {number}"):
                pass
            p.stdin.write(b"x")
            p.stdin.flush()
            p.stdout.read(1)
        recorder.stop()
        theirs = json.loads(p.stdout.read())[1:]
    own = [(e.ts, e.ts + e.dur) for e in read_piece(recorder.pieces[0]).events if e.name.startswith("own")]
    recorder.close()
    assert len(own) == len(theirs) == rounds - 1
    assert list(tmp_path.iterdir()) == []

    def error_us(shift: float) -> float:
        there = min(their[0] + shift - mine[1] for mine, their in zip(own, theirs, strict=True))
        back = min(mine[0] - their[1] - shift for mine, their in zip(own[1:], theirs[:-1], strict=True))
        return abs(there - back) / 2 if min(there, back) > -100 else float("inf")

    assert error_us(0) < 100
    assert error_us(250) > 100


def test_workers_in_processes(nano: Path, tmp_path: Path) -> None:
    """Each writes its own trace; what a stage got lies after what its source made, in the profilers' own times.

    The networks live in a process more each: their operators are the workers'.
    """

    async def run() -> Traces:
        chunks = ["chunking.initial_frames=2", "chunking.frames=3"]
        remote = "optimizations.hot_path.single_process_executor=false"
        async with open_pipeline(experiment(nano, remote, *chunks)) as pipeline:
            async with capture(pipeline, tmp_path, ["talker", "code2wav"], steps=3) as traces:
                await ask_all(pipeline, [request("a", 6, 12)], 1)
            return traces

    traces = asyncio.run(run())
    assert traces.errors == []
    assert len({event["pid"] for path in traces.paths for event in read(path)[0] if "pid" in event}) == 2
    for path in traces.paths:
        events, head = read(path)
        (network,) = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == "network"]
        calls = [e for e in ranges(events) if e["name"] == "forward"]
        theirs = [op | {"tid": head["omni_lab"]["thread"]} for op in ranges(events, "cpu_op") if op["tid"] == network]
        assert sum(around(op, calls) for op in theirs) > 100
    events, _ = read(traces.merged)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"client", "thinker_r0", "talker_r0", "code2wav_r0"}
    sent, received = next(pair for pair in paired(events, "s", "f", "handoff") if names[pair[0]["pid"]] == "talker_r0")
    payload = next(start for start, _ in paired(events, "b", "e", "handoff") if start["id"] == sent["id"])
    off = max(worker.alignment_us for worker in traces.workers)
    assert sent["ts"] <= payload["args"]["sent_us"] + off <= received["ts"] + 2 * off


def test_run_captures_the_first_repeat(tmp_path: Path, nano: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "traced.yaml"
    file.write_text(f"""
name: traced
model: {{checkpoint: {nano}}}
executor: inline
connector: in_process
optimizations: {{graphs: {{thinker: false, talker: false, code2wav: false}}}}
stages: {{thinker: {{sampling: {{max_tokens: 9}}}}}}
workload: {{num_prompts: 2, concurrency: [1, 2], warmup: 0, repeats: 2, modalities: [text]}}
profile: {{enabled: true, stages: [thinker, talker], skip_steps: 1, steps: 3}}
""")
    assert main([str(file), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    capsys.readouterr()
    for cell in json.loads((tmp_path / "run" / "run.json").read_text())["cells"]:
        first, second = sorted(cell["runs"], key=lambda run: run["repeat"])
        assert "traces" not in second
        thinker, talker = first["traces"]["workers"]
        assert thinker["path"] == f"traces/traced-c{cell['concurrency']}-r0/thinker_r0.pt.trace.json.gz"
        assert (thinker["steps"], thinker["stopped_by"], thinker["error"]) == (3, "steps", "")
        assert thinker["bytes"] == (tmp_path / "run" / thinker["path"]).stat().st_size
        assert (tmp_path / "run" / first["traces"]["merged"]).is_file()
        assert talker["path"] is None and "took only 0 steps" in talker["error"]
        assert cell["repeats"] == 1
        assert cell["request_throughput"] == second["request_throughput"]


def test_captured_repeats_count_only_if_there_are_no_others() -> None:
    captured, plain = {"repeat": 0, "traces": {}}, {"repeat": 1}
    assert undisturbed([captured, plain]) == [plain]
    assert undisturbed([captured]) == [captured]


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_tensorboard_opens_the_run(session: Session, unused_port: int) -> None:
    command = ["-m", "tensorboard.main", "--host", "127.0.0.1", "--load_fast=false"]
    place = ["--port", str(unused_port), "--logdir", str(session.text.directory.parent)]
    with subprocess.Popen([sys.executable, *command, *place], stderr=subprocess.PIPE) as board:
        try:
            ask = f"http://127.0.0.1:{unused_port}/data/plugin/pytorch_profiler/"
            runs = ["small", "speech", "text"]  # they are loaded one after the other
            assert eventually(lambda: loaded(get(f"{ask}runs"), len(runs))) == runs
            for run, workers in (("text", ["thinker_r0"]), ("speech", sorted(f"{stage}_r0" for stage in STAGES))):
                assert get(f"{ask}workers?run={run}&view=Overview") == workers
            overview = get(f"{ask}overview?run=text&worker=thinker_r0&span=default&view=Overview")
            assert [row[0] for row in overview["steps"]["rows"]] == [str(step) for step in range(3, 28)]
        finally:
            board.terminate()


def loaded(answer: dict[str, Any], count: int) -> list[str] | None:
    return None if answer["loading"] or len(answer["runs"]) < count else answer["runs"]


def get(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.loads(answer.read())


def eventually(ask: Callable[[], Any]) -> Any:
    """The first answer that is not None; how long that takes does not matter, only that it comes."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            if (answer := ask()) is not None:
                return answer
        except (urllib.error.URLError, ConnectionError):
            pass
        time.sleep(0.2)
    raise TimeoutError("TensorBoard did not answer")
