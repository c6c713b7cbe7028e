"""The reference engine gives what transformers' own `generate` gives, and a defined result where that crashes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import Qwen3OmniMoeForConditionalGeneration

from omni_lab.core import CLIENT, Payload, Sampling, StageError
from omni_lab.engine.clock import StepClock
from omni_lab.engine.stage import Emission, Sequence
from omni_lab.families.qwen3_omni.reference import TransformersStage

LENGTH = 5
TEXT = Sampling(max_tokens=LENGTH)
SPEECH = Sampling(repetition_penalty=1.05, max_tokens=LENGTH)
MEL = torch.randn(2, 128, 250, generator=torch.Generator().manual_seed(3))
PATCHES = torch.randn(128, 1536, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def stage(nano: Path) -> TransformersStage:
    return TransformersStage(nano, torch.device("cpu"), torch.float32, StepClock())


@pytest.fixture(scope="module")
def transformers_model(nano: Path) -> Qwen3OmniMoeForConditionalGeneration:
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(nano).eval()
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model


@pytest.fixture(autouse=True)
def _fresh_clock(stage: TransformersStage) -> None:
    stage.clock.take()


def chat(stage: TransformersStage, *turns: list[int], role: str = "user") -> list[int]:
    """Turns of `role`, an answer between any two, and the header of the answer to come."""
    config = stage.config
    roles = {"user": config.user_token_id, "system": config.system_token_id, "assistant": config.assistant_token_id}

    def turn(who: str, ids: list[int]) -> list[int]:
        return [config.im_start_token_id, roles[who], 198, *ids, config.im_end_token_id, 198]

    answers = [turn("assistant", [31, 32])] * (len(turns) - 1) + [[config.im_start_token_id, roles["assistant"], 198]]
    return [token for ids, answer in zip(turns, answers, strict=True) for token in turn(role, ids) + answer]


def serve(
    stage: TransformersStage,
    tensors: dict[str, torch.Tensor],
    thinker: Sampling = TEXT,
    talker: Sampling = SPEECH,
    modalities: tuple[str, ...] = ("text", "audio"),
    speaker: str = "ethan",
) -> dict[str, Emission]:
    options = {
        "sampling": {"thinker": thinker, "talker": talker},
        "modalities": modalities,
        "speaker": stage.config.talker_config.speaker_id[speaker],
        "return_codes": True,
    }
    sequence = Sequence("r0", thinker, options, (CLIENT,), {})
    stage.open(sequence)
    assert stage.next_step(sequence) is None
    stage.receive(sequence, Payload("r0", CLIENT, "transformers", final=True, tensors=tensors))
    emissions, tokens = stage.step(stage.next_step(sequence), [sequence])
    stage.close(sequence)
    assert sequence.finished and sequence.state is None
    assert all(emission.final and emission.target == CLIENT for emission in emissions)
    answer = {"audio" if "audio" in emission.tensors else "text": emission for emission in emissions}
    assert set(answer) == set(modalities)
    if "text" in answer:
        assert tokens == len(answer["text"].tensors["token_ids"])
    return answer


def requests(stage: TransformersStage) -> dict[str, tuple[list[int], dict, dict]]:
    """Name -> token ids, our tensors, transformers' arguments for the same media."""
    config = stage.config.thinker_config
    audio, image = [config.audio_token_id], [config.vision_start_token_id] + [config.image_token_id] * 24
    clip = [config.vision_start_token_id] + [config.video_token_id] * 32
    lengths = torch.tensor([250, 100])
    mask = torch.arange(250) < lengths[:, None]
    ours_audio = {"audio_features": torch.cat([MEL[0], MEL[1, :, :100]], 1), "audio_lengths": lengths}
    theirs_audio = {"input_features": MEL * mask[:, None], "feature_attention_mask": mask.long()}
    ours_image = {"image_pixels": PATCHES[:96], "image_grid": torch.tensor([[1, 8, 12]])}
    theirs_image = {"pixel_values": PATCHES[:96], "image_grid_thw": torch.tensor([[1, 8, 12]])}
    video_ids = chat(stage, [*clip, 5, 6])
    times = torch.arange(len(video_ids))
    times[4:36] = 4 + torch.arange(2).repeat_interleave(16) * 26
    return {
        "text": (chat(stage, [5, 6, 7]), {}, {}),
        "three turns": (chat(stage, [5, 6, 7], [8], [9, 10]), {}, {}),
        "two clips": (chat(stage, [*audio * 33, 5, *audio * 13, 6]), ours_audio, theirs_audio),
        "image": (chat(stage, [*image, 5, 6]), ours_image, theirs_image),
        "audio and image": (
            chat(stage, [*audio * 33, *audio * 13, *image, 5]),
            ours_audio | ours_image,
            theirs_audio | theirs_image,
        ),
        "video": (
            video_ids,
            {"video_pixels": PATCHES, "video_grid": torch.tensor([[2, 8, 8]]), "positions": times.expand(3, -1)},
            {
                "pixel_values_videos": PATCHES,
                "video_grid_thw": torch.tensor([[2, 8, 8]]),
                "video_second_per_grid": torch.tensor([2.0]),
            },
        ),
    }


@pytest.mark.filterwarnings("ignore:Passing .repetition_penalty.")
@pytest.mark.parametrize("name", ["text", "three turns", "two clips", "image", "audio and image", "video"])
def test_equals_a_direct_generate_call(stage, transformers_model, name):
    ids, ours, theirs = requests(stage)[name]
    input_ids = torch.tensor([ids])
    sequences, wave = transformers_model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        speaker="Chelsie",
        thinker_do_sample=False,
        thinker_max_new_tokens=LENGTH,
        thinker_eos_token_id=transformers_model.config.im_end_token_id,
        talker_do_sample=False,
        talker_max_new_tokens=LENGTH,
        **theirs,
    )
    answer = serve(stage, {"input_ids": input_ids[0]} | ours, speaker="chelsie")
    text, audio = answer["text"].tensors, answer["audio"].tensors
    assert text["token_ids"].tolist() == sequences[0, len(ids) :].tolist()
    assert torch.equal(audio["audio"], wave[0, 0])
    assert audio["codes"].shape == (audio["frames"], 16)
    assert torch.equal(transformers_model.code2wav(audio["codes"].T[None])[0, 0], wave[0, 0])
    assert (answer["text"].reason, answer["audio"].reason) == ("length", "length")


def test_the_clock_tells_the_stages_apart(stage):
    answer = serve(stage, {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))})
    rows, _ = stage.clock.take()
    assert [(row[0], row[5], row[6]) for row in rows] == [
        ("thinker", LENGTH, "generate"),
        ("talker", int(answer["audio"].tensors["frames"]), "generate"),
        ("code2wav", int(answer["audio"].tensors["frames"]), "generate"),
    ]
    times = [time for row in rows for time in row[2:4]]
    assert times == sorted(times)


def test_text_only_never_touches_the_talker(stage):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}
    alone = serve(stage, prompt, modalities=("text",))
    assert [row[0] for row in stage.clock.take()[0]] == ["thinker"]
    assert torch.equal(alone["text"].tensors["token_ids"], serve(stage, prompt)["text"].tensors["token_ids"])


def test_audio_only(stage):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}
    both, audio = serve(stage, prompt), serve(stage, prompt, modalities=("audio",))
    assert torch.equal(both["audio"].tensors["audio"], audio["audio"].tensors["audio"])


def test_seeds_belong_to_the_request(stage):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}

    def answer(thinker_seed: int, talker_seed: int) -> tuple[list[int], list[int]]:
        thinker = Sampling(temperature=1.0, top_k=50, top_p=0.9, seed=thinker_seed, max_tokens=LENGTH)
        talker = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=talker_seed, max_tokens=LENGTH)
        emissions = serve(stage, prompt, thinker, talker)
        codes = emissions["audio"].tensors["codes"].flatten().tolist()
        return emissions["text"].tensors["token_ids"].tolist(), codes

    state = torch.get_rng_state()
    first = answer(1, 2)
    assert torch.equal(torch.get_rng_state(), state), "a request must leave the process's own draws alone"
    text, codes = answer(1, 3)
    assert text == first[0] and codes != first[1]
    assert answer(4, 2)[0] != first[0]
    assert answer(1, 2) == first


def test_sampling_may_come_over_a_wire(stage):
    tensors = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}
    options = {"sampling": {"thinker": TEXT, "talker": SPEECH}, "modalities": ["text"]}
    options = msgspec.msgpack.decode(msgspec.msgpack.encode(options))
    sequence = Sequence("r0", TEXT, options, (CLIENT,), {})
    stage.receive(sequence, Payload("r0", CLIENT, "transformers", tensors=tensors))
    (emission,), _ = stage.step("generate", [sequence])
    expected = serve(stage, tensors)["text"].tensors["token_ids"]
    assert torch.equal(emission.tensors["token_ids"], expected)


def silent(answer: dict[str, Emission], text_tokens: int, text_reason: str, audio_reason: str) -> None:
    assert len(answer["text"].tensors["token_ids"]) == text_tokens
    assert answer["audio"].tensors["audio"].shape == (0,)
    assert answer["audio"].tensors["codes"].shape == (0, 16)
    assert answer["audio"].tensors["frames"] == 0
    assert (answer["text"].reason, answer["audio"].reason) == (text_reason, audio_reason)


def test_one_text_token_is_an_answer_without_audio(stage, monkeypatch):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}
    answer = serve(stage, prompt, thinker=Sampling(max_tokens=1))
    silent(answer, 1, "length", "stop")
    monkeypatch.setattr(stage.config, "im_end_token_id", answer["text"].tensors["token_ids"].item())
    silent(serve(stage, prompt), 1, "stop", "stop")


def test_a_codec_end_at_once_is_an_answer_without_audio(stage, monkeypatch):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}
    silent(serve(stage, prompt, talker=Sampling(max_tokens=1)), LENGTH, "length", "length")
    first = serve(stage, prompt)["audio"].tensors["codes"][0, 0].item()
    monkeypatch.setattr(stage.config.talker_config, "codec_eos_token_id", first)
    silent(serve(stage, prompt), LENGTH, "length", "stop")


def test_the_end_token_waits_for_min_tokens(stage, monkeypatch):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6, 7]))}
    answer = serve(stage, prompt)
    second_token, second_code = answer["text"].tensors["token_ids"][1].item(), answer["audio"].tensors["codes"][1, 0]
    monkeypatch.setattr(stage.config, "im_end_token_id", second_token)
    monkeypatch.setattr(stage.config.talker_config, "codec_eos_token_id", second_code.item())
    short = serve(stage, prompt)
    assert (len(short["text"].tensors["token_ids"]), short["text"].reason) == (2, "stop")
    longer = serve(stage, prompt, Sampling(max_tokens=LENGTH, min_tokens=3), Sampling(max_tokens=LENGTH, min_tokens=3))
    assert second_token not in longer["text"].tensors["token_ids"][:3]
    assert longer["audio"].tensors["frames"] >= 3


def test_no_user_turn_is_a_clear_error_for_audio_alone(stage):
    prompt = {"input_ids": torch.tensor(chat(stage, [5, 6], role="system"))}
    with pytest.raises(StageError, match="without a user turn: add a user message"):
        serve(stage, prompt)
    assert len(serve(stage, prompt, modalities=("text",))["text"].tensors["token_ids"]) == LENGTH
