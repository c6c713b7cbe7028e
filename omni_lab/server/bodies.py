"""The bodies of requests, checked field by field; a mistake names its field. null stands for a field left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from omni_lab.settings import StageName, wrong

WITHOUT_EFFECT = frozenset(
    {"detokenize", "language", "max_new_tokens", "metadata", "prompt_cache_key", "ref_audio", "ref_text"}
    | {"return_stage_metrics", "safety_identifier", "service_tier", "store", "task_type", "user"}
)
"""Fields that clients send and that change nothing here: accepted and not read."""

ONLY = {
    "best_of": [1],
    "frequency_penalty": [0],
    "function_call": ["none"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "n": [1],
    "parallel_tool_calls": [True, False],
    "presence_penalty": [0],
    "response_format": [{"type": "text"}],
    "speed": [1],
    "stop_token_ids": [[]],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
}
"""Fields that would change the answer and are not served: accepted with the values that ask for nothing."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _voice(value: Any) -> Any:
    """OpenAI's clients may write {"id": name}."""
    return value["id"] if isinstance(value, dict) and set(value) == {"id"} else value


LARGEST = 1 << 20
Tokens = Annotated[int, Field(ge=1, le=LARGEST)]
Voice = Annotated[str, BeforeValidator(_voice)]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    Field(max_length=16),
]

URL = {"type": "object", "properties": {"url": {"type": "string", "pattern": "^(data:|file://)"}}, "required": ["url"]}
PART = {
    "type": "object",
    "required": ["type"],
    "properties": {
        "type": {"enum": ["text", "input_audio", "audio_url", "image_url", "video_url"]},
        "text": {"type": "string"},
        "input_audio": {
            "type": "object",
            "properties": {"data": {"type": "string"}, "format": {"enum": ["wav", "flac", "mp3", "ogg"]}},
            "required": ["data"],
        },
        "audio_url": URL,
        "image_url": URL,
        "video_url": URL,
        "fps": {"type": "number", "description": "frames a second that are taken of a clip"},
    },
}
MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": PART, "minItems": 1}]},
    },
}
"""What `messages.py` of the model checks, for readers of the OpenAPI document."""

Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]


class Body(BaseModel):
    """Exact types, no unknown fields: a misspelt one would be lost silently."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _served(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for key, value in values.items():
            if value is None or (key in WITHOUT_EFFECT and key not in cls.model_fields):
                continue
            if key in ONLY and key not in cls.model_fields:
                if value not in ONLY[key]:
                    raise wrong(key, f"is not supported; leave it out, or send {ONLY[key][0]!r}")
                continue
            kept[key] = value
        return kept


class StageSampling(Body):
    """Sampling of one stage; a field left out has the experiment's value. `top_k` -1 is off, as in vLLM."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    min_tokens: int | None = Field(None, ge=0, le=LARGEST)
    max_tokens: Tokens | None = None
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", f"expected at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        return self


class AudioForm(Body):
    """OpenAI's `audio`: with a voice it asks for OpenAI's wire shape."""

    voice: Voice | None = None
    format: Literal["wav", "flac", "mp3", "opus", "pcm", "pcm16"] = "wav"


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = Field(False, description="usage in every chunk of text")
    include_obfuscation: bool = Field(False, description="accepted; nothing is obfuscated")


class ChatBody(StageSampling):
    """A chat. Sampling fields beside `messages` are the thinker's; `sampling_params_list` gives each stage its own."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = None
    modalities: list[Literal["text", "audio"]] | None = Field(None, min_length=1, max_length=2)
    audio: AudioForm | None = None
    voice: Voice | None = None
    speaker: str | None = Field(None, description="the same as voice")
    max_completion_tokens: Tokens | None = Field(None, description="the same as max_tokens")
    stop: Texts = []
    sampling_params_list: list[StageSampling] = Field([], max_length=3, description="thinker, talker, code2wav")
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _stream_formats(self) -> Self:
        if self.stream and self.audio and self.audio.format not in ("wav", "pcm", "pcm16"):
            raise wrong("audio.format", f"expected pcm16 or wav in a stream, got {self.audio.format!r}")
        if self.stream and self.audio and not self.audio.voice and self.audio.format != "wav":
            raise wrong("audio.format", "expected wav in a stream of vLLM-Omni's shape; give audio.voice for OpenAI's")
        return self


class ProfileBody(Body):
    """Which steps to record with torch's profiler. Without a body: 30 steps of every stage, from now on."""

    stages: list[StageName] | None = Field(None, min_length=1)
    skip_steps: int = Field(0, ge=0, le=LARGEST)
    steps: int = Field(30, ge=1, le=10_000)


class SpeechBody(Body):
    """A text to be spoken. The model is asked to read it; what it says is its own answer."""

    input: str = Field(min_length=1, max_length=4096)
    model: str | None = None
    voice: Voice | None = None
    speaker: str | None = Field(None, description="the same as voice")
    instructions: str | None = Field(None, min_length=1, description="system prompt instead of the experiment's")
    response_format: Literal["wav", "flac", "mp3", "opus", "pcm"] = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    stream: bool = False
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)

    @model_validator(mode="after")
    def _stream_formats(self) -> Self:
        if (self.stream or self.stream_format == "sse") and self.response_format not in ("pcm", "wav"):
            raise wrong("response_format", f"expected pcm or wav in a stream, got {self.response_format!r}")
        return self
