"""vLLM-Omni as a target: the experiment in the words of its deploy configuration, and the command that serves it.

Written for vLLM-Omni 0.30. On a CPU it needs the platform plugin in this project's `peers/vllm_omni_cpu`.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from omni_lab import zoo
from omni_lab.assemble import resolve_dtype
from omni_lab.experiment import Experiment
from omni_lab.models.qwen3_omni.prompt import DEFAULT_SPEAKER
from omni_lab.peers.server_process import ServerProcess
from omni_lab.settings import merge

STAGES = ("thinker", "talker", "code2wav")
"""In the order of vLLM-Omni's stage ids."""

CODEBOOKS = 16
"""Tokens of the third stage for each codec frame."""

STEP_TOKENS = {
    "cpu": {"autoregressive": 2_048, "vocoder": 8_192},
    "cuda": {"autoregressive": 32_768, "vocoder": 65_536},
}
"""Of one step; on CUDA as vLLM-Omni ships it."""

GPU_SHARE = {"thinker": 0.9, "talker": 0.6, "code2wav": 0.1}
"""Of a GPU's memory, as vLLM-Omni ships it for two GPUs: the second holds talker and code2wav."""

CPU_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # stages share the processors
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""A thread for each stage, as in the workers here."""


def without_counterpart(experiment: Experiment) -> list[str]:
    """What the experiment asks of vLLM-Omni and vLLM-Omni cannot be told: "key: reason" for each."""
    toggles, hot_path = experiment.optimizations, experiment.optimizations.hot_path
    stated = {
        "optimizations.stateful_code2wav": (toggles.stateful_code2wav, False),
        "chunking.ramp": (experiment.chunking.ramp, None),
        "chunking.text_tokens": (experiment.chunking.text_tokens, [1]),
        **{f"optimizations.hot_path.{name}": (value, True) for name, value in hot_path.model_dump().items()},
    }
    reasons = [
        f"{key}: expected {json.dumps(only)} with target vllm-omni, which has no such switch"
        for key, (value, only) in stated.items()
        if value != only
    ]
    for name, stage in experiment.stages.items():
        if stage.engine != "torch":
            reasons.append(
                f"stages.{name}.engine: expected torch with target vllm-omni, which has an engine of its own"
            )
    if experiment.vllm_omni.greedy_codes and not _on_cpu(experiment):
        reasons.append("vllm_omni.greedy_codes: expected false, only the plugin for CPUs can do it")
    return reasons


def deploy_config(experiment: Experiment) -> dict[str, Any]:
    """The deploy configuration (a YAML file of vLLM-Omni): toggles, chunk sizes, limits and default sampling."""
    chunking = experiment.chunking
    config = {
        "async_chunk": experiment.optimizations.async_chunk,
        "dtype": resolve_dtype(experiment.model.dtype, experiment.stages["thinker"].device),
        "connectors": {
            "shared_memory": {
                "name": "SharedMemoryConnector",
                "extra": {
                    "initial_codec_chunk_frames": chunking.initial_frames,
                    "codec_chunk_frames": chunking.frames,
                    "codec_left_context_frames": chunking.left_context,
                },
            }
        },
        "stages": [_stage(experiment, index) for index in range(len(STAGES))],
    }
    return merge(config, experiment.vllm_omni.deploy)


def _stage(experiment: Experiment, index: int) -> dict[str, Any]:
    name = STAGES[index]
    stage, toggles = experiment.stages[name], experiment.optimizations
    cpu = stage.device == "cpu"
    tokens = STEP_TOKENS["cpu" if cpu else "cuda"]
    config: dict[str, Any] = {
        "stage_id": index,
        "devices": "0" if cpu else stage.device.partition(":")[2],
        "num_replicas": stage.replicas,
        "max_num_seqs": stage.max_num_seqs if toggles.batching else 1,
        "max_model_len": stage.max_model_len,
        "max_num_batched_tokens": max(tokens["autoregressive"], stage.max_model_len),
        "enable_prefix_caching": False,
        "enforce_eager": cpu or not toggles.graphs[name],
        "async_scheduling": toggles.async_output and not cpu and name != "code2wav",
        "default_sampling_params": _default_sampling(experiment, name),
    }
    if index:
        config["input_connectors"] = {f"from_stage_{index - 1}": "shared_memory"}
    if name == "code2wav":
        longest = CODEBOOKS * experiment.stages["talker"].max_model_len
        limits = {"max_model_len": longest, "max_num_batched_tokens": max(tokens["vocoder"], longest)}
        config |= limits | {"enable_chunked_prefill": False}
    return config | (_cpu() if cpu else _cuda(name))


def _cpu() -> dict[str, Any]:
    """Text prompts alone, and one process beside the other in the machine's memory."""
    nothing = {"image": 0, "video": 0, "audio": 0}
    memory = {"gpu_memory_utilization": 0.05, "skip_mm_profiling": True}
    return {"moe_backend": "auto", "limit_mm_per_prompt": nothing, **memory}


def _cuda(name: str) -> dict[str, Any]:
    """As vLLM-Omni ships it: the thinker keeps the rotary operator, which fused by the compiler changes the speech."""
    config: dict[str, Any] = {"gpu_memory_utilization": GPU_SHARE[name]}
    if name != "code2wav":
        config["moe_backend"] = "triton"
    if name == "thinker":
        config["compilation_config"] = {"custom_ops": ["+rotary_embedding"]}
    return config


def _default_sampling(experiment: Experiment, name: str) -> dict[str, Any]:
    """The third stage takes its tokens from the codes, however many they are."""
    if name == "code2wav":
        return {"temperature": 0.0, "max_tokens": 65536}
    return experiment.stages[name].sampling.model_dump(exclude_none=True)


def default_speaker(experiment: Experiment) -> str:
    """The voice of requests that name none: this project's default. vLLM-Omni would take another one."""
    config = json.loads((zoo.resolve(experiment.model.checkpoint) / "config.json").read_text(encoding="utf-8"))
    names = [name.lower() for name in config["talker_config"]["speaker_id"]]
    return DEFAULT_SPEAKER if DEFAULT_SPEAKER in names else names[0]


def serve_command(experiment: Experiment, deploy_file: Path) -> list[str]:
    peer = experiment.vllm_omni
    command = [peer.executable, "serve", str(zoo.resolve(experiment.model.checkpoint)), "--omni"]
    command += ["--host", "127.0.0.1", "--port", str(peer.port), "--deploy-config", str(deploy_file)]
    if peer.stage_overrides:
        overrides = {str(STAGES.index(name)): values for name, values in peer.stage_overrides.items()}
        command += ["--stage-overrides", json.dumps(overrides)]
    return command + peer.arguments


def environment(experiment: Experiment) -> dict[str, str]:
    """What the server's environment has more than ours."""
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if _on_cpu(experiment):
        gigabytes = max(-(-stage.kv_cache_mb // 1024) for stage in experiment.stages.values())
        variables |= CPU_ENVIRONMENT | {
            "VLLM_CPU_KVCACHE_SPACE": str(gigabytes),
            "VLLM_OMNI_CPU_COMPILE": str(int(experiment.optimizations.graphs["talker"])),
            "VLLM_OMNI_CPU_GREEDY_CODES": str(int(experiment.vllm_omni.greedy_codes)),
        }
    return variables | experiment.vllm_omni.environment


def prepare(experiment: Experiment, folder: Path) -> ServerProcess:
    """Writes the deploy configuration into `folder`; the server that it is for, not started yet."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{experiment.name}.deploy.yaml"
    file.write_text(yaml.safe_dump(deploy_config(experiment), sort_keys=False), encoding="utf-8")
    return ServerProcess(
        command=serve_command(experiment, file),
        url=f"http://127.0.0.1:{experiment.vllm_omni.port}",
        environment=environment(experiment),
        log=folder / f"{experiment.name}.log",
        startup_s=experiment.vllm_omni.startup_s,
    )


def described(experiment: Experiment, folder: Path) -> str:
    """What a run would do, for --dry-run: the file and the command, to be copied into a shell."""
    file = folder / f"{experiment.name}.deploy.yaml"
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment(experiment).items()]
    command = " ".join([*variables, shlex.join(serve_command(experiment, file))])
    return f"# {file}\n{yaml.safe_dump(deploy_config(experiment), sort_keys=False)}\n{command}"


def _on_cpu(experiment: Experiment) -> bool:
    return experiment.stages["thinker"].device == "cpu"
