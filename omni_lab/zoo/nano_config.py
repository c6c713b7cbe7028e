"""Configuration of `nano`, the smallest complete Qwen3-Omni: every part and every special token, 7.5 M parameters.

Every id is stated, since the defaults of transformers' configuration classes belong to the large model and some
do not even fit each other (the codec end token 4198 lies outside the talker's vocabulary of 3072).
"""

from __future__ import annotations

VERSION = "2"
"""To be raised when the built files change: copies built before are then built again."""

TEXT_VOCAB = 1024
ORDINARY_TOKENS = 1000
"""Ids below this one are byte-level BPE tokens."""

SPECIAL_TOKENS = {
    "<|endoftext|>": 1000,
    "<|im_start|>": 1001,
    "<|im_end|>": 1002,
    "<|audio_start|>": 1003,
    "<|audio_end|>": 1004,
    "<|audio_pad|>": 1005,
    "<|vision_start|>": 1006,
    "<|vision_end|>": 1007,
    "<|image_pad|>": 1008,
    "<|video_pad|>": 1009,
    "<tts_pad>": 1010,
    "<tts_text_bos>": 1011,
    "<tts_text_eod>": 1012,
}

ROLE_TOKENS = {"system": 1013, "user": 1014, "assistant": 1015, "\n": 1016}
"""Ordinary tokens at fixed ids, because the configuration names the roles by id."""

CODEBOOK = 256
SPEAKERS = {"chelsie": CODEBOOK + 253, "ethan": CODEBOOK + 254, "aiden": CODEBOOK + 255}

_MEDIA = {
    "audio_token_id": 1005,
    "image_token_id": 1008,
    "video_token_id": 1009,
    "audio_start_token_id": 1003,
    "audio_end_token_id": 1004,
    "vision_start_token_id": 1006,
    "position_id_per_seconds": 13,
    "seconds_per_chunk": 2,
}

_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
_MROPE = {**_ROPE, "mrope_section": [6, 5, 5], "interleaved": True, "mrope_interleaved": True}

_DECODER = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}

_MOE = {
    **_DECODER,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rope_parameters": _MROPE,
}

_AUDIO = {
    "model_type": "qwen3_omni_moe_audio_encoder",
    "num_mel_bins": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "output_dim": 192,
    "downsample_hidden_size": 32,
    "n_window": 50,
    "n_window_infer": 800,
    "conv_chunksize": 500,
    "max_source_positions": 1500,
}

_VISION = {
    "model_type": "qwen3_omni_moe_vision_encoder",
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 192,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1, 2],
    "hidden_act": "gelu_pytorch_tanh",
}

_THINKER = {
    "model_type": "qwen3_omni_moe_thinker",
    "user_token_id": ROLE_TOKENS["user"],
    "vision_end_token_id": 1007,
    **_MEDIA,
    "text_config": {
        "model_type": "qwen3_omni_moe_text",
        "vocab_size": TEXT_VOCAB,
        "hidden_size": 192,
        "intermediate_size": 384,
        "moe_intermediate_size": 96,
        "num_attention_heads": 6,
        **_MOE,
    },
    "audio_config": _AUDIO,
    "vision_config": _VISION,
}

_TALKER = {
    "accept_hidden_layer": 2,
    "thinker_hidden_size": 192,
    "num_code_groups": 16,
    "spatial_merge_size": 2,
    **_MEDIA,
    "codec_pad_id": CODEBOOK + 100,
    "codec_bos_id": CODEBOOK + 101,
    "codec_eos_token_id": CODEBOOK + 102,
    "codec_nothink_id": CODEBOOK + 107,
    "codec_think_bos_id": CODEBOOK + 108,
    "codec_think_eos_id": CODEBOOK + 109,
    "speaker_id": SPEAKERS,
    "output_router_logits": False,
    "text_config": {
        "model_type": "qwen3_omni_moe_talker_text",
        "vocab_size": CODEBOOK + 1024,  # the model suppresses the last 1024 ids, all but the codec end token
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "num_attention_heads": 4,
        **_MOE,
    },
    "code_predictor_config": {
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "vocab_size": CODEBOOK,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_code_groups": 16,
        "max_position_embeddings": 128,
        "rope_parameters": _ROPE,
        **_DECODER,
    },
}

_CODE2WAV = {
    "codebook_size": CODEBOOK,
    "num_quantizers": 16,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "sliding_window": 72,
    "max_position_embeddings": 8000,
    "rms_norm_eps": 1e-5,
    "layer_scale_initial_scale": 0.01,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "decoder_dim": 96,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
}

NANO = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "enable_audio_output": True,
    "im_start_token_id": 1001,
    "im_end_token_id": 1002,
    "tts_pad_token_id": 1010,
    "tts_bos_token_id": 1011,
    "tts_eos_token_id": 1012,
    "system_token_id": ROLE_TOKENS["system"],
    "user_token_id": ROLE_TOKENS["user"],
    "assistant_token_id": ROLE_TOKENS["assistant"],
    "thinker_config": _THINKER,
    "talker_config": _TALKER,
    "code2wav_config": _CODE2WAV,
}

GENERATION = {
    "eos_token_id": 1002,
    "pad_token_id": 1000,
    "do_sample": False,
    "talker_do_sample": True,
    "talker_temperature": 0.9,
    "talker_top_k": 50,
    "talker_top_p": 1.0,
    "talker_repetition_penalty": 1.05,
    "talker_max_new_tokens": 512,
}

PREPROCESSOR = {
    "processor_class": "Qwen3OmniMoeProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "sampling_rate": 16000,
    "feature_size": 128,
    "n_fft": 400,
    "hop_length": 160,
    "chunk_length": 300,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "dither": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] -}}
            {%- elif part['type'] == 'audio' -%}
                {{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
            {%- elif part['type'] == 'image' -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part['type'] == 'video' -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
