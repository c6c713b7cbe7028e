"""The code predictor as transformers has it: its own module, and a `generate` of 15 tokens for every frame."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerCodePredictorConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

from omni_lab.models.qwen3_omni.code_predictor import Pick
from omni_lab.models.qwen3_omni.config import DecoderConfig
from omni_lab.models.qwen3_omni.invariance import at_least
from omni_lab.models.qwen3_omni.weights import allocate


class GeneratePredictor:
    """What `CodePredictor` does, for the same inputs, with the same codes: one call of transformers' `generate`.

    Its first pass takes positions 0 and 1 together, then one code follows the other over a cache of its own.
    """

    def __init__(self, config: DecoderConfig, groups: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.groups = groups
        theirs = Qwen3OmniMoeTalkerCodePredictorConfig(
            **config.published(),
            max_position_embeddings=groups,
            num_code_groups=groups,
        )
        with torch.device("meta"):
            self.module = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration._from_config(theirs).eval()
        allocate(self.module, dtype, device)
        model = self.module.model
        model.rotary_emb = type(model.rotary_emb)(theirs).to(device)  # its frequencies are made, not loaded
        self.generation = GenerationConfig(max_new_tokens=groups - 1, do_sample=False)

    def slots(self, prefix: str) -> dict[str, torch.Tensor]:
        return {prefix + name: parameter for name, parameter in self.module.named_parameters()}

    def prepare(self) -> None:
        """Nothing is derived from the weights."""

    def predict(self, hidden: torch.Tensor, embed0: torch.Tensor, pick: Pick) -> tuple[torch.Tensor, torch.Tensor]:
        """As `CodePredictor.predict`: hidden states and embeddings of the codes [B, H] -> (residual codes [B, 15]
        int64, sum of the 16 codes' embeddings [B, H])."""
        rows = hidden.shape[0]
        codes = self.module.generate(
            inputs_embeds=at_least(torch.stack((hidden, embed0), 1)),
            generation_config=self.generation,
            logits_processor=LogitsProcessorList([_Picked(pick, rows)]),
        )[:rows]
        embeds = embed0.clone()
        for embedding, column in zip(self.module.get_input_embeddings(), codes.unbind(1), strict=True):
            embeds += embedding(column)
        return codes, embeds


class _Picked(LogitsProcessor):
    """Leaves each row the one code that `pick` chose, so that the draws are the request's own."""

    def __init__(self, pick: Pick, rows: int) -> None:
        self.pick = pick
        self.rows = rows

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        codes = at_least(self.pick(scores[: self.rows], input_ids.shape[1] + 1))
        return torch.full_like(scores, -torch.inf).scatter_(1, codes[:, None], 0.0)
