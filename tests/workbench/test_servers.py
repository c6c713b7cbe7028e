"""Servers from a notebook: a running one is measured, and ours is started and stopped."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from omni_lab.core import PipelineError
from omni_lab.experiment import ExperimentError, load_experiment
from omni_lab.workbench import attach, runs, servers, serving
from tests.serving import served

EXPERIMENT = """
name: small
model: {checkpoint: nano}
executor: inline
connector: in_process
optimizations: {graphs: {thinker: false, talker: false, code2wav: false}, async_chunk: true}
stages: {talker: {sampling: {temperature: 0.0, repetition_penalty: 1.0}}}
workload: {num_prompts: 3, concurrency: 2, warmup: 0, repeats: 1, output: {text_tokens: 6, codec_frames: 8}}
results: {save_audio: 0}
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one experiment, and nothing in results."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "small.yaml").write_text(EXPERIMENT)
    for module in (runs, servers):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path


def test_a_server_that_runs_is_measured_with_the_experiments_workload(lab: Path, capfd: pytest.CaptureFixture):
    with (
        served(load_experiment(lab / "experiments" / "small.yaml")) as running,
        serving("no such experiment", url=running.url) as url,
    ):
        run = attach(url, "small", ["name=attached"])
    assert run.path.parent == lab / "results" / "attached"
    assert run.requests["error"].isna().all() and len(run.requests) == 3
    assert set(run.requests["codec_frames"]) == {8} and set(run.cells["configuration"]) == {"attached"}
    assert run.record["configurations"]["attached"]["effective"]["server"] == running.url


def test_ours_is_started_and_stopped(lab: Path):
    with serving("small") as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").json()["data"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_what_cannot_be_served_or_asked_says_why(lab: Path):
    with pytest.raises(ExperimentError, match="batchingg"), serving("small", ["optimizations.batchingg=true"]):
        pass
    with pytest.raises(PipelineError, match="nobody answers"):
        attach("http://127.0.0.1:9", "small")
