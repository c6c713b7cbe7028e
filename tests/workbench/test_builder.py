"""The ablation builder: what its controls change, what it refuses, and real runs that it adds to the comparison."""

from __future__ import annotations

import asyncio
import shlex
import threading
from pathlib import Path

import pytest
import traitlets

from omni_lab.comparison import PAIRED, UNPAIRED
from omni_lab.experiment import ExperimentError, load_configurations
from omni_lab.frames import load
from omni_lab.settings import OptimizationsConfig
from omni_lab.workbench import AblationBuilder, runs
from omni_lab.workbench.plot import Plot
from omni_lab.workbench.variation import flat, made_up_name, nested
from tests.pipelines import SMALL

REFERENCE = Path(__file__).parents[2] / "results" / "reference"

PATIENCE_S = 300
"""Only so that a hanging run cannot hang the tests."""

EXPERIMENT = (
    SMALL
    + """\
stages: {talker: {sampling: {temperature: 0.0, repetition_penalty: 1.0}}}
workload: {warmup: 0, output: {text_tokens: 4, codec_frames: 8}}
results: {save_audio: 0}
"""
)
LOAD = ("workload.concurrency=[2]", "workload.num_prompts=2", "workload.repeats=2")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(EXPERIMENT)
    return file


def effective(builder: AblationBuilder) -> list[dict]:
    """What the command that the builder shows would run."""
    words = shlex.split(builder.variation.command(Path("/nowhere")).replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "omni_lab.run"] and set(words[4::2]) == {"--set"}
    return [one.model_dump() for one in load_configurations(words[3], words[5::2])[1]]


def test_every_toggle_has_a_control_that_changes_its_setting(file: Path) -> None:
    builder = AblationBuilder(file, settings=LOAD)
    controls = builder._controls.controls
    toggles = flat(OptimizationsConfig().model_dump(), "optimizations")
    assert repr(builder) and set(toggles) <= set(controls) and not builder.changed and builder.problem == ""
    for key in toggles:
        assert controls[key].value == builder.values[key] and controls[key].description and controls[key].tooltip
        controls[key].value = not builder.values[key]
        assert builder.changed == {key: not builder.values[key]}
        base, varied = effective(builder)
        assert flat(base)[key] == builder.values[key] and flat(varied)[key] == (not builder.values[key])
        assert {name for name in flat(base) if flat(base)[name] != flat(varied)[name]} == {key, "name"}
        controls[key].value = builder.values[key]
    assert not builder.changed


def test_settings_from_python_move_the_controls_and_make_the_command(file: Path) -> None:
    builder = AblationBuilder(file, settings=LOAD)
    builder.changed = {
        "optimizations.batching": False,
        "chunking.ramp": [2, 4],
        "stages.talker.replicas": 2,
        "workload.concurrency": [1, 2],
        "workload.repeats": 2,
    }
    controls = builder._controls.controls
    assert controls["chunking.ramp"].value == "2, 4" and controls["workload.concurrency"].value == "1, 2"
    assert not controls["optimizations.batching"].value and controls["stages.talker.replicas"].value == 2
    assert "workload.repeats" not in builder.changed  # as in the base
    assert builder.variation.name == "no_batching-ramp_2_4-talker_replicas_2"
    assert "--set chunking.ramp=[2, 4]" in builder._preview.value
    base, varied = effective(builder)
    assert base["name"] == "small" and base["optimizations"]["batching"] and base["chunking"]["ramp"] is None
    assert base["workload"] == varied["workload"] and varied["workload"]["concurrency"] == [1, 2]
    builder.beside = False
    assert effective(builder) == [varied]
    controls["workload.concurrency"].value = "1,"
    controls["chunking.ramp"].value = ""
    assert builder.changed["workload.concurrency"] == [1] and "chunking.ramp" not in builder.changed


def test_what_the_experiment_refuses_is_refused_at_once(file: Path) -> None:
    builder = AblationBuilder(file, settings=LOAD)
    for key, typed, message in (
        ("workload.concurrency", "many", "workload.concurrency.0: expected a whole number"),
        ("workload.concurrency", "1, 1", "workload.concurrency: expected different numbers"),
        ("chunking.initial_frames", 0, "chunking.initial_frames: expected at least 1, got 0"),
        ("chunking.ramp", "[", "chunking.ramp: expected a list"),
    ):
        builder._controls.controls[key].value = typed
        assert message in builder.problem and builder._start.disabled and 'role="alert"' in builder._preview.value
        with pytest.raises(ExperimentError, match="expected"):
            builder.run()
        builder.changed = {}
        assert builder.problem == "" and not builder._start.disabled
    builder.changed = {"optimizations.bathing": False}
    assert "unknown key; did you mean 'batching'" in builder.problem
    builder.changed, builder.name = {}, "a name"
    assert "name: expected text that matches" in builder.problem
    builder.name = "small"
    assert "expected experiments of different names" in builder.problem
    with pytest.raises(ExperimentError, match="there is none"):
        AblationBuilder(file.with_name("none.yaml"))


def test_changes_may_be_maps_and_what_no_control_can_hold(file: Path) -> None:
    builder = AblationBuilder(file, settings=LOAD)
    builder.changed = {"optimizations.graphs": {"talker": True}, "workload.output": {"codec_frames": 8}}
    assert builder.changed == {"optimizations.graphs.talker": True} and builder.problem == ""
    assert builder._controls.controls["optimizations.graphs.talker"].value
    builder.changed = {"workload": {"concurrency": None, "arrivals": {"rate": 2.0}}}
    assert builder.problem == "" and "workload.arrivals.rate=2.0</code> instead of null" in builder._preview.value
    builder.changed = {"optimizations.batching": "maybe"}
    assert "optimizations.batching: expected true or false" in builder.problem
    builder._controls.controls["optimizations.batching"].value = False
    assert builder.changed == {"optimizations.batching": False} and builder.problem == ""
    builder.changed = {"chunking.frames": 2.5}
    assert builder.changed == {"chunking.frames": 2.5} and "chunking.frames: expected" in builder.problem
    builder.changed = {}
    with pytest.raises(traitlets.TraitError, match=r"compared: expected of .*, got 'nobody'"):
        builder.compared = ["nobody"]


def test_what_a_click_cannot_start_is_told_beside_the_button(file: Path) -> None:
    (file.parent / "results").write_text("a file where runs should go")
    builder = AblationBuilder(file, settings=LOAD)
    builder._start.click()
    assert "results" in builder._status.value and builder.job is None and not builder._start.disabled


def test_in_a_kernel_a_cell_may_run_one_after_the_other(file: Path) -> None:
    async def cell() -> None:
        builder = AblationBuilder(file, settings=LOAD)
        builder.beside = False
        builder.run().result(PATIENCE_S)
        builder.run().result(PATIENCE_S)
        while builder.job:
            await asyncio.sleep(0.01)
        assert list(builder.runs) == ["small_again", "small_again (2)"]

    asyncio.run(cell())


def test_a_toggle_that_cannot_act_is_named_before_the_run(file: Path) -> None:
    builder = AblationBuilder(file, settings=LOAD)
    builder.changed = {"optimizations.graphs.talker": True, "optimizations.hot_path.code_predictor": False}
    assert "graphs.talker is not in effect: transformers" in builder._preview.value


def test_runs_join_the_comparison_and_can_be_left_out(file: Path) -> None:
    builder = AblationBuilder(file, settings=LOAD)
    builder.changed = {"optimizations.async_chunk": False}
    job = builder.run(wait=True)
    assert job.path.parent == file.parent / "results" / "small" and list(builder.runs) == ["no_async_chunk"]
    assert builder._bar.value == builder._bar.max == 8 and "4 of 4 cells" in builder._status.value
    table = builder.comparison
    assert set(table["configuration"]) == {"no_async_chunk"} and set(table["compared"]) == {PAIRED}
    assert set(table["differs"]) == {""}
    plot = next(child for child in builder._results.children if isinstance(child, Plot))
    lines = plot.layout.yaxis.ticktext
    assert lines == ("no_async_chunk",)

    builder.beside, builder.changed = False, {"optimizations.batching": False}
    builder.run(wait=True)
    table = builder.comparison
    assert dict(table.groupby("run")["compared"].first()) == {"no_async_chunk": PAIRED, "no_batching": UNPAIRED}
    assert builder.compared == ["no_async_chunk", "no_batching"]
    assert plot is builder._results.children[0] and len(plot.layout.yaxis.ticktext) == 2

    builder._ticks.children[1].value = False
    assert builder.compared == ["no_async_chunk"] and set(builder.comparison["run"]) == {"no_async_chunk"}
    builder.compared = ["no_batching"]
    assert [tick.value for tick in builder._ticks.children] == [False, True]
    assert builder.comparison.empty and "nothing to be compared with" in builder._results.children[0].value


def test_cancel_keeps_finished_cells_and_frees_the_builder(file: Path) -> None:
    builder = AblationBuilder(file, settings=["workload.concurrency=[1]", "workload.num_prompts=30"])
    job = builder.run()
    assert builder._start.disabled and not builder._stop.disabled
    with pytest.raises(RuntimeError, match="is running"):
        builder.run()
    first = threading.Event()
    job.changed = lambda job: job.directory.finished and first.set()
    job.future.add_done_callback(lambda _: first.set())
    assert first.wait(PATIENCE_S) and not job.done
    builder._stop.click()
    assert builder._stop.disabled
    builder.cancel()
    assert job.done and builder.job is None and "cancelled: " in builder._status.value
    assert list(builder.runs) == ["small_again"] and len(builder.runs["small_again"].record["cells"]) >= 1
    assert not builder._start.disabled and builder._stop.disabled
    builder.cancel()  # nothing is going on


def test_the_work_of_a_base_run_is_taken_over(file: Path) -> None:
    first = AblationBuilder(file, settings=[*LOAD, "workload.output.codec_frames=6"])
    first.beside = False
    first.run(wait=True)
    (run,) = first.runs.values()
    builder = AblationBuilder(file, base=run)
    assert builder.base.workload.output.codec_frames == 6 and builder.base.workload.concurrency == [2]
    builder.beside, builder.changed = False, {"optimizations.async_chunk": False}
    builder.run(wait=True)
    assert set(builder.comparison["compared"]) == {UNPAIRED} and set(builder.comparison["differs"]) == {""}
    assert set(builder.comparison["configuration"]) == {"no_async_chunk"}


def test_a_reference_run_is_a_base_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    builder = AblationBuilder("experiments/full.yaml", base=load(REFERENCE / "hot_path_long"))
    assert Path(builder.base.workload.dataset).is_file() and builder.problem == ""


def test_names_say_what_is_varied_and_fit(file: Path) -> None:
    base = AblationBuilder(file).base
    assert made_up_name(base, {"workload.repeats": 2}) == "small_again"
    every = dict.fromkeys(flat(OptimizationsConfig().model_dump(), "optimizations"), False)
    name = made_up_name(base, every)
    assert name.startswith("no_batching-no_graph_thinker") and name.endswith("_more") and len(name) <= 60
    assert nested(every)["optimizations"]["graphs"] == dict.fromkeys(("thinker", "talker", "code2wav"), False)
