"""The Thinker as a stage with vLLM's engine inside: text prompts in, text tokens out."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from vllm import LLMEngine, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from omni_lab.core import CLIENT, Payload, Sampling, StageError
from omni_lab.engine.clock import FORWARD, PAYLOAD, PREPARE, StepClock
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.families.qwen3_omni.thinker import TALKER, talker_prompt

MEDIA = ("audio_features", "image_pixels", "video_pixels")


@dataclass(slots=True)
class EngineState:
    """A prompt (tensors of `core.Prompt`) and its sampling in vLLM's terms; `engaged` while the engine has it."""

    prompt: dict[str, torch.Tensor]
    params: SamplingParams
    spoke: bool = False
    engaged: bool = False


class VllmThinkerStage:
    """Emits what `ThinkerStage` emits, with the tokens of vLLM's engine; greedy ones are the same.

    A "prefill" step hands prompts to the engine and samples nothing. A "decode" step is one step of the engine: it
    prefills what was handed to it and decodes the rest in one pass, as its own scheduler decides. The caller keeps
    at most as many sequences running as the engine has room for, so that none waits inside it.

    The engine sees text only: a prompt with media is refused when it arrives. Draws are vLLM's own, so a sampled answer
    differs from that of engine torch with the same seed.
    """

    name = "thinker"

    def __init__(self, engine: LLMEngine, stop_token: int, clock: StepClock) -> None:
        self.clock = clock
        self.counters: dict[str, int] = {}
        self.engine = engine
        self.stop_token = stop_token

    def open(self, sequence: Sequence) -> None:
        """Nothing to hold before the prompt arrives."""

    def receive(self, sequence: Sequence, payload: Payload) -> None:
        media = [name.partition("_")[0] for name in MEDIA if name in payload.tensors]
        if media:
            raise StageError(
                f"stages.thinker.engine vllm answers text only, and the prompt has {' and '.join(media)}; "
                "send text, or use engine torch"
            )
        sequence.state = EngineState(payload.tensors, sampling_params(sequence.sampling, self.stop_token))

    def next_step(self, sequence: Sequence) -> str | None:
        if sequence.state is None:
            return None
        return "decode" if sequence.state.engaged else "prefill"

    def step_tokens(self, sequence: Sequence) -> int:
        return len(sequence.state.prompt["input_ids"])

    def step(self, kind: str, batch: list[Sequence]) -> tuple[list[Emission], int]:
        self.clock.enter(PREPARE)
        if kind == "prefill":
            for sequence in batch:
                prompt = tokens_input(sequence.state.prompt["input_ids"].tolist())
                self.engine.add_request(sequence.request_id, prompt, sequence.state.params)
                sequence.state.engaged = True
            return [], 0
        sequences = {sequence.request_id: sequence for sequence in batch}
        emissions, tokens = [], 0
        self.clock.enter(FORWARD)
        outputs = self.engine.step()
        self.clock.enter(PAYLOAD)
        for output in outputs:
            emissions += self._emit(sequences[output.request_id], output)
            tokens += len(output.outputs[0].token_ids)
        return emissions, tokens

    def move(self, source: int, target: int) -> None:
        """Rows count the sequences in the engine; where it keeps them is its own business."""

    def close(self, sequence: Sequence) -> None:
        if sequence.state is not None and sequence.state.engaged:
            self.engine.abort_request([sequence.request_id])
        sequence.state = None

    def _emit(self, sequence: Sequence, output: RequestOutput) -> list[Emission]:
        state, (answer,) = sequence.state, output.outputs
        sequence.finished = output.finished
        state.engaged = not output.finished
        token_ids = torch.tensor(answer.token_ids)
        emissions = []
        if CLIENT in sequence.targets:
            tensors = {"token_ids": token_ids}
            emissions.append(Emission(sequence, CLIENT, tensors, output.finished, answer.finish_reason))
        if TALKER in sequence.targets:
            handed = {} if state.spoke else talker_prompt(state.prompt, None, 0)
            ids = token_ids[:-1] if output.finished else token_ids
            spoken = {"token_ids": ids} if len(ids) else {}
            emissions.append(Emission(sequence, TALKER, spoken | handed, output.finished, answer.finish_reason))
        state.spoke = True
        return emissions


def sampling_params(sampling: Sampling, stop_token: int) -> SamplingParams:
    """A request's sampling in vLLM's terms: every token as it comes, the stop token included. Raises ValueError."""
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[stop_token],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
