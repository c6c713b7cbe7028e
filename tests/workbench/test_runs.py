"""Runs from notebooks: modes and mistakes, a real run while a loop is running, progress, cancel, interrupt."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager

from omni_lab.experiment import load_configurations
from omni_lab.frames import load
from omni_lab.workbench import RunJob, open_run, runs
from omni_lab.workload.job import new_run_path
from tests.pipelines import SMALL

PATIENCE_S = 300
"""Only so that a hanging run cannot hang the tests."""

EXPERIMENT = (
    SMALL
    + """\
stages: {talker: {sampling: {temperature: 0.0, repetition_penalty: 1.0}}}
workload: {num_prompts: 40, concurrency: [1, 2], warmup: 1, repeats: 5, output: {text_tokens: 4, codec_frames: 8}}
results: {save_audio: 0}
"""
)
FEW = ("workload.num_prompts=2", "workload.repeats=1")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one experiment."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "small.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    return tmp_path


def job_of(root: Path, *settings: str, **options: object) -> RunJob:
    return RunJob(*load_configurations(root / "experiments" / "small.yaml", settings), root / "out", **options)


def test_reference_results_are_read_as_they_are() -> None:
    run = open_run("peers", quick=["no.such.key=1"])
    assert run.path == runs.ROOT / "results" / "reference" / "peers" and list(run.cells["concurrency"].unique()) == [
        1,
        16,
    ]


def test_mistakes_say_what_to_do(root: Path) -> None:
    with pytest.raises(ValueError, match=r"mode: expected reference, quick or full, got 'quik'; did you mean 'quick'"):
        open_run("small", "quik")
    with pytest.raises(FileNotFoundError, match="no reference results of this name; `make reference RUNS=small`"):
        open_run("small")
    with pytest.raises(
        ValueError, match=r"smal.yaml: expected an experiment file, there is none; did you mean 'small'"
    ):
        open_run("smal", "quick")
    with pytest.raises(ValueError, match=r"workload.repeats: expected at least 1, got 0"):
        open_run("small", "quick", ["workload.repeats=0"])
    assert not (root / "results").exists()


def test_quick_runs_here_though_a_loop_is_running(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> None:
        nonlocal run
        run = open_run("small", "quick", FEW, ["workload.concurrency=[2]"])

    run = None
    asyncio.run(cell())
    assert run.path.parent == root / "results" / "small" and (run.path / "report.html").is_file()
    assert list(run.cells["concurrency"]) == [2] and list(run.cells["completed"]) == [2]
    assert "3/3" in capsys.readouterr().err  # one warm-up and two requests


def test_progress_counts_requests_and_names_what_goes_on(root: Path) -> None:
    heard = []
    job = job_of(root, *FEW, changed=lambda job: heard.append(job.progress))
    run = job.result(PATIENCE_S)
    assert [(one.done, one.total) for one in heard][-1] == (6, 6) and job.done
    assert [one.done for one in heard] == sorted(one.done for one in heard)
    titles = list(dict.fromkeys(one.title for one in heard))
    assert titles[0] == "small: loading, 0 of 3" and "small-c1-r0: warm-up" in titles and titles[-1] == "small-c2-r0"
    assert list(run.cells["completed"]) == [2, 2]
    assert job.kept == f"2 of 2 cells are finished and kept in {root / 'out'}"


def test_runs_of_one_second_have_directories_of_their_own(tmp_path: Path) -> None:
    made = []
    for _ in range(3):
        made.append(new_run_path("small", tmp_path))
        made[-1].mkdir(parents=True)
    assert len(set(made)) == 3 and {path.parent for path in made} == {tmp_path / "small"}


def test_cancel_keeps_what_is_finished(root: Path) -> None:
    first = threading.Event()
    job = job_of(root, changed=lambda job: job.directory.finished and first.set())
    job.future.add_done_callback(lambda _: first.set())
    assert first.wait(PATIENCE_S) and not job.done
    job.cancel()
    assert job.done
    with pytest.raises(CancelledError, match=r"cancelled: \d of 10 cells are finished and kept in .*out"):
        job.result()
    kept = load(root / "out")
    assert 1 <= len(kept.record["cells"]) <= 2 and (kept.cells["completed"] == 40).all()


def test_a_run_that_fails_says_why_and_what_is_kept(root: Path) -> None:
    chats = root / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "Hi"}], "speaker": "nobody"}\n')
    job = job_of(root, *FEW, "workload.concurrency=[1]", f"workload.dataset={chats}", "workload.warmup=0")
    with pytest.raises(Exception, match=r"no request was completed in small at concurrency 1 .*; 1 of 1 cells"):
        job.result(PATIENCE_S)


def test_in_a_kernel_bars_are_widgets_and_an_interrupt_keeps_cells(root: Path) -> None:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(root))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(PATIENCE_S)
        setup = (
            f"from pathlib import Path; from omni_lab.workbench import open_run, runs; runs.ROOT = Path({str(root)!r})"
        )
        _, outputs = execute(client, f"{setup}\nrun = open_run('small', 'quick', {FEW!r})\nprint(len(run.cells))")
        kinds = {output["msg_type"] for output in outputs}
        assert kinds == {"display_data", "stream"}, [one["content"] for one in outputs]  # no warning, no bar as text
        assert all(
            "application/vnd.jupyter.widget-view+json" in one["content"]["data"]
            for one in outputs
            if one["msg_type"] == "display_data"
        )
        assert [one["content"]["text"] for one in outputs if one["msg_type"] == "stream"] == ["2\n"]

        stop = threading.Thread(target=interrupt_after_a_cell, args=(manager, root / "results" / "small"))
        stop.start()
        reply, _ = execute(client, "open_run('small', 'full')")
        stop.join()
        assert reply["ename"] == "KeyboardInterrupt" and "of 10 cells are finished and kept in" in reply["evalue"]
        reply, _ = execute(client, f"assert len(open_run('small', 'quick', {FEW!r}).cells) == 2")
        assert reply["status"] == "ok"  # the pipeline is gone, the kernel as good as before
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(client, code: str) -> tuple[dict, list[dict]]:
    outputs = []
    kept = ("display_data", "stream", "error")
    hook = lambda message: outputs.append(message) if message["msg_type"] in kept else None  # noqa: E731
    reply = client.execute_interactive(code, output_hook=hook, timeout=PATIENCE_S)
    return reply["content"], outputs


def interrupt_after_a_cell(manager: KernelManager, results: Path) -> None:
    """When a run that is not there yet has finished a cell."""
    before, pause = set(results.glob("*/steps.parquet")), threading.Event()
    while set(results.glob("*/steps.parquet")) == before:
        pause.wait(0.05)
    pause.wait(0.2)  # run.json follows
    manager.interrupt_kernel()
