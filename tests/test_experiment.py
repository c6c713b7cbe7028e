"""Experiment files: what they mean, and that every mistake is one line that names file, key and expectation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from omni_lab import settings
from omni_lab.experiment import (
    Experiment,
    ExperimentError,
    json_schema,
    load_configurations,
    load_experiment,
    twins,
    unavailable,
)
from omni_lab.results import changed_keys
from omni_lab.run import main

ROOT = Path(__file__).parent.parent
LADDER = (
    "batch",
    "cuda_graph",
    "async_chunk",
    "async_output",
    "stage_replicas",
    "hot_path",
    "stateful",
    "ramp",
    "text_chunks",
    "full",
)

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
    "text_tokens_empty": ("name: x\nchunking: {text_tokens: []}", ["chunking.text_tokens", "at least 1 item"]),
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
    "replicas_of_transformers": (
        "name: x\nstages: {thinker: {engine: transformers, replicas: 2}, talker: {engine: transformers}, "
        "code2wav: {engine: transformers}}",
        ["stages", "thinker: 2, talker: 1"],
    ),
    "mixed_engines": ("name: x\nstages: {talker: {engine: transformers}}", ["stages", "on all stages or on none"]),
    "vllm": ("name: x\nstages: {talker: {engine: vllm}}", ["stages.talker.engine", "the thinker alone", "use torch"]),
    "ray": ("name: x\nexecutor: ray", ["executor: ray is not available"]),
    "mooncake": ("name: x\nconnector: mooncake", ["connector: mooncake is not available"]),
    "emulated": ("name: x\nstages: {talker: {device: emulated}}", ["stages.talker.device: emulated is not available"]),
    "extends_missing": ("name: x\nextends: gone.yaml", ["extends", "gone.yaml"]),
    "extends_list": ("name: x\nextends: [a.yaml]", ["extends", "one experiment file"]),
    "extends_itself": ("name: x\nextends: extends_itself.yaml", ["extends", "circle"]),
    "rung_missing": ("name: x\nsweep: {rungs: [gone.yaml]}", ["gone.yaml", "there is none"]),
    "rung_number": ("name: x\nsweep: {rungs: [3]}", ["sweep.rungs.0", "an experiment file, or a map", "got 3"]),
    "rung_without_name": (
        "name: x\nsweep: {rungs: [{name: a}, {chunking: {frames: 9}}]}",
        ["sweep.rungs.1.name", "a name of its own"],
    ),
    "rung_unknown_key": (
        "name: x\nsweep: {rungs: [{name: a}, {name: b, optimizations: {asink_chunk: true}}]}",
        ["sweep.rungs.1: optimizations.asink_chunk", "did you mean 'async_chunk'"],
    ),
    "rung_value": (
        "name: x\nsweep: {rungs: [{name: a, chunking: {frames: 0}}]}",
        ["rungs.0: chunking.frames", "least 1"],
    ),
    "rung_extends": ("name: x\nsweep: {rungs: [{name: a, extends: gone.yaml}]}", ["rungs.0: extends", "gone.yaml"]),
    "rung_sweep": ("name: x\nsweep: {rungs: [{name: a, sweep: {rungs: [b.yaml]}}]}", ["sweep.rungs.0.sweep"]),
    "rung_twice": ("name: x\nsweep: {rungs: [{name: a}, {name: a}]}", ["sweep.rungs", "different names", "'a' twice"]),
    "rung_dataset": (
        "name: x\nsweep: {rungs: [{name: a, workload: {dataset: gone.jsonl}}]}",
        ["sweep.rungs.0: workload.dataset", "gone.jsonl"],
    ),
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
    "override",
    [
        *(
            f"optimizations.hot_path.{key}={on}"
            for key in settings.HotPathConfig.model_fields
            for on in ("true", "false")
        ),
        "optimizations.stateful_code2wav=true",
        "optimizations.graphs.talker=true",
        "stages.thinker.engine=vllm",
    ],
)
def test_both_sides_of_every_toggle_are_accepted(override: str) -> None:
    """vLLM is an engine for the thinker; whether it is installed is seen when the worker starts."""
    assert unavailable(load_experiment(ROOT / "experiments" / "batch.yaml", [override])) == []


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
    assert experiment.chunking.model_dump() == {
        "initial_frames": 4,
        "frames": 25,
        "left_context": 25,
        "ramp": None,
        "text_tokens": [1],
    }


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
    with pytest.raises(ExperimentError, match="without a sweep of its own"):
        load_configurations(tmp_path / "y.yaml")
    (tmp_path / "z.yaml").write_text("name: z\nsweep: {rungs: [slow.yaml, slow.yaml]}")
    with pytest.raises(ExperimentError, match="different names"):
        load_configurations(tmp_path / "z.yaml")


def test_a_rung_can_be_a_map_in_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies over what the sweep extends, or over a file of its own; what the sweep states lies between."""
    (tmp_path / "base.yaml").write_text("name: base\nchunking: {frames: 7}\nworkload: {repeats: 4, warmup: 1}")
    (tmp_path / "other.yaml").write_text("name: other\nchunking: {frames: 8}\nworkload: {repeats: 5, warmup: 5}")
    (tmp_path / "set.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}')
    (tmp_path / "x.yaml").write_text(
        "name: x\nextends: base.yaml\nworkload: {warmup: 2}\nsweep: {rungs: [base.yaml, "
        "{name: a, optimizations: {async_chunk: false}}, {name: b, extends: other.yaml, workload: {warmup: 3}}, "
        "{name: c, workload: {dataset: set.jsonl}}]}"
    )
    monkeypatch.chdir(Path(tmp_path).parent)
    experiment, rungs = load_configurations(tmp_path / "x.yaml", ["workload.concurrency=5"])
    assert [rung.name for rung in rungs] == ["base", "a", "b", "c"]
    assert [rung.chunking.frames for rung in rungs] == [7, 7, 8, 7]
    assert [rung.optimizations.async_chunk for rung in rungs] == [True, False, True, True]
    assert [(rung.workload.repeats, rung.workload.warmup) for rung in rungs] == [(4, 2), (4, 2), (5, 3), (4, 2)]
    assert all(rung.workload.loads == [5] for rung in rungs)
    assert rungs[3].workload.dataset == str(tmp_path / "set.jsonl")
    assert Experiment.model_validate(experiment.model_dump(mode="json")) == experiment


def test_a_sweep_that_is_extended_keeps_its_common_keys(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nworkload: {repeats: 4}")
    (tmp_path / "x.yaml").write_text("name: x\nworkload: {repeats: 2}\nsweep: {rungs: [a.yaml, {name: b}]}")
    (tmp_path / "y.yaml").write_text("name: y\nextends: x.yaml\nworkload: {warmup: 9}")
    experiment, rungs = load_configurations(tmp_path / "y.yaml")
    assert experiment.name == "y"
    assert [(rung.name, rung.workload.repeats, rung.workload.warmup) for rung in rungs] == [("a", 2, 9), ("b", 2, 9)]


def test_paths_are_relative_to_the_file_that_states_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.lst").write_text("a|||Hello.")
    (tmp_path / "sub").mkdir()
    (tmp_path / "base.yaml").write_text("name: x\nworkload: {dataset: data}")
    (tmp_path / "sub" / "x.yaml").write_text("extends: ../base.yaml")
    monkeypatch.chdir(tmp_path / "sub")
    assert load_experiment("x.yaml").workload.dataset == str(tmp_path / "data")
    assert load_experiment("x.yaml", ["workload.dataset=../data/meta.lst"]).workload.dataset.endswith("data/meta.lst")


def test_rungs_that_differ_in_their_names_alone_are_named() -> None:
    """The sweeping file turns async output on in all of them."""
    rungs = ", ".join(str(ROOT / "experiments" / f"{name}.yaml") for name in ("batch", "async_chunk", "async_output"))
    found = load_configurations(ROOT / "experiments" / "async_output.yaml", [f"sweep={{rungs: [{rungs}]}}"])[1]
    (line,) = twins(found)
    assert line.startswith("async_output is the same experiment as async_chunk: ")
    assert not list(twins(load_configurations(ROOT / "experiments" / "ladder.yaml")[1]))


def test_ladder_adds_one_layer_a_rung() -> None:
    _, rungs = load_configurations(ROOT / "experiments" / "ladder.yaml")
    assert [rung.name for rung in rungs] == list(LADDER)
    assert {rung.workload.output.codec_frames for rung in rungs} == {100}
    *states, full = [layers(rung) for rung in rungs]
    assert not any(states[0].values())
    for below, above in pairwise(states):
        assert len([key for key in above if above[key] and not below[key]]) == 1
        assert not [key for key in above if below[key] and not above[key]]
    assert all(states[-1].values())
    assert full == states[-1] | {"replicas": False}
    assert len({rung.workload.model_dump_json() for rung in rungs}) == 1
    files = [load_experiment(ROOT / "experiments" / f"{name}.yaml") for name in LADDER]
    assert [rung.name for rung in files] == list(LADDER)
    assert all(all(rung.optimizations.hot_path.model_dump().values()) for rung in files)


def layers(rung: Experiment) -> dict[str, Any]:
    """What the rungs add, one after the other; the hot path and the graphs are all on or all off."""
    toggles = rung.optimizations
    together = [set(toggles.graphs.values()), set(toggles.hot_path.model_dump().values())]
    assert [len(values) for values in together] == [1, 1]
    return {
        "graphs": toggles.graphs["talker"],
        "async_chunk": toggles.async_chunk,
        "async_output": toggles.async_output,
        "replicas": rung.stages["talker"].replicas == rung.stages["code2wav"].replicas == 2,
        "hot_path": toggles.hot_path.row_payloads,
        "stateful": toggles.stateful_code2wav,
        "ramp": rung.chunking.ramp == [4, 8, 16],
        "text_chunks": rung.chunking.text_tokens == [1, 1, 2, 4, 8],
    }


def test_leave_one_out_leaves_out_every_piece_once() -> None:
    _, (full, *others) = load_configurations(ROOT / "experiments" / "leave_one_out.yaml")
    on = full.optimizations.model_dump()
    assert all(on[key] for key in ("batching", "async_chunk", "async_output", "stateful_code2wav"))
    assert all({**on["graphs"], **on["hot_path"]}.values()) and full.chunking.ramp
    missing = {rung.name: sorted(differences(full, rung)) for rung in others}
    graphs = [f"optimizations.graphs.{stage}" for stage in ("code2wav", "talker", "thinker")]
    assert missing.pop("no_graphs") == graphs
    assert missing.pop("no_ramp") == ["chunking.ramp"]
    assert missing.pop("no_text_chunks") == ["chunking.text_tokens"]
    singles = [f"optimizations.{key}" for key in ("batching", "async_chunk", "async_output", "stateful_code2wav")]
    singles += graphs + [f"optimizations.hot_path.{key}" for key in settings.HotPathConfig.model_fields]
    assert sorted(missing.values()) == sorted([single] for single in singles)


def test_long_hot_path_turns_on_each_piece_alone() -> None:
    _, (off, on, *alone) = load_configurations(ROOT / "experiments" / "hot_path_long.yaml")
    keys = [f"optimizations.hot_path.{key}" for key in settings.HotPathConfig.model_fields]
    assert not any(off.optimizations.hot_path.model_dump().values())
    assert sorted(differences(off, on)) == sorted(keys)
    assert [differences(off, rung) for rung in alone] == [[key] for key in keys]
    assert off.workload.loads == [1]


def test_the_control_of_replicas_has_their_rows_and_memory_in_one_worker() -> None:
    control, replicas = (
        load_experiment(ROOT / "experiments" / f"{name}.yaml") for name in ("stage_replicas_control", "stage_replicas")
    )
    for stage in ("talker", "code2wav"):
        one, many = control.stages[stage], replicas.stages[stage]
        assert one.replicas == 1 < many.replicas
        assert one.max_num_seqs == many.replicas * many.max_num_seqs
        assert one.kv_cache_mb == many.replicas * many.kv_cache_mb
    assert control.optimizations == replicas.optimizations


def differences(one: Experiment, other: Experiment) -> list[str]:
    """Dotted keys, the name aside."""
    return [key for key in changed_keys(one.model_dump(mode="json"), other.model_dump(mode="json")) if key != "name"]


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda file: file.stem)
def test_dry_run_shows_experiment_and_cells(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["workload.repeats=2", "model.checkpoint=nano"]  # one file's own checkpoint is made by `make peers`
    assert main([str(file), "--dry-run", *(part for each in settings for part in ("--set", each))]) == 0
    out = capsys.readouterr().out
    _, configurations = load_configurations(file, settings)
    cells = 2 * sum(len(one.workload.loads) for one in configurations)
    assert f"{cells} cells" in out
    assert len([line for line in out.splitlines() if ", repeat " in line]) == cells


def test_schema_in_docs_is_current() -> None:
    text = (ROOT / "docs" / "experiment.schema.json").read_text()
    assert json.loads(text) == json_schema(), (
        "write it anew: python -m omni_lab.experiment > docs/experiment.schema.json"
    )
