"""Data sets, arrivals, requests, and the client's notes."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from omni_lab.experiment import Experiment, ExperimentError
from omni_lab.run import main
from omni_lab.settings import WorkloadConfig
from omni_lab.workload.arrivals import poisson_arrivals
from omni_lab.workload.dataset import load_dataset
from omni_lab.workload.plan import planned
from omni_lab.workload.requests import derived_seed, make_request


def dataset(path: Path | str = "bundled", **settings):
    return load_dataset(WorkloadConfig(dataset=str(path), **settings))


def test_bundled_set_asks_in_the_words_that_the_voice_knows() -> None:
    bundled = dataset()
    assert len(bundled.prompts) == 255 and bundled.skipped == 0
    first = bundled.take(1, None)[0]
    assert first.messages == [
        {"role": "system", "content": "You are a helpful voice assistant."},
        {"role": "user", "content": f"Please read: {first.text}"},
    ]


def test_seed_tts_lines_of_four_and_five_fields(tmp_path: Path) -> None:
    (tmp_path / "en").mkdir()
    meta = tmp_path / "en" / "meta.lst"
    meta.write_text(
        "u1|We asked them.|prompt-wavs/u1.wav|Get the trust fund to the bank early.\n\n"
        "u2|Reference.|prompt-wavs/u2.wav|A {brace} stays.|wavs/u2.wav\n"
        "u3|no text|prompt-wavs/u3.wav|\n"
        "u4|too short\n"
    )
    for path in (tmp_path, meta, tmp_path / "en"):
        loaded = dataset(path, system_prompt=None, prompt_template="Say: {text}")
        assert [prompt.name for prompt in loaded.prompts] == ["u1", "u2"]
        assert loaded.skipped == 2
    assert loaded.prompts[0].messages == [{"role": "user", "content": "Say: Get the trust fund to the bank early."}]
    assert loaded.prompts[1].messages[0]["content"] == "Say: A {brace} stays."


def test_chat_requests_of_a_jsonl_file(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {
            "id": "two",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "audio", "audio": "clip.wav"},
                        {"type": "image", "image": "data:image/png;base64,AAAA"},
                        {"type": "video", "video": ["a.png", "b.png"]},
                        {"type": "text", "text": "clip.wav"},
                    ],
                }
            ],
            "speaker": "lark",
            "modalities": ["text"],
            "sampling": {"talker": {"temperature": 0.0, "seed": 7}},
        },
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    plain, rich = dataset(file).prompts
    assert plain.name == "line_1" and plain.messages == lines[0]["messages"] and plain.text is None
    parts = rich.messages[0]["content"]
    assert parts[0]["audio"] == str(tmp_path / "clip.wav")
    assert parts[1:2] == lines[1]["messages"][0]["content"][1:2]
    assert parts[2]["video"] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert parts[3]["text"] == "clip.wav"
    request = make_request(Experiment(name="x"), rich, 0, "x")
    assert (request.speaker, request.modalities) == ("lark", ("text",))
    talker = request.sampling["talker"]
    assert (talker.temperature, talker.seed, talker.top_k) == (0.0, 7, 50)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.jsonl", "{", ["line 1", "JSON"]),
        ("x.jsonl", '{"messages": []}', ["line 1", "messages"]),
        ("x.jsonl", '\n{"mesages": [{}]}', ["line 2", "mesages"]),
        ("x.jsonl", '{"messages": [{}], "sampling": {"talker": {"top_p": 2}}}', ["sampling.talker.top_p"]),
        ("x.jsonl", '{"messages": [{}], "sampling": {"speaker": {}}}', ["sampling.speaker"]),
        ("x.jsonl", "", ["at least one prompt"]),
        ("x.lst", "only words\nand more", ["at least one prompt", "2 lines"]),
    ],
)
def test_wrong_set_is_one_line_and_status_2(
    name: str, text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "x.yaml").write_text(f"name: x\nworkload: {{dataset: {name}}}")
    assert main([str(tmp_path / "x.yaml")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for word in [name, *words]:
        assert word in err


def test_folder_without_a_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"en/meta\.lst"):
        dataset(tmp_path)


def test_order_is_of_the_seed_and_starts_again_at_the_end() -> None:
    bundled = dataset()
    names = [prompt.name for prompt in bundled.take(600, 3)]
    assert names == [prompt.name for prompt in bundled.take(600, 3)]
    assert sorted(names[:255]) == sorted(prompt.name for prompt in bundled.prompts)
    assert names[255:510] == names[:255]
    assert names != [prompt.name for prompt in bundled.take(600, 4)]
    assert [prompt.name for prompt in bundled.take(2, None)] == ["rep_001", "rep_002"]


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    times = poisson_arrivals(4001, rate=8.0, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0 and min(gaps) > 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.06)
    assert times == poisson_arrivals(4001, 8.0, 1) != poisson_arrivals(4001, 8.0, 2)


def test_fixed_lengths_and_seeds_of_requests() -> None:
    experiment = Experiment(name="x", workload={"output": {"text_tokens": 40, "codec_frames": 100}})
    prompt = dataset().prompts[0]
    first, again, other = (
        make_request(experiment, prompt, index, label) for index, label in ((0, "a"), (0, "b"), (1, "a"))
    )
    assert (first.sampling["thinker"].min_tokens, first.sampling["thinker"].max_tokens) == (40, 40)
    assert (first.sampling["talker"].min_tokens, first.sampling["talker"].max_tokens) == (101, 101)
    assert first.sampling["talker"].seed == 42
    assert first.sampling["thinker"].seed == again.sampling["thinker"].seed != other.sampling["thinker"].seed
    assert len({first.id, again.id, other.id}) == 3
    free = make_request(Experiment(name="x"), prompt, 0, "a").sampling["talker"]
    assert (free.min_tokens, free.max_tokens) == (0, 512)
    assert derived_seed(0, "talker", 1) != derived_seed(1, "talker", 1) != derived_seed(1, "thinker", 1)


def test_every_other_repeat_goes_back_from_the_last_configuration() -> None:
    """Over an even number of repeats each configuration has the same mean place, so a steady drift cancels."""
    configurations = [Experiment(name=name, workload={"concurrency": [1, 2], "repeats": 4}) for name in "abc"]
    units = list(planned(configurations))
    order = [name for name, load, _ in (unit.key for unit in units) if load == 1]
    assert "".join(order) == "abccbaabccba"
    assert [unit.repeat for unit in units] == sorted(unit.repeat for unit in units)
    for load in (1, 2):
        places = [
            statistics.fmean(place for place, unit in enumerate(units) if unit.key[:2] == (name, load))
            for name in "abc"
        ]
        assert len(set(places)) == 1
    starts = sum(before.configuration is not after.configuration for before, after in pairwise(units))
    assert starts == 4 * 2  # the configuration at a turn goes on as it is


def test_repeats_go_round_the_configurations() -> None:
    a = Experiment(name="a", workload={"concurrency": [1, 2], "repeats": 2})
    b = Experiment(name="b", workload={"concurrency": [4], "repeats": 1})
    assert [unit.key for unit in planned([a, b])] == [
        ("a", 1, 0),
        ("a", 2, 0),
        ("b", 4, 0),
        ("a", 1, 1),
        ("a", 2, 1),
    ]
