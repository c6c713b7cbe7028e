"""A nano checkpoint with the vocabulary and the ids of the published Qwen3-Omni, for servers that have them built in.

`python -m omni_lab.peers.checkpoint DIR` writes it: the networks of `nano` with 151,936 text ids, 3,072 talker ids and
2,048 codes; random weights, 310 MB.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from omni_lab.settings import merge

VERSION = "1"
"""To be raised when the written files change: checkpoints written before are then written again."""

TEXT_VOCAB = 151_936
CODEBOOK = 2_048

SPECIAL_TOKENS = {
    "<|endoftext|>": 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|vision_start|>": 151_652,
    "<|vision_end|>": 151_653,
    "<|image_pad|>": 151_655,
    "<|video_pad|>": 151_656,
    "<|audio_start|>": 151_669,
    "<|audio_end|>": 151_670,
    "<tts_pad>": 151_671,
    "<tts_text_bos>": 151_672,
    "<tts_text_eod>": 151_673,
    "<|audio_pad|>": 151_675,
}

ROLE_TOKENS = {"system": 8_948, "user": 872, "assistant": 77_091, "\n": 198}
SPEAKERS = {"chelsie": 2_301, "ethan": 2_302, "aiden": 2_303}

_MEDIA = {
    "audio_token_id": 151_675,
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "audio_start_token_id": 151_669,
    "audio_end_token_id": 151_670,
    "vision_start_token_id": 151_652,
}

_CHANGES: dict[str, Any] = {
    "im_start_token_id": 151_644,
    "im_end_token_id": 151_645,
    "tts_pad_token_id": 151_671,
    "tts_bos_token_id": 151_672,
    "tts_eos_token_id": 151_673,
    "system_token_id": ROLE_TOKENS["system"],
    "user_token_id": ROLE_TOKENS["user"],
    "assistant_token_id": ROLE_TOKENS["assistant"],
    "thinker_config": {
        **_MEDIA,
        "user_token_id": ROLE_TOKENS["user"],
        "vision_end_token_id": 151_653,
        "text_config": {"vocab_size": TEXT_VOCAB},
        "vision_config": {"image_size": 256, "apply_vit_abs_pos_embed": True},
    },
    "talker_config": {
        **_MEDIA,
        "codec_pad_id": 2_148,
        "codec_bos_id": 2_149,
        "codec_eos_token_id": 2_150,
        "codec_nothink_id": 2_155,
        "codec_think_bos_id": 2_156,
        "codec_think_eos_id": 2_157,
        "text_config": {"vocab_size": CODEBOOK + 1_024},
        "code_predictor_config": {"vocab_size": CODEBOOK},
    },
    "code2wav_config": {"codebook_size": CODEBOOK},
}
"""What differs from nano's configuration."""


def ensure(directory: Path) -> Path:
    """The checkpoint, written first if it is not there. It appears whole or not at all."""
    stamp = directory / "VERSION"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == VERSION:
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    print(f"writing a checkpoint with the published ids to {directory}, once", file=sys.stderr)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write(scratch)
        (scratch / "VERSION").write_text(VERSION, encoding="utf-8")
        scratch.chmod(0o755)
        (scratch / "model.safetensors").chmod(0o644)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def write(directory: Path) -> None:
    """Weights, configurations and tokenizer into `directory`, which exists."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    from omni_lab.zoo.nano import draw_weights
    from omni_lab.zoo.nano_config import GENERATION, NANO, PREPROCESSOR

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it would warn about rope keys that its own configuration writes
    config = merge(copy.deepcopy(NANO), _CHANGES)
    config["talker_config"]["speaker_id"] = SPEAKERS
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**config)).eval()
    draw_weights(model)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    generation = GENERATION | {"eos_token_id": 151_645, "pad_token_id": 151_643}
    for name, content in (("generation_config.json", generation), ("preprocessor_config.json", PREPROCESSOR)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(directory: Path) -> None:
    """Nano's tokens at the published ids, and a name for each of the other ids."""
    from tokenizers import AddedToken, Tokenizer, models

    from omni_lab.zoo import nano_config, nano_tokenizer

    nano_tokenizer.save(nano_tokenizer.train(), directory)
    nano = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    fixed = {("Ċ" if role == "\n" else role): index for role, index in ROLE_TOKENS.items()} | SPECIAL_TOKENS
    ordinary = [token for token, index in nano["vocab"].items() if index < nano_config.ORDINARY_TOKENS]
    free = sorted(set(range(TEXT_VOCAB)) - set(fixed.values()))
    names = sorted(ordinary, key=nano["vocab"].get) + [f"<|unused_{index}|>" for index in free[len(ordinary) :]]
    vocab = dict(zip(names, free, strict=True)) | fixed

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.model = models.BPE(vocab=vocab, merges=[tuple(merge) for merge in nano["merges"]])
    whole = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer.model.save(str(directory))  # vocab.json and merges.txt


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m omni_lab.peers.checkpoint DIR")
    print(ensure(Path(sys.argv[1])))
