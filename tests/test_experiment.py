"""Experiment files: what they mean, and that every mistake is one line that names file, key and expectation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_lab.experiment import ExperimentError, json_schema, load_configurations, load_experiment, unavailable
from omni_lab.run import main

ROOT = Path(__file__).parent.parent
LADDER = ("batch", "cuda_graph", "async_chunk", "async_output", "stage_replicas", "hot_path")

WRONG = {
    # mistake: (text of the file, words of the one line)
    "unknown_key": ("name: x\nstagess: {}", ["stagess", "unknown key", "did you mean 'stages'"]),
    "unknown_key_deep": ("name: x\nstages: {talker: {replcas: 2}}", ["stages.talker.replcas", "'replicas'"]),
    "unknown_key_far": ("name: x\nchunking: {zzz: 1}", ["chunking.zzz", "expected one of initial_frames, frames"]),
    "unknown_toggle": ("name: x\noptimizations: {asink_chunk: true}", ["asink_chunk", "'async_chunk'"]),
    "unknown_hot_path": (
        "name: x\noptimizations: {hot_path: {row_payload: true}}",
        ["hot_path.row_payload", "payloads"],
    ),
    "unknown_stage": ("name: x\nstages: {thinkr: {}}", ["stages.thinkr", "did you mean 'thinker'"]),
    "unknown_graph": ("name: x\noptimizations: {graphs: {talkr: true}}", ["graphs.talkr", "did you mean 'talker'"]),
    "unknown_platform": ("name: x\nplatforms: {coda: {}}", ["platforms.coda", "did you mean 'cuda'"]),
    "key_in_platform": ("name: x\nplatforms: {cuda: {executer: ray}}", ["platforms.cuda", "executer", "'executor'"]),
    "name_in_platform": ("name: x\nplatforms: {cuda: {name: y}}", ["platforms.cuda.name"]),
    "engine": ("name: x\nstages: {talker: {engine: torhc}}", ["stages.talker.engine", "did you mean 'torch'"]),
    "executor": ("name: x\nexecutor: proces", ["executor", "did you mean 'process'"]),
    "connector": ("name: x\nconnector: shm", ["connector", "expected 'in_process', 'shared_memory' or 'mooncake'"]),
    "device": ("name: x\nstages: {talker: {device: gpu}}", ["stages.talker.device", "cuda:"]),
    "absent_device": ("name: x\nstages: {talker: {device: 'cuda:99'}}", ["stages.talker.device", "cuda:99", "use cpu"]),
    "dtype": ("name: x\nmodel: {dtype: float8}", ["model.dtype", "'float32'"]),
    "checkpoint": ("name: x\nmodel: {checkpoint: voic}", ["model.checkpoint", "did you mean 'voice'"]),
    "checkpoint_path": ("name: x\nmodel: {checkpoint: ./here}", ["model.checkpoint", "config.json"]),
    "no_name": ("executor: inline", ["name: expected a value"]),
    "name_shape": ("name: a/b", ["name", "text that matches"]),
    "number_as_text": ("name: x\nworkload: {repeats: '3'}", ["workload.repeats", "a whole number"]),
    "fraction": ("name: x\nworkload: {repeats: 2.5}", ["workload.repeats", "2.5"]),
    "bool_as_number": ("name: x\nstages: {talker: {replicas: true}}", ["stages.talker.replicas", "a whole number"]),
    "number_as_bool": ("name: x\noptimizations: {batching: 1}", ["optimizations.batching", "true or false"]),
    "section_as_text": ("name: x\nchunking: fast", ["chunking", "a mapping"]),
    "section_null": ("name: x\nworkload:", ["workload", "a mapping", "null"]),
    "initial_frames": ("name: x\nchunking: {initial_frames: 0}", ["chunking.initial_frames", "at least 1"]),
    "frames": ("name: x\nchunking: {frames: -1}", ["chunking.frames", "at least 1"]),
    "left_context": ("name: x\nchunking: {left_context: 0}", ["chunking.left_context", "at least 1"]),
    "ramp_empty": ("name: x\nchunking: {ramp: []}", ["chunking.ramp", "at least 1 item"]),
    "ramp_zero": ("name: x\nchunking: {ramp: [4, 0]}", ["chunking.ramp.1", "at least 1"]),
    "concurrency": ("name: x\nworkload: {concurrency: [1, 0]}", ["workload.concurrency.1", "at least 1"]),
    "concurrency_twice": ("name: x\nworkload: {concurrency: [4, 4]}", ["workload.concurrency", "different"]),
    "replicas": ("name: x\nstages: {talker: {replicas: 0}}", ["stages.talker.replicas", "at least 1"]),
    "temperature": ("name: x\nstages: {talker: {sampling: {temperature: -0.1}}}", ["temperature", "at least 0"]),
    "temperature_nan": ("name: x\nstages: {talker: {sampling: {temperature: .nan}}}", ["temperature", "finite"]),
    "top_p_zero": ("name: x\nstages: {talker: {sampling: {top_p: 0}}}", ["talker.sampling.top_p", "more than 0"]),
    "top_p_high": ("name: x\nstages: {talker: {sampling: {top_p: 1.5}}}", ["talker.sampling.top_p", "at most 1"]),
    "min_over_max": ("name: x\nstages: {talker: {sampling: {min_tokens: 9, max_tokens: 3}}}", ["min_tokens", "(3)"]),
    "in_process": ("name: x\nconnector: in_process", ["connector", "in_process", "shared_memory"]),
    "two_loads": ("name: x\nworkload: {concurrency: 1, arrivals: {rate: 2.0}}", ["workload.arrivals", "both"]),
    "arrivals_rate": ("name: x\nworkload: {arrivals: {process: poisson}}", ["workload.arrivals.rate", "a value"]),
    "prompts_length": ("name: x\nworkload: {num_prompts: [1, 2], concurrency: [1, 2, 3]}", ["num_prompts", "3 conc"]),
    "dataset": ("name: x\nworkload: {dataset: nowhere/meta.lst}", ["workload.dataset", "nowhere"]),
    "modalities": ("name: x\nworkload: {modalities: []}", ["workload.modalities", "at least 1"]),
    "modality": ("name: x\nworkload: {modalities: [txt]}", ["workload.modalities.0", "did you mean 'text'"]),
    "template": ("name: x\nworkload: {prompt_template: 'Read this'}", ["workload.prompt_template", "{text}"]),
    "too_long": ("name: x\nworkload: {output: {codec_frames: 5000}}", ["codec_frames", "max_model_len (1024)"]),
    "mixed_engines": ("name: x\nstages: {talker: {engine: transformers}}", ["stages", "on all stages or on none"]),
    "vllm": ("name: x\nstages: {thinker: {engine: vllm}}", ["stages.thinker.engine", "not available"]),
    "ray": ("name: x\nexecutor: ray", ["executor: ray is not available"]),
    "mooncake": ("name: x\nconnector: mooncake", ["connector: mooncake is not available"]),
    "emulated": ("name: x\nstages: {talker: {device: emulated}}", ["stages.talker.device: emulated is not available"]),
    "extends_missing": ("name: x\nextends: gone.yaml", ["extends", "gone.yaml"]),
    "extends_list": ("name: x\nextends: [a.yaml]", ["extends", "one experiment file"]),
    "extends_itself": ("name: x\nextends: extends_itself.yaml", ["extends", "circle"]),
    "rung_missing": ("name: x\nsweep: {rungs: [gone.yaml]}", ["gone.yaml", "there is none"]),
    "no_rungs": ("name: x\nsweep: {rungs: []}", ["sweep.rungs", "at least 1"]),
    "key_twice": ("name: x\nname: y", ["line 2", "'name' twice"]),
    "key_twice_deep": ("name: x\nmodel: {seed: 1, seed: 2}", ["line 2", "'seed' twice"]),
    "syntax": ("name: [x", ["line 1", "expected YAML"]),
    "tab": ("name: x\n\tmodel: y", ["line 2", "expected YAML"]),
    "object_tag": ("name: !!python/object/apply:os.getcwd []", ["line 1", "expected YAML"]),
    "list": ("- name: x", ["expected a mapping", "got a list"]),
    "empty": ("", ["expected a mapping", "got an empty file"]),
}

WRONG_OPTIONS = {
    "no_file": (["gone.yaml"], ["gone.yaml", "expected an experiment file"]),
    "folder": (["."], ["expected an experiment file"]),
    "set_without_value": (["good.yaml", "--set", "executor"], ["--set executor", "KEY=VALUE"]),
    "set_without_key": (["good.yaml", "--set", "=3"], ["--set =3", "KEY=VALUE"]),
    "set_unknown": (["good.yaml", "--set", "stages.talker.relicas=2"], ["--set stages.talker.relicas=2", "'replicas'"]),
    "set_range": (["good.yaml", "--set", "workload.repeats=0"], ["--set workload.repeats=0", "at least 1"]),
    "set_yaml": (["good.yaml", "--set", "workload.concurrency=[1"], ["workload.concurrency", "expected YAML"]),
    "set_extends": (["good.yaml", "--set", "extends=good.yaml"], ["extends", "in a file only"]),
    "set_through_text": (["good.yaml", "--set", "executor.kind=inline"], ["executor", "expected 'inline'"]),
    "resume_nothing": (["good.yaml", "--resume"], ["--resume", "--out DIR"]),
    "out_in_use": (["good.yaml", "--out", "used"], ["--out used", "--resume"]),
    "out_is_file": (["good.yaml", "--out", "good.yaml"], ["--out good.yaml", "directory"]),
    "resume_elsewhere": (["good.yaml", "--out", "used", "--resume"], ["--out used", "no run.json"]),
}


def one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What the command says about a mistake: exactly one line on stderr, nothing on stdout, status 2."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n"), err
    return err


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_file_is_one_line(mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = WRONG[mistake]
    file = tmp_path / f"{mistake}.yaml"
    file.write_text(text)
    line = one_line(capsys, [str(file)])
    for word in ["" if mistake == "rung_missing" else str(file), *words]:
        assert word in line


@pytest.mark.parametrize("mistake", WRONG_OPTIONS)
def test_wrong_option_is_one_line(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, words = WRONG_OPTIONS[mistake]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text("name: good\nworkload: {repeats: 1}")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    line = one_line(capsys, argv)
    for word in words:
        assert word in line


def test_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["x.yaml", "--resum", "--oot", "x"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"hot_path.{key}", "false") for key in json_schema()["$defs"]["HotPathConfig"]["properties"]),
        ("stateful_code2wav", "true"),
    ],
)
def test_missing_side_of_a_toggle_is_refused(key: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A toggle either runs as stated or is refused by name; none is accepted and ignored."""
    batch = str(ROOT / "experiments" / "batch.yaml")
    try:
        experiment = load_experiment(batch, [f"optimizations.{key}={value}"])
    except ExperimentError:
        line = one_line(capsys, [batch, "--set", f"optimizations.{key}={value}"])
        assert f"optimizations.{key}" in line and "available in this version" in line
    else:
        assert unavailable(experiment) == []


def test_all_mistakes_are_told_at_once_each_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: x\nchunking: {frames: 0}")
    (tmp_path / "top.yaml").write_text("extends: base.yaml\nexecutor: proces")
    with pytest.raises(ExperimentError) as error:
        load_experiment(tmp_path / "top.yaml", ["workload.repeats=no"])
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert any("base.yaml: chunking.frames" in line for line in lines)
    assert any("top.yaml: executor" in line for line in lines)
    assert any(line.startswith("--set workload.repeats=no: workload.repeats") for line in lines)


def test_extends_merges_maps_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "name: a\nworkload: {concurrency: [1, 2, 3], repeats: 5}\nstages: {talker: {sampling: {top_k: 7}}}"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.yaml").write_text("name: b\nextends: ../a.yaml\nworkload: {concurrency: [9]}")
    (tmp_path / "c.yaml").write_text("name: c\nextends: sub/b.yaml\nstages: {talker: {replicas: 2}}")
    experiment = load_experiment(tmp_path / "c.yaml", ["workload.warmup=3", "stages.talker.max_num_seqs=4"])
    assert experiment.name == "c"
    assert experiment.workload.concurrency == [9]
    assert experiment.workload.repeats == 5
    assert experiment.workload.warmup == 3
    talker = experiment.stages["talker"]
    assert (talker.replicas, talker.max_num_seqs, talker.sampling.top_k) == (2, 4, 7)
    assert (talker.sampling.temperature, talker.sampling.seed) == (0.9, 42)


def test_extends_in_a_circle_shows_the_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml")
    (tmp_path / "b.yaml").write_text("extends: a.yaml")
    with pytest.raises(ExperimentError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load_experiment(tmp_path / "a.yaml")


def test_defaults_are_those_of_the_contract(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x")
    experiment = load_experiment(tmp_path / "x.yaml")
    assert list(experiment.stages) == ["thinker", "talker", "code2wav"]
    assert experiment.stages["thinker"].sampling.model_dump() == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "min_tokens": 0,
        "max_tokens": 256,
    }
    assert experiment.stages["talker"].sampling.max_tokens == 512
    assert experiment.stages["talker"].kv_cache_bytes == 512 * 2**20
    assert experiment.workload.loads == [1, 16, 32, 64]
    assert [experiment.workload.prompts(load) for load in experiment.workload.loads] == [64] * 4
    assert experiment.optimizations.graphs == {"thinker": True, "talker": True, "code2wav": True}
    assert experiment.chunking.model_dump() == {"initial_frames": 4, "frames": 25, "left_context": 25, "ramp": None}


def test_arrivals_are_open_loop(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x\nworkload: {arrivals: {process: poisson, rate: 2}, num_prompts: 9}")
    workload = load_experiment(tmp_path / "x.yaml").workload
    assert workload.loads == [None]
    assert workload.prompts(None) == 9


def test_section_of_this_machine_is_laid_over_files_and_under_options(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "name: x\nworkload: {repeats: 3, warmup: 1}\n"
        "platforms: {cpu: {workload: {repeats: 2, warmup: 2}}, cuda: {workload: {repeats: 2, warmup: 2}}}"
    )
    workload = load_experiment(tmp_path / "x.yaml", ["workload.warmup=7"]).workload
    assert (workload.repeats, workload.warmup) == (2, 7)


def test_sweep_lays_own_keys_over_each_rung(tmp_path: Path) -> None:
    (tmp_path / "slow.yaml").write_text("name: slow\noptimizations: {async_chunk: false}\nworkload: {repeats: 4}")
    (tmp_path / "fast.yaml").write_text("name: fast\nextends: slow.yaml\noptimizations: {async_chunk: true}")
    (tmp_path / "x.yaml").write_text(
        "name: x\nextends: slow.yaml\nworkload: {repeats: 2}\nsweep: {rungs: [slow.yaml, fast.yaml]}"
    )
    experiment, rungs = load_configurations(tmp_path / "x.yaml", ["workload.concurrency=5"])
    assert experiment.name == "x"
    assert [rung.name for rung in rungs] == ["slow", "fast"]
    assert [rung.optimizations.async_chunk for rung in rungs] == [False, True]
    assert all(rung.workload.repeats == 2 and rung.workload.loads == [5] for rung in rungs)
    (tmp_path / "y.yaml").write_text("name: y\nsweep: {rungs: [x.yaml]}")
    with pytest.raises(ExperimentError, match="without a sweep of their own"):
        load_configurations(tmp_path / "y.yaml")
    (tmp_path / "z.yaml").write_text("name: z\nsweep: {rungs: [slow.yaml, slow.yaml]}")
    with pytest.raises(ExperimentError, match="different names"):
        load_configurations(tmp_path / "z.yaml")


def test_paths_are_relative_to_the_file_that_states_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.lst").write_text("a|||Hello.")
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("name: x\nworkload: {dataset: data}")
    (tmp_path / "sub" / "x.yaml").write_text("extends: ../base.yaml")
    monkeypatch.chdir(tmp_path / "sub")
    assert load_experiment("x.yaml").workload.dataset == str(tmp_path / "data")
    assert load_experiment("x.yaml", ["workload.dataset=../data/meta.lst"]).workload.dataset.endswith("data/meta.lst")


def test_ladder_adds_one_layer_a_rung() -> None:
    rungs = [load_experiment(ROOT / "experiments" / f"{name}.yaml") for name in LADDER]
    assert [rung.name for rung in rungs] == list(LADDER)
    assert [any(rung.optimizations.graphs.values()) for rung in rungs] == [False, True, True, True, True, True]
    assert [rung.optimizations.async_chunk for rung in rungs] == [False, False, True, True, True, True]
    assert [rung.optimizations.async_output for rung in rungs] == [False, False, False, True, True, True]
    assert [rung.stages["talker"].replicas for rung in rungs] == [1, 1, 1, 1, 2, 2]
    assert len({rung.workload.model_dump_json() for rung in rungs}) == 1


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_dry_run_shows_experiment_and_cells(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(file), "--dry-run", "--set", "workload.repeats=2"]) == 0
    out = capsys.readouterr().out
    _, configurations = load_configurations(file)
    cells = 2 * sum(len(one.workload.loads) for one in configurations)
    assert f"{cells} cells" in out
    assert len([line for line in out.splitlines() if ", repeat " in line]) == cells


def test_schema_in_docs_is_current() -> None:
    text = (ROOT / "docs" / "experiment.schema.json").read_text()
    assert json.loads(text) == json_schema(), (
        "write it anew: python -m omni_lab.experiment > docs/experiment.schema.json"
    )
