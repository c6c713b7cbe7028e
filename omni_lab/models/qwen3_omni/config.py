"""The sizes and ids of a Qwen3-Omni checkpoint: `config.json` as small frozen dataclasses.

Values come from the file; where a published or saved file leaves a key out, the default is the value of
Qwen3-Omni-30B-A3B-Instruct. Sizes have no default: a checkpoint must state them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_lab.core import PipelineError


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One stack of decoder layers: the Thinker's text model, the Talker's, or the code predictor."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int] | None
    """Frequencies of the time, height and width axes; their sum is head_dim / 2. None for plain RoPE."""
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk: bool = True
    shared_expert_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    """Layers with one dense MLP of `intermediate_size` in a stack that has experts otherwise."""

    def published(self) -> dict[str, Any]:
        """The fields that every decoder has, by the names that transformers' configurations give them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }


@dataclass(frozen=True, slots=True)
class AudioConfig:
    """The audio encoder: mel frames to vectors of the Thinker's width (`output_size`)."""

    mel_bins: int
    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    conv_channels: int
    output_size: int
    n_window: int
    n_window_infer: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision encoder: patches to vectors of the Thinker's width (`output_size`)."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    output_size: int
    positions: int
    """Learned positions of the square table that is resampled to the image's grid."""
    deepstack_layers: tuple[int, ...]
    rope_theta: float


@dataclass(frozen=True, slots=True)
class ThinkerConfig:
    text: DecoderConfig
    audio: AudioConfig
    vision: VisionConfig
    audio_token: int
    image_token: int
    video_token: int
    audio_start_token: int
    vision_start_token: int
    position_ids_per_second: int
    """Time positions for one second of video."""


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    text: DecoderConfig
    predictor: DecoderConfig
    thinker_hidden_size: int
    accept_hidden_layer: int
    """Entry of the Thinker's hidden states that the Talker reads at media positions; 0 is the input embedding."""
    code_groups: int
    speakers: dict[str, int]
    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_nothink: int
    codec_think_bos: int
    codec_think_eos: int
    im_start: int
    assistant: int
    newline: int
    tts_pad: int
    tts_bos: int
    tts_eos: int


@dataclass(frozen=True, slots=True)
class Code2WavConfig:
    codebook_size: int
    quantizers: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OmniConfig:
    thinker: ThinkerConfig
    talker: TalkerConfig
    code2wav: Code2WavConfig
    im_end: int
    """The token that ends a turn, and with it the Thinker's answer."""


def parse_config(values: dict[str, Any]) -> OmniConfig:
    """Dataclasses from the contents of `config.json` (see `weights.read_config`).

    Raises PipelineError that names the key if one is missing or describes a network that is not built here.
    """
    root = _Section(values, "")
    thinker, code2wav = _thinker(root.section("thinker_config")), _code2wav(root.section("code2wav_config"))
    return OmniConfig(thinker, _talker(root), code2wav, root.number("im_end_token_id", 151645))


class _Section:
    """One object of config.json that knows its path, so that errors can name the key."""

    def __init__(self, values: dict[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def section(self, key: str) -> _Section:
        values = self.values.get(key)
        if not isinstance(values, dict):
            raise PipelineError(f"config.json: {self.path}{key} must be an object; use a complete Qwen3-Omni config")
        return _Section(values, f"{self.path}{key}.")

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PipelineError(f"config.json: {self.path}{key} must be a number, got {value!r}")
        return value

    def numbers(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise PipelineError(f"config.json: {self.path}{key} must be a list of integers, got {value!r}")
        return tuple(value)

    def expect(self, key: str, *allowed: Any) -> None:
        """The first of the allowed values is what an absent key means."""
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            raise PipelineError(f"config.json: {self.path}{key} is {value!r}; only {allowed[0]!r} is supported")

    def rope(self) -> dict[str, Any]:
        """RoPE values: `rope_parameters` as saved by transformers 5, else `rope_scaling` as published."""
        values = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        kind = values.get("rope_type", values.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise PipelineError(f"config.json: {self.path}rope_parameters has rope_type {kind!r}; use 'default'")
        return values


def _decoder(part: _Section, mrope: bool, moe: bool) -> DecoderConfig:
    part.expect("hidden_act", "silu")
    part.expect("attention_bias", False)
    part.expect("tie_word_embeddings", False)
    rope = part.rope()
    head_dim = part.number("head_dim", 128)
    section = tuple(rope.get("mrope_section") or (24, 20, 20)) if mrope else None
    if section and (len(section) != 3 or sum(section) * 2 != head_dim):
        raise PipelineError(
            f"config.json: {part.path}rope_parameters.mrope_section {section} must be three numbers that sum to "
            f"head_dim / 2 = {head_dim // 2}"
        )
    experts: dict[str, Any] = {}
    if moe:
        layers = part.number("num_hidden_layers")
        sparse_step = part.number("decoder_sparse_step", 1)
        dense = {layer for layer in range(layers) if (layer + 1) % sparse_step}
        experts = {
            "experts": part.number("num_experts" if "num_experts" in part.values else "num_local_experts"),
            "experts_per_token": part.number("num_experts_per_tok"),
            "expert_size": part.number("moe_intermediate_size"),
            "norm_topk": bool(part.values.get("norm_topk_prob", True)),
            "dense_layers": frozenset(dense | set(part.numbers("mlp_only_layers", ()))),
        }
    return DecoderConfig(
        vocab_size=part.number("vocab_size"),
        hidden_size=part.number("hidden_size"),
        intermediate_size=part.number("intermediate_size"),
        layers=part.number("num_hidden_layers"),
        heads=part.number("num_attention_heads"),
        kv_heads=part.number("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=part.number("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or part.number("rope_theta", 1e6),
        mrope_section=section,
        **experts,
    )


def _thinker(part: _Section) -> ThinkerConfig:
    audio, vision = part.section("audio_config"), part.section("vision_config")
    audio.expect("activation_function", "gelu")
    vision.expect("hidden_act", "gelu_pytorch_tanh")
    return ThinkerConfig(
        text=_decoder(part.section("text_config"), mrope=True, moe=True),
        audio=AudioConfig(
            mel_bins=audio.number("num_mel_bins", 128),
            hidden_size=audio.number("d_model"),
            layers=audio.number("encoder_layers"),
            heads=audio.number("encoder_attention_heads"),
            intermediate_size=audio.number("encoder_ffn_dim"),
            conv_channels=audio.number("downsample_hidden_size"),
            output_size=audio.number("output_dim"),
            n_window=audio.number("n_window", 50),
            n_window_infer=audio.number("n_window_infer", 800),
        ),
        vision=VisionConfig(
            layers=vision.number("depth"),
            hidden_size=vision.number("hidden_size"),
            intermediate_size=vision.number("intermediate_size"),
            heads=vision.number("num_heads"),
            in_channels=vision.number("in_channels", 3),
            patch_size=vision.number("patch_size", 16),
            temporal_patch_size=vision.number("temporal_patch_size", 2),
            merge_size=vision.number("spatial_merge_size", 2),
            output_size=vision.number("out_hidden_size"),
            positions=vision.number("num_position_embeddings", 2304),
            deepstack_layers=vision.numbers("deepstack_visual_indexes", (8, 16, 24)),
            rope_theta=(vision.values.get("rope_parameters") or {}).get("rope_theta", 1e4),
        ),
        audio_token=part.number("audio_token_id", 151675),
        image_token=part.number("image_token_id", 151655),
        video_token=part.number("video_token_id", 151656),
        audio_start_token=part.number("audio_start_token_id", 151669),
        vision_start_token=part.number("vision_start_token_id", 151652),
        position_ids_per_second=part.number("position_id_per_seconds", 13),
    )


def _talker(root: _Section) -> TalkerConfig:
    part = root.section("talker_config")
    text, predictor = part.section("text_config"), part.section("code_predictor_config")
    config = _decoder(text, mrope=True, moe=True)
    # Every layer of the Talker has experts, whatever mlp_only_layers and decoder_sparse_step say.
    fields = {name: getattr(config, name) for name in DecoderConfig.__dataclass_fields__}
    fields |= {"dense_layers": frozenset(), "shared_expert_size": text.number("shared_expert_intermediate_size")}
    speakers = part.values.get("speaker_id")
    if not isinstance(speakers, dict) or not speakers:
        raise PipelineError(f"config.json: {part.path}speaker_id must map speaker names to codec ids")
    return TalkerConfig(
        text=DecoderConfig(**fields),
        predictor=_decoder(predictor, mrope=False, moe=False),
        thinker_hidden_size=part.number("thinker_hidden_size"),
        accept_hidden_layer=part.number("accept_hidden_layer"),
        code_groups=part.number("num_code_groups", 16),
        speakers={name.lower(): int(code) for name, code in speakers.items()},
        codec_pad=part.number("codec_pad_id", 2148),
        codec_bos=part.number("codec_bos_id", 2149),
        codec_eos=part.number("codec_eos_token_id", 2150),
        codec_nothink=part.number("codec_nothink_id", 2155),
        codec_think_bos=part.number("codec_think_bos_id", 2156),
        codec_think_eos=part.number("codec_think_eos_id", 2157),
        im_start=root.number("im_start_token_id", 151644),
        assistant=root.number("assistant_token_id", 77091),
        newline=root.number("newline_token_id", 198),
        tts_pad=root.number("tts_pad_token_id", 151671),
        tts_bos=root.number("tts_bos_token_id", 151672),
        tts_eos=root.number("tts_eos_token_id", 151673),
    )


def _code2wav(part: _Section) -> Code2WavConfig:
    part.expect("hidden_act", "silu")
    part.expect("attention_bias", False)
    hidden, heads = part.number("hidden_size"), part.number("num_attention_heads")
    return Code2WavConfig(
        codebook_size=part.number("codebook_size"),
        quantizers=part.number("num_quantizers", 16),
        hidden_size=hidden,
        intermediate_size=part.number("intermediate_size"),
        layers=part.number("num_hidden_layers"),
        heads=heads,
        kv_heads=part.number("num_key_value_heads"),
        head_dim=part.number("head_dim", hidden // heads),
        sliding_window=part.number("sliding_window", 72),
        rms_norm_eps=part.number("rms_norm_eps", 1e-5),
        rope_theta=part.rope().get("rope_theta") or part.number("rope_theta", 1e4),
        decoder_dim=part.number("decoder_dim"),
        upsample_rates=part.numbers("upsample_rates", (8, 5, 4, 3)),
        upsampling_ratios=part.numbers("upsampling_ratios", (2, 2)),
    )
