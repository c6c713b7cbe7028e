"""The sections of an experiment file: keys, types, limits and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

PositiveInt = Annotated[int, Field(ge=1, le=1_000_000)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**63 - 1)]
StageName = Literal["thinker", "talker", "code2wav"]
Platform = Literal["cpu", "cuda"]

STAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "thinker": {"sampling": {"temperature": 0.0, "max_tokens": 256}},
    "talker": {
        "sampling": {"temperature": 0.9, "top_k": 50, "repetition_penalty": 1.05, "seed": 42, "max_tokens": 512}
    },
    "code2wav": {},
}
"""The stages of Qwen3-Omni, each with what differs from `StageConfig`."""


def merge(base: Any, over: Any) -> Any:
    """`over` laid on `base`: maps merge key by key, everything else replaces."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merge(base[key], value) if key in base else value for key, value in over.items()}


def did_you_mean(given: Any, known: Iterable[str]) -> str:
    """The end of an error's sentence that names the known word nearest to what was given; "" if none is near."""
    near = difflib.get_close_matches(str(given), list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def wrong(key: str, message: str) -> PydanticCustomError:
    """An error at `key` below the model that raises it."""
    return PydanticCustomError("wrong", "{message}", {"key": key, "message": message})


class Settings(BaseModel):
    """Base of all sections: exact types (no "3" for 3), no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        """Names the known keys beside the unknown one, which `extra="forbid"` alone does not."""
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                raise PydanticCustomError("unknown_key", "unknown key", {"key": key, "known": list(cls.model_fields)})
        return values


def _as_list(value: Any) -> Any:
    return [value] if type(value) is int else value


Counts = Annotated[list[PositiveInt], Field(min_length=1), BeforeValidator(_as_list, json_schema_input_type=int | list)]
"""One whole number or a list of them, each at least 1; always a list once read."""


class ModelConfig(Settings):
    checkpoint: str = Field("voice", min_length=1, description="an embedded checkpoint's name, or a directory")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    seed: NonNegativeInt = 0


class SamplingConfig(Settings):
    """Defaults of one stage's sampling; temperature 0 is greedy. Fields as in `core.Sampling`."""

    temperature: NonNegativeFloat = 0.0
    top_k: int = Field(0, ge=0, le=1_000_000)
    top_p: float = Field(1.0, gt=0, le=1)
    repetition_penalty: PositiveFloat = 1.0
    seed: NonNegativeInt | None = Field(None, description="null: derived from model.seed and the request's index")
    min_tokens: NonNegativeInt = 0
    max_tokens: PositiveInt = 256

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", f"expected at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        return self


class StageConfig(Settings):
    engine: Literal["torch", "transformers", "vllm"] = "torch"
    device: str = Field("cpu", pattern=r"^(cpu|cuda:\d+|emulated)$", description="cpu, cuda:N or emulated")
    replicas: PositiveInt = 1
    max_num_seqs: PositiveInt = 64
    max_model_len: int = Field(
        1024, ge=2, le=1_000_000, description="tokens of one sequence, prompt and answer together"
    )
    kv_cache_mb: PositiveInt = Field(512, description="budget of the key/value cache of one replica")
    sampling: SamplingConfig = SamplingConfig()

    @property
    def kv_cache_bytes(self) -> int:
        return self.kv_cache_mb * 2**20


class ChunkingConfig(Settings):
    """What is handed over at once: codec frames of the first chunk, of every later one, and of the left context decoded
    again with each; text tokens.
    """

    initial_frames: PositiveInt = 4
    frames: PositiveInt = 25
    left_context: PositiveInt = 25
    ramp: Annotated[list[PositiveInt], Field(min_length=1)] | None = Field(
        None, description="frames of the first chunks, one after the other, instead of initial_frames"
    )
    text_tokens: Annotated[list[PositiveInt], Field(min_length=1)] = Field(
        [1], description="tokens of the Thinker's hand-offs to Talker and client, one after the other; the last repeats"
    )


class HotPathConfig(Settings):
    decode_only_handoff: bool = True
    row_payloads: bool = True
    code_predictor: bool = True
    resident_state: bool = True
    linear_positions: bool = True
    single_process_executor: bool = True


class OptimizationsConfig(Settings):
    batching: bool = True
    graphs: dict[StageName, bool] = {}
    async_chunk: bool = True
    async_output: bool = True
    hot_path: HotPathConfig = HotPathConfig()
    stateful_code2wav: bool = False

    @field_validator("graphs", mode="before")
    @classmethod
    def _every_stage(cls, value: Any) -> Any:
        return merge(dict.fromkeys(STAGE_DEFAULTS, True), value)


class ArrivalsConfig(Settings):
    process: Literal["poisson"] = "poisson"
    rate: PositiveFloat = Field(description="requests a second, on average")


class OutputConfig(Settings):
    """Fixed lengths for controlled runs: the answer has exactly so many text tokens and codec frames."""

    text_tokens: PositiveInt | None = None
    codec_frames: PositiveInt | None = None


class WorkloadConfig(Settings):
    dataset: str = Field("bundled", min_length=1, description="bundled, a Seed-TTS root or meta.lst, or a .jsonl file")
    num_prompts: Counts = [64]
    concurrency: Counts | None = None
    arrivals: ArrivalsConfig | None = None
    warmup: int | None = Field(None, ge=0, le=1_000_000, description="requests before each cell; null: the concurrency")
    repeats: int = Field(3, ge=1, le=1000)
    modalities: list[Literal["text", "audio"]] = Field(["text", "audio"], min_length=1)
    output: OutputConfig = OutputConfig()
    system_prompt: str | None = "You are a helpful voice assistant."
    prompt_template: str = "Please read: {text}"
    seed: NonNegativeInt | None = Field(0, description="order of the prompts and arrival times; null: file order")

    @model_validator(mode="after")
    def _load(self) -> Self:
        if self.arrivals and self.concurrency:
            raise wrong("arrivals", "expected either arrivals (open loop) or concurrency (closed loop), got both")
        if not self.arrivals and not self.concurrency:
            self.concurrency = [1, 16, 32, 64]
        if len(self.num_prompts) not in (1, len(self.loads)):
            expected = f"one number (--set workload.num_prompts=16), or one for each of {len(self.loads)} concurrencies"
            raise wrong("num_prompts", f"expected {expected}, got {len(self.num_prompts)} numbers")
        if len(set(self.loads)) < len(self.loads):
            raise wrong("concurrency", f"expected different numbers, got {self.concurrency}")
        if len(set(self.modalities)) < len(self.modalities):
            raise wrong("modalities", f"expected each modality once, got {self.modalities}")
        if "{text}" not in self.prompt_template:
            raise wrong("prompt_template", f"expected {{text}} somewhere in it, got {self.prompt_template!r}")
        return self

    @property
    def loads(self) -> list[int | None]:
        """The concurrency of each cell; [None] in open loop."""
        return list(self.concurrency) if self.concurrency else [None]

    def prompts(self, concurrency: int | None) -> int:
        """Number of requests of the cell with this concurrency."""
        return self.num_prompts[self.loads.index(concurrency) if len(self.num_prompts) > 1 else 0]


class ProfileConfig(Settings):
    """torch.profiler in the first repeat of each cell, in each worker of the stages named."""

    enabled: bool = False
    stages: list[StageName] = Field(["talker"], min_length=1)
    skip_steps: NonNegativeInt = Field(20, description="steps of a worker in the measured part before its window")
    steps: PositiveInt = Field(30, description="steps of a worker in its window")
    stacks: bool = Field(False, description="with the Python stack of each operator; slow, large")
    memory: bool = Field(False, description="with every allocation")
    max_mb: PositiveFloat = Field(256.0, description="a window ends when its process has recorded so much JSON")
    max_s: PositiveFloat = Field(60.0, description="a window ends so long after its first step")


class ServerConfig(Settings):
    """Limits of `omni_lab.serve`, and what it shows to whom."""

    model_name: str | None = Field(None, min_length=1, description="name in /v1/models; null: the checkpoint's")
    modalities: list[Literal["text", "audio"]] = Field(
        ["text", "audio"], min_length=1, description="of an answer whose request names none"
    )
    media_dir: str | None = Field(None, min_length=1, description="files that requests may name; null: none")
    profile_dir: str = Field("results/profiles", min_length=1, description="where /stop_profile writes traces")
    cors_origins: list[str] = Field([], description="web pages of other origins that may call the server")
    max_concurrent: PositiveInt = Field(64, description="requests at work at the same time")
    max_queue: NonNegativeInt = Field(64, description="requests that wait for their turn; further ones get 429")
    queue_timeout_s: PositiveFloat = Field(10.0, description="longest wait for a turn, then 429")
    deadline_s: PositiveFloat = Field(300.0, description="longest time of a request from its turn to its end")
    slow_reader_s: PositiveFloat = Field(20.0, description="longest wait for a client to read or to send its body")
    text_interval_ms: NonNegativeFloat = Field(
        50.0, description="text that comes sooner after the last joins the next event; 0: each token is one"
    )
    drain_s: PositiveFloat = Field(10.0, description="time that running requests have to end at a shutdown")
    max_body_mb: PositiveInt = 16
    max_prompt_tokens: PositiveInt | None = Field(None, description="null: stages.thinker.max_model_len alone")
    max_audio_s: PositiveFloat = Field(300.0, description="recordings of a request times the longest of them")
    max_image_mp: PositiveFloat = Field(16.0, description="million pixels of all pictures of a request")
    max_video_mp: PositiveFloat = Field(256.0, description="million pixels of all frames of all clips of a request")


class VllmOmniConfig(Settings):
    """How vLLM-Omni's server is started as the target; what it serves follows from the rest of the experiment."""

    executable: str = Field("vllm-omni", min_length=1, description="a path, or a name on PATH")
    port: int = Field(8192, ge=1, le=65535)
    startup_s: PositiveFloat = Field(900.0, description="longest wait until the server is healthy")
    greedy_codes: bool = Field(False, description="residual codes greedy, as the talker's; on the CPU only")
    deploy: dict[str, Any] = Field({}, description="laid over the deploy configuration that the experiment gives")
    stage_overrides: dict[StageName, dict[str, Any]] = Field({}, description="for --stage-overrides, by stage")
    arguments: list[str] = Field([], description="further arguments of `vllm-omni serve`")
    environment: dict[str, str] = {}


class ResultsConfig(Settings):
    save_audio: NonNegativeInt = Field(8, description="requests of each cell whose audio is kept")
    save_tokens: bool = False


def _file_or_map(rung: Any) -> Any:
    if not (isinstance(rung, str | dict) and rung):
        raise PydanticCustomError("rung", "an experiment file, or a map with a name and the keys that differ")
    if isinstance(rung, dict) and "name" not in rung:
        raise wrong("name", "expected a name of its own, got none")
    if isinstance(rung, dict) and "sweep" in rung:
        raise wrong("sweep", "expected outside of a rung")
    return rung


Rung = Annotated[str | dict[str, Any], BeforeValidator(_file_or_map)]


class SweepConfig(Settings):
    """What to run side by side. A rung is an experiment file, or a map of keys that are laid over one.

    What the sweeping file itself states is laid over every rung.
    """

    rungs: list[Rung] = Field(
        min_length=1, description="files relative to the one that names them, or maps with a name"
    )
