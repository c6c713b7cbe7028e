"""Step gaps of traces with known answers: the idle share is right within 1 %, or the trace is called incomplete."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from omni_lab.tracing.activity import NOTHING
from omni_lab.tracing.gaps import Analysis, analyse
from tests.synthetic_traces import ORIGIN, PID, THREAD, Program, decoder, write


def only(analysis: Analysis) -> pd.Series:
    assert len(analysis.workers) == 1
    return analysis.workers.iloc[0]


def check(program: Program, path: Path, **options: str) -> Analysis:
    """The analysis, which must agree with the truth µs by µs."""
    analysis = analyse(program.write(path), **options)
    worker = only(analysis)
    idle, gaps = program.truth()
    assert worker.status == "ok", worker.reason
    assert worker.steps == len(program.steps)
    assert analysis.gaps.gap_us.tolist() == pytest.approx(gaps, abs=0.01)
    assert worker.idle_share == pytest.approx(idle, abs=1e-4) and worker.busy_share == pytest.approx(1 - idle, abs=1e-4)
    assert worker.gap_us_median == pytest.approx(np.median(gaps), abs=0.01)
    assert worker.gap_us_p99 == pytest.approx(np.percentile(gaps, 99), abs=0.01)
    return analysis


def refused(path: Path, reason: str, **options: str) -> None:
    """The trace is called incomplete for that reason, and there is no figure of idle time."""
    analysis = analyse(path, **options)
    worker = only(analysis)
    assert worker.status == "incomplete" and reason in worker.reason, worker.reason
    assert np.isnan([worker.idle_share, worker.busy_share, worker.gap_us_median, worker.gap_share]).all()
    assert analysis.gaps.empty and analysis.causes.empty


def test_plain_kernels(tmp_path: Path) -> None:
    analysis = check(decoder(), tmp_path / "plain.json")
    worker = only(analysis)
    assert (worker.step_ms_median, worker.gap_us_median, worker.gap_us_p95) == pytest.approx((1.0, 300, 300))
    assert worker.idle_share == pytest.approx(300 * 39 / (1300 * 39 + 1000))
    assert "markers" in worker.found and worker.worker == "plain"
    batches = analysis.by_batch().set_index("batch")
    assert batches.gaps.to_dict() == {1: 19, 2: 20} and batches["p99"].tolist() == pytest.approx([300, 300])
    assert analysis.gaps.step.tolist() == list(range(1, 40))


@pytest.mark.parametrize("duration", [None, float("nan"), 1e30])
def test_kernels_without_an_end_are_no_idle_time(duration: float | None, tmp_path: Path) -> None:
    program = decoder()
    for event in [one for one in program.events if one.get("cat") == "kernel"][::3]:
        event["dur"] = duration
    refused(program.write(tmp_path / "a.json"), "events are damaged")


def test_steps_that_take_no_time_have_no_gap(tmp_path: Path) -> None:
    program = Program()
    for step in range(5):
        program.range(f"step {step} decode batch=1 tokens=1", 100 * step, 100 * step)
    refused(program.write(tmp_path / "a.json"), "no gap between two steps that take any time")


def test_what_fills_the_gaps_is_the_hosts_own_time(tmp_path: Path) -> None:
    """Each gap: 10 µs of synchronization, 10 of the step's own, 10 of nothing, 200 of detokenize, 60 of nothing, then
    the next step: 2 µs of its own, 1 of embedding, 2 of the launch, 3 of embedding again, 2 of its own."""
    causes = check(decoder(11), tmp_path / "a.json").causes.set_index("cause")
    expected = {"cudaStreamSynchronize": 10, "detokenize": 200, "(nothing recorded)": 70, "aten::embedding": 4}
    expected |= {"cudaLaunchKernel": 2, "step # decode batch=# tokens=#": 14}
    assert {name: ms * 100 for name, ms in causes.ms.items()} == pytest.approx(expected, abs=0.01)
    assert causes.share.sum() == pytest.approx(1)
    assert causes.kind["cudaStreamSynchronize"] == "wait" and causes.kind["detokenize"] == "range"
    assert causes.index[0] == "detokenize"


def test_waits_of_our_own_workers_are_told_from_work(tmp_path: Path) -> None:
    program = Program(name="talker_r0")
    for index in range(10):
        program.step(1000 * index, 1000 * index + 400)
        program.range(f"ProfilerStep#{index}", 1000 * index - 600, 1000 * index + 410, "user_annotation")
        for at, name in ((420, "payload"), (500, "input"), (550, "slot")):
            program.range(name, 1000 * index - 1000 + at, 1000 * index - 1000 + at + 40, "user_annotation")
    analysis = check(program, tmp_path / "a.json")
    causes = analysis.causes.set_index("cause")
    assert causes.kind.to_dict() == {"input": "wait", "payload": "range", "slot": "wait", NOTHING: "nothing"}
    assert causes.ms[["input", "slot", "payload"]].tolist() == pytest.approx([0.36] * 3)
    assert only(analysis).work_us_median == pytest.approx(600 - 80) and set(analysis.gaps.work_us) == {520.0}


def test_one_function_of_many_objects_is_one_cause(tmp_path: Path) -> None:
    program = Program()
    for index in range(5):
        program.step(1000 * index, 1000 * index + 400)
        name = f"<built-in method tolist of Tensor object at 0x7f{index}b2c>"
        program.range(name, 1000 * index + 450, 1000 * index + 550, "python_function")
    causes = check(program, tmp_path / "a.json").causes.set_index("cause")
    assert causes.ms.to_dict() == pytest.approx({"<built-in method tolist of Tensor object>": 0.4, NOTHING: 2.0})


@pytest.mark.parametrize("device", [True, False])
def test_pauses_of_our_own_profiler_are_no_time_of_the_worker(device: bool, tmp_path: Path) -> None:
    """700 µs in the gap before each third step; on the device the step's work ends 100 µs into the first of them."""
    program, at = Program(name="talker_r0"), 0
    for index in range(12):
        program.step(at, at + 400)
        end = at + 400
        if device:
            end = at + (500 if index == 2 else 400)
            program.launch(at + 5, at, end)
        if index % 3 == 2:
            program.range("profiler", at + 400, at + 1100, "wait")
            at += 700
        at += 600
    analysis = analyse(program.write(tmp_path / "a.json"))
    worker = only(analysis)
    assert worker.status == "ok", worker.reason
    assert analysis.gaps.gap_us.tolist() == pytest.approx([200] * 11)
    busy = 12 * 400 + (100 if device else 0)
    assert worker.window_ms * 1000 == pytest.approx(busy + 11 * 200)
    assert worker.idle_share == pytest.approx(11 * 200 / (busy + 11 * 200)) == worker.gap_share
    assert f"{2.0 if device else 2.1:.3g} ms left out" in worker.found
    assert analysis.causes.cause.tolist() == [NOTHING]


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_streams_devices_and_overlaps(seed: int, tmp_path: Path) -> None:
    """The host runs ahead, streams overlap, copies cross the borders of steps, a second device helps."""
    random = np.random.default_rng(seed)
    program, at, free = Program(), 0, {}
    devices, streams = 1 + seed % 2, 1 + seed % 3
    for _ in range(random.integers(2, 60)):
        activities = random.integers(1, 9)
        program.step(at, at + 10 * int(activities) + 5, batch=int(random.integers(1, 5)))
        for index in range(activities):
            stream, device = int(random.integers(streams)), int(random.integers(devices))
            begin = max(at + 10 * index + 4, free.get((device, stream), 0)) + int(random.integers(0, 40))
            end = begin + int(random.integers(1, 300))
            free[device, stream] = end
            cat = ["kernel", "gpu_memcpy", "gpu_memset"][random.integers(3)]
            program.launch(at + 10 * index + 1, begin, end, f"k{index}", cat, stream, device)
        at += 10 * int(activities) + int(random.integers(6, 600))
    random.shuffle(program.events[program.events.index(program.events[-1]) :])
    analysis = check(program, tmp_path / "trace.json.gz")
    for row in analysis.devices.itertuples():
        busy = program.busy[int(row.device)]
        timeline = np.zeros(max(end for _, end in busy) + 1, bool)
        for begin, end in busy:
            timeline[begin:end] = True
        spans = [span for step in program.steps for span in step["busy"]]
        begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
        assert row.busy_share == pytest.approx(timeline[begin:end].sum() / (end - begin), abs=1e-4)


def test_launches_of_the_driver_inside_the_runtimes_are_not_lost(tmp_path: Path) -> None:
    program = decoder()
    for event in [event for event in program.events if event["name"] == "cudaLaunchKernel"]:
        inner = event | {"name": "cuLaunchKernel", "cat": "cuda_driver", "ts": event["ts"] + 0.5, "dur": 1.0}
        program.events.append(inner | {"args": {"correlation": event["args"]["correlation"] + 1000}})
    check(program, tmp_path / "a.json")


def test_calls_that_stick_out_of_their_operators_change_nothing(tmp_path: Path) -> None:
    """The runtime's calls are timed by another clock than the host's ranges; causes still add up to the gaps."""
    program = decoder()
    for event in program.events:
        if event["cat"] == "cuda_runtime":
            event["ts"] += 7.5
    causes = check(program, tmp_path / "a.json").causes
    assert causes.share.sum() == pytest.approx(1) and (causes.ms > 0).all()


def test_work_between_steps_is_busy_and_belongs_to_no_step(tmp_path: Path) -> None:
    """Sampling after the marked range, copies before the next: what is idle around them is still between the steps."""
    program = Program()
    for index in range(30):
        at = index * 1000
        program.step(at, at + 500)
        program.launch(at + 5, at + 10, at + 610, "forward")
        step = program.steps.pop()  # what follows is launched outside of the mark
        program.launch(at + 650, at + 660, at + 700, "sample")
        program.launch(at + 710, at + 720, at + 730, "copy", "gpu_memcpy", stream=8)
        program.steps[-1:] = [step] if not program.steps else [program.steps[-1], step]
        for one in program.steps:
            one["busy"] = one["busy"][:1]
    check(program, tmp_path / "a.json")


def graph_decoder(kernels: bool, wait: str | None) -> Program:
    program = Program()
    for index in range(50):
        at = index * 2000
        program.step(at, at + 1600, batch=8)
        program.launch(at + 2, at + 8, at + 1508, call="cudaGraphLaunch", seen=False)
        if kernels:
            program.busy.clear()
            program.steps[-1]["busy"].clear()
            for number in range(10):
                program.activity(at + 8 + 150 * number, at + 8 + 150 * (number + 1), f"graph kernel {number}")
        if wait:
            program.range(wait, at + 20, at + 1510, "cuda_runtime")
    if kernels:
        program.busy = {0: [span for step in program.steps for span in step["busy"]]}
    return program


def test_graph_replays_with_their_kernels_are_busy(tmp_path: Path) -> None:
    worker = only(check(graph_decoder(True, "cudaStreamSynchronize"), tmp_path / "graph.json"))
    assert worker.gap_us_median == pytest.approx(500) and "graph" not in worker.found


def test_graph_replays_without_kernels_fall_back_to_host_launches(tmp_path: Path) -> None:
    program = graph_decoder(False, "cudaStreamSynchronize")
    worker = only(analyse(program.write(tmp_path / "graph.json")))
    idle, gaps = program.truth()
    assert worker.status == "ok" and "50 of 50 graph replays have no kernels" in worker.found
    assert worker.idle_share == pytest.approx(idle, abs=0.01)
    assert worker.gap_us_median == pytest.approx(np.median(gaps), rel=0.02)


@pytest.mark.parametrize("wait", [None, "cudaEventSynchronize"])
def test_graph_replays_that_nothing_bounds_are_incomplete(wait: str | None, tmp_path: Path) -> None:
    refused(graph_decoder(False, wait).write(tmp_path / "a.json"), "nothing tells how long the device was busy")


def test_graph_replays_awaited_in_a_later_step_are_incomplete(tmp_path: Path) -> None:
    program = graph_decoder(False, None)
    program.range("cudaDeviceSynchronize", 50 * 2000, 50 * 2000 + 5, "cuda_runtime")
    refused(program.write(tmp_path / "a.json"), "only in a later step")


def test_steps_without_marks_are_inferred_from_device_activity(tmp_path: Path) -> None:
    worker = only(check(decoder(mark=None), tmp_path / "a.json"))
    assert worker.found.startswith("inferred from device activity: 'embedding' begins each of 40 repetitions")


def test_layers_are_no_steps(tmp_path: Path) -> None:
    """Within a step a block repeats 24 times; the first step is a prefill of other lengths."""
    program = Program()
    for index in range(20):
        at, took = index * 5000, 90 if index else 150
        program.step(at, at + 500, None)
        program.launch(at, at + 5, at + 105, "embedding")
        for layer in range(24):
            for part, name in enumerate(("norm", "attention", "mlp")):
                begin = at + 105 + took * layer + 30 * part
                program.launch(at + 3 + 3 * layer, begin, begin + 29, name)
        program.launch(at + 400, at + 110 + took * 24, at + 200 + took * 24, "argmax")
    analysis = check(program, tmp_path / "a.json")
    assert "'embedding' begins each of 20" in only(analysis).found


def kernels_in_turn(steps: int, kernels: int, name: Callable[[int], int]) -> Program:
    program = Program()
    for index in range(steps):
        program.step(2000 * index, 2000 * index + 900, None)
        for kernel in range(kernels):
            at = 2000 * index + 40 * kernel
            program.launch(at, at + 5, at + 40, f"kernel {name(kernel)}")
    return program


def test_steps_of_kernels_in_any_order_are_inferred_from_pauses(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    program = kernels_in_turn(20, 20, lambda _: int(random.integers(5)))
    assert "a pause begins each of 20 repetitions" in only(check(program, tmp_path / "a.json")).found


@pytest.mark.parametrize("names", [1, 7])
def test_loops_within_loops_are_ambiguous(names: int, tmp_path: Path) -> None:
    program = kernels_in_turn(20, 40, lambda kernel: kernel % names)
    refused(program.write(tmp_path / "a.json"), "steps are ambiguous")


@pytest.mark.parametrize("seed", range(16))
def test_steps_without_marks_are_right_or_incomplete(seed: int, tmp_path: Path) -> None:
    """Layers of some kernels, a longer first step, other kernels now and then, gaps of any length."""
    random, program, at = np.random.default_rng(seed), Program(), 0
    layers, body, pause = (int(random.integers(*bounds)) for bounds in ((1, 12), (1, 6), (30, 800)))
    for index in range(int(random.integers(3, 60))):
        program.step(at, at + 1, None)
        names = ["embedding", *[f"part {part}" for part in range(body)] * layers, "head"]
        names += ["now and then"] if random.random() < 0.3 else []
        host = at
        for number, name in enumerate(names):
            begin = max(at, host + 5) + int(random.integers(0, 3))
            at = begin + (7 + 13 * (number % (body + 1))) * (3 if index == 0 else 1)
            program.launch(host, begin, at, name, took=3)
            host += 4
        at += int(pause * random.uniform(0.6, 1.6))
    worker = only(analyse(program.write(tmp_path / "a.json")))
    idle, gaps = program.truth()
    if worker.status == "ok":
        assert worker.idle_share == pytest.approx(idle, abs=0.01)
        assert worker.gap_us_median == pytest.approx(np.median(gaps), rel=0.01)
    assert worker.status == "ok" or seed not in range(4)  # most are found


@pytest.mark.parametrize("seed", range(10))
def test_what_does_not_repeat_is_no_loop(seed: int, tmp_path: Path) -> None:
    random, program, at = np.random.default_rng(seed), Program(), 0
    for _ in range(400):
        at += int(random.exponential(100)) + 60
        program.launch(at, at + 5, at + 45, f"kernel {random.integers(30)}")
    refused(program.write(tmp_path / "a.json"), "nothing repeats")


def test_a_trace_without_devices_has_gaps_of_its_host_ranges(tmp_path: Path) -> None:
    program, unmarked = Program(), Program()
    for index in range(30):
        at = 500 * index + 7 * (index % 5)
        for one, name in ((program, "step[DECODE bs={batch}]"), (unmarked, None)):
            one.step(at, at + 400, name)
            one.range("aten::embedding", at, at + 100)
            one.range("aten::softmax", at + 110, at + 200)
            one.range("aten::argmax", at + 250, at + 400)
    worker = only(check(program, tmp_path / "a.json"))
    assert "SGLang" in worker.found and "no device activity" in worker.found
    found = only(check(unmarked, tmp_path / "b.json")).found
    assert "the host's outermost ranges: 'aten::embedding' begins each of 30 repetitions of " in found
    assert "'aten::embedding', 'aten::softmax', 'aten::argmax'; " in found and "--stage-regex" in found


@pytest.mark.parametrize("called", [0, 105, 450], ids=["before", "amid", "after"])
def test_profiler_steps_of_a_host_have_the_gaps_of_the_ranges_inside(called: int, tmp_path: Path) -> None:
    """Wherever in the turn the loop calls `step()`: ProfilerStep lasts until the next, and 300 of 500 µs are slept."""
    program = Program()
    for index in range(30):
        at = 500 * index
        program.step(at, at + 200, None)
        program.range("aten::embedding", at, at + 100)
        program.range("aten::argmax", at + 110, at + 200)
        program.range(f"ProfilerStep#{index + 3}", at + called - 500, at + called, "user_annotation")
    program.range("ProfilerStep#33", 29 * 500 + called, 30 * 500 + called, "user_annotation")
    path = program.write(tmp_path / "a.json")
    analysis = analyse(path)
    worker = only(analysis)
    assert worker.status == "ok" and "(torch.profiler), one turn each; inferred from" in worker.found, worker.reason
    assert set(analysis.gaps.gap_us) == {300.0} and worker.idle_share == pytest.approx(0.6, abs=0.02)
    assert analysis.causes.cause.tolist() == [NOTHING]
    refused(path, "use --stage-regex", stage_regex="ProfilerStep#7$")


def test_profiler_steps_of_a_host_that_show_no_gap_are_incomplete(tmp_path: Path) -> None:
    bare, several = Program(), Program()
    for index in range(30):
        for program in (bare, several):
            program.range(f"ProfilerStep#{index}", 500 * index, 500 * (index + 1), "user_annotation")
        for at in (10, 250):  # two turns a step, or half a turn each: which pause is the gap?
            several.range("aten::embedding", 500 * index + at, 500 * index + at + 100)
            several.range("aten::argmax", 500 * index + at + 110, 500 * index + at + 150)
    for program in (bare, several):
        refused(program.write(tmp_path / "a.json"), "without device activity it shows no gap: use --stage-regex")


def test_numbered_ranges_of_a_host_are_alike(tmp_path: Path) -> None:
    program, layers = Program(), Program()
    for index in range(30):
        at = 700 * index + 3 * (index % 7)
        program.step(at, at + 400, None)
        program.range(f"decode {index} of 4", at, at + 400, "user_annotation")
        program.range("aten::linear", at + 10, at + 200)
        for layer in range(6):
            layers.range(f"layer {layer}", 700 * index + 100 * layer, 700 * index + 100 * layer + 95)
    found = only(check(program, tmp_path / "a.json")).found
    assert "'decode # of #' begins each of 30 repetitions of 'decode # of #'; " in found and "--stage-regex" in found
    refused(layers.write(tmp_path / "b.json"), "steps are ambiguous")


@pytest.mark.parametrize(
    "mark, title, batch",
    [
        ("step {number} decode batch={batch} tokens=9", "omni_lab", 3),
        ("execute_context_1(9)_generation_{batch}(2)", "vLLM", 4),
        ("execute_40_context_1(sq9sk9sqsq81sqsk81)_generation_{batch}(sq2sk8sqsq4sqsk16)", "vLLM", 4),
        ("step[DECODE bs={batch}]", "SGLang", 3),
        ("step[EXTEND bs={batch} toks=40]", "SGLang", 3),
        ("gpu_model_runner: preprocess", "vLLM's scopes", -1),
        ("ProfilerStep#{number}", "torch.profiler", -1),
    ],
)
def test_marks_of_other_programs(mark: str, title: str, batch: int, tmp_path: Path) -> None:
    program = Program()
    for index in range(5):
        program.step(1000 * index, 1000 * index + 400, mark, batch=3)
        program.launch(1000 * index + 5, 1000 * index + 10, 1000 * index + 700)
        if not title.startswith("torch"):
            program.range(f"ProfilerStep#{index}", 1000 * index - 5, 1000 * index + 900, "user_annotation")
    analysis = check(program, tmp_path / "a.json")
    assert f"({title})" in only(analysis).found and set(analysis.gaps.batch) == {batch}


def test_parts_after_a_mark_belong_to_its_step(tmp_path: Path) -> None:
    program = Program()
    for index in range(5):
        at = 1000 * index
        program.range("gpu_model_runner: sample", at + 420, at + 500, "user_annotation")
        program.step(at, at + 400, "execute_context_0(0)_generation_3(3)", batch=3)
        program.launch(at + 5, at + 10, at + 700)
        program.launch(at + 430, at + 720, at + 750, "sampler")
    check(program, tmp_path / "a.json")


def test_a_stage_regex_chooses_the_steps(tmp_path: Path) -> None:
    program = decoder(mark="talker pass {number} of {batch}")
    program.range("step 0 decode batch=1 tokens=1", -100, -90, "user_annotation")
    analysis = check(program, tmp_path / "a.json", stage_regex=r"^talker pass (?P<number>\d+) of (?P<batch>\d+)")
    assert set(analysis.gaps.batch) == {1, 2}
    refused(tmp_path / "a.json", "no range matches --stage-regex", stage_regex="thinker")


@pytest.mark.parametrize("rows", [(10, 11), (PID, PID + 1)], ids=["rows of devices", "rows of processes"])
def test_each_process_of_a_merged_trace_is_a_worker(rows: tuple[int, int], tmp_path: Path) -> None:
    """Both have the same correlations and streams, and the kernels of each fall into the gaps of the other."""
    one, two = decoder(30), decoder(20)
    one.name, two.name, two.pid = "talker_r0", "code2wav_r0", PID + 1
    for row, program in zip(rows, (one, two), strict=True):
        for event in program.events:
            event["pid"] = row if event["cat"] == "kernel" else program.pid
            event["ts"] += 217 if program is two else 0
    merged = {"traceEvents": [one.head(), two.head(), *one.events, *two.events]}
    analysis = analyse(write(merged, tmp_path / "merged.json.gz"))
    workers = analysis.workers.set_index("worker")
    assert workers.steps.to_dict() == {"talker_r0": 30, "code2wav_r0": 20}
    assert (workers.status == "ok").all() and workers.gap_us_median.tolist() == pytest.approx([300, 300])


def test_workers_of_one_name_are_all_told_apart_by_their_files(tmp_path: Path) -> None:
    paths = []
    for folder in ("run1/a-c1-r0", "run1/a-c2-r0", "run2/a-c1-r0"):
        (tmp_path / folder).mkdir(parents=True)
        paths.append(Program.write(decoder(5), tmp_path / folder / "talker_r0.pt.trace.json"))
    decoder(5).write(tmp_path / "other.json")
    names = analyse([*paths[:2], paths[0], tmp_path / "other.json"]).workers.worker.tolist()
    file = "talker_r0.pt.trace.json"
    assert sorted(names) == ["other", f"talker_r0 (run1/a-c1-r0/{file})", f"talker_r0 (run1/a-c2-r0/{file})"]
    assert analyse(tmp_path / "run1").workers.worker[0] == f"talker_r0 (a-c1-r0/{file})"
    analysis = analyse(paths)
    assert set(analysis.workers.worker) == {f"talker_r0 ({path.relative_to(tmp_path)})" for path in paths}
    assert set(analysis.gaps.worker) == set(analysis.causes.worker) == set(analysis.workers.worker)


def test_a_directory_is_all_its_traces_but_the_merged_one(tmp_path: Path) -> None:
    for name in ("talker_r0.pt.trace.json.gz", "thinker_r0.pt.trace.json.gz", "merged.json.gz"):
        decoder(5).write(tmp_path / name)
    (tmp_path / "run.json").write_text("{}")
    assert analyse(tmp_path).workers.worker.tolist() == ["talker_r0", "thinker_r0"]
    assert analyse([tmp_path, tmp_path / "merged.json.gz"]).workers.worker.tolist()[2] == "merged"


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.77, 0.999])
def test_a_truncated_file_is_incomplete(name: str, share: float, tmp_path: Path) -> None:
    path = decoder().write(tmp_path / name, indent=1)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refused(path, "the file")


def test_one_step_and_none(tmp_path: Path) -> None:
    refused(decoder(1).write(tmp_path / "one.json"), "one step has no gap")
    refused(decoder(1, mark=None).write(tmp_path / "none.json"), "no steps found")
    refused(Program().write(tmp_path / "empty.json"), "no steps found")


def shift(wanted: Callable[[dict], bool], by: float) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        for event in filter(wanted, program.events):
            event["ts"] += by

    return change


def later(event: dict) -> bool:
    return event["ts"] > ORIGIN + 20 * 1300 - 1


def first_only(field: str, value: str, moment: float) -> Callable[[Program], None]:
    def change(program: Program) -> None:
        next(event for event in program.events if event[field] == value)["ts"] = moment

    return change


@pytest.mark.parametrize(
    "change",
    [
        shift(later, -5_000),
        shift(later, -700),
        shift(later, 3.6e9),
        shift(later, -3.6e9),
        shift(lambda event: later(event) and event["cat"] == "kernel", 3.6e9),
        shift(lambda event: later(event) and event["cat"] == "kernel", -3000),
        shift(lambda event: later(event) and event["cat"] != "kernel", 60e6),
        first_only("cat", "kernel", 0),
        first_only("cat", "kernel", ORIGIN + 9e9),
        first_only("cat", "user_annotation", 0),
        first_only("cat", "user_annotation", ORIGIN + 9e9),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("mark", ["step {number} decode batch={batch} tokens={batch}", "step[DECODE bs={batch}]"])
def test_clock_jumps_are_incomplete(mark: str, change: Callable[[Program], None], tmp_path: Path) -> None:
    program = decoder(mark=mark)
    change(program)
    refused(program.write(tmp_path / "a.json"), "")


@pytest.mark.parametrize("by", [-700, -20_000, 3.6e9])
def test_clock_jumps_without_a_device_are_incomplete(by: float, tmp_path: Path) -> None:
    program = decoder(mark="ProfilerStep#{number}")
    program.events = [event for event in program.events if event["cat"] in ("cpu_op", "user_annotation")]
    shift(later, by)(program)
    refused(program.write(tmp_path / "a.json"), "the clock jumped")


def test_dropped_events_are_incomplete(tmp_path: Path) -> None:
    program = decoder()
    program.launch(60_000, 0, 0, seen=False)
    refused(program.write(tmp_path / "kernel.json"), "1 of 121 kernel launches have no device activity")
    program = decoder()
    program.events = [event for event in program.events if not event["name"].startswith("step 7 ")]
    refused(program.write(tmp_path / "mark.json"), "1 of 40 steps are missing")
    program = decoder(mark="step[DECODE bs={batch}]")
    program.events = [
        event for event in program.events if event["cat"] not in ("cuda_runtime", "kernel") or later(event)
    ]
    refused(program.write(tmp_path / "half.json"), "20 of 40 steps have no device activity")
    program = decoder()
    program.events[5] |= {"dur": -3}
    refused(program.write(tmp_path / "negative.json"), "1 events are damaged")
    program = decoder()
    program.events.append({"ph": "B", "cat": "cpu_op", "name": "open", "pid": PID, "tid": THREAD, "ts": ORIGIN})
    refused(program.write(tmp_path / "open.json"), "have no end")


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_trace_is_right_or_incomplete(seed: int, tmp_path: Path) -> None:
    """Bytes are cut out of the middle, or the file breaks off: whatever is still said must be true."""
    random = np.random.default_rng(seed)
    program = decoder(60)
    data = json.dumps(program.document()).encode()
    begin = int(random.integers(0, len(data)))
    data = data[:begin] + data[begin + int(random.integers(1, 3000)) :]
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(data))
    try:
        worker = only(analyse(path))
    except Exception as error:
        assert "expected a Chrome trace" in str(error)
        return
    assert worker.status == "incomplete" or worker.idle_share == pytest.approx(program.truth()[0], abs=0.01)
