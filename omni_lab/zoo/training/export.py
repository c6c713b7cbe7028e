"""The three trained networks as one checkpoint in Qwen3-Omni's layout, in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer

from omni_lab.zoo import nano_tokenizer
from omni_lab.zoo.nano_config import GENERATION, PREPROCESSOR
from omni_lab.zoo.training import codec, network, trainer

SHARPNESS = 3.0
"""Logits of codes are scaled by this: transformers samples at a temperature of 0.9 unless told otherwise. Half trained,
one word in two was heard wrong at 0.9, one in three at 0.4, one in four greedy. Greedy codes stay the same."""


def export(folder: Path, target: Path) -> None:
    """Write the averaged weights of FOLDER's networks to `target`, whole or not at all.

    Raises FileNotFoundError while one of the networks has not been trained.
    """
    voice = network.build()
    pieces = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    thinker = trainer.averaged(folder, "thinker")
    parts = torch.nn.ModuleDict({"model": voice.thinker.model.language_model, "head": voice.thinker.lm_head})
    parts.load_state_dict(thinker)
    voice.talker.load_state_dict(trainer.averaged(folder, "talker"))
    with torch.no_grad():
        for head in (voice.talker.codec_head, *voice.talker.code_predictor.lm_head):
            head.weight.mul_(SHARPNESS)
    voice.code2wav.load_state_dict(codec.averaged_decoder(folder))
    scratch = target.with_name(f".{target.name}-new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    voice.to(torch.bfloat16).save_pretrained(scratch)
    (scratch / "model.safetensors").chmod(0o644)  # transformers keeps it from everyone else
    nano_tokenizer.save(pieces, scratch)
    generation = GENERATION | {"talker_max_new_tokens": 400}
    for name, content in (("generation_config.json", generation), ("preprocessor_config.json", PREPROCESSOR)):
        (scratch / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
