"""Bodies that are wrong, and media: what is refused, and how the message helps."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import random

import httpx
import numpy as np
import pytest
import schemathesis
import soundfile
from hypothesis import HealthCheck, given, settings
from PIL import Image

from tests.pipelines import experiment
from tests.serving import served

JSON = {"Content-Type": "application/json"}
SMALL = [
    "executor=inline",
    "stages={thinker: {max_model_len: 192}, talker: {max_model_len: 192}}",
    "stages.thinker.sampling.max_tokens=2",
    "stages.talker.sampling.max_tokens=3",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An allowed directory with one file of each kind, and traps; a secret lies beside it."""
    root = tmp_path_factory.mktemp("media")
    (root / "secret.png").write_bytes(picture())
    allowed = root / "allowed"
    (allowed / "sub").mkdir(parents=True)
    (allowed / "tone.wav").write_bytes(tone(1.0))
    (allowed / "sub" / "a b.png").write_bytes(picture())
    (allowed / "clip.gif").write_bytes(clip(4))
    (allowed / "inside.png").symlink_to(allowed / "sub" / "a b.png")
    (allowed / "outside.png").symlink_to(root / "secret.png")
    (allowed / "up").symlink_to(root)
    (allowed / "loop.png").symlink_to(allowed / "loop.png")
    os.mkfifo(allowed / "pipe.png")
    return allowed


@pytest.fixture(scope="module")
def server(nano, folder):
    limits = f"{{media_dir: {folder}, max_audio_s: 2.0, max_image_mp: 0.1, max_video_mp: 0.1, max_concurrent: 8}}"
    with served(experiment(nano, *SMALL, f"server={limits}")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def tone(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(int(16000 * seconds)) / 9), 16000, format="WAV")
    return file.getvalue()


def picture(side: int = 64, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), "teal").save(file, form)
    return file.getvalue()


def clip(frames: int, side: int = 64) -> bytes:
    file = io.BytesIO()
    images = [Image.new("RGB", (side, side), (index * 20, 0, 0)) for index in range(frames)]
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100)
    return file.getvalue()


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def part(key: str, url: str) -> dict:
    return {"type": key, key: {"url": url}}


def ask(client: httpx.Client, *parts: dict) -> httpx.Response:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
    return client.post("/v1/chat/completions", json={"messages": messages, "modalities": ["text"]})


def test_media_as_data_urls_and_files_are_the_same(client, folder):
    same = {
        "audio": [
            part("audio_url", data_url("audio/wav", tone(1.0))),
            part("audio_url", f"file://{folder}/tone.wav"),
            {"type": "input_audio", "input_audio": {"data": base64.b64encode(tone(1.0)).decode(), "format": "wav"}},
        ],
        "image": [
            part("image_url", data_url("image/png", picture())),
            part("image_url", f"file://{folder}/sub/a%20b.png"),
            part("image_url", "file://inside.png"),
        ],
        "video": [part("video_url", data_url("image/gif", clip(4))), part("video_url", "file://clip.gif")],
    }
    plain = ask(client).json()["usage"]["prompt_tokens"]
    for forms in same.values():
        answers = [ask(client, form).json() for form in forms]
        assert not [answer["error"] for answer in answers if "error" in answer]
        texts = {answer["choices"][0]["message"]["content"] for answer in answers}
        lengths = {answer["usage"]["prompt_tokens"] for answer in answers}
        assert len(texts) == len(lengths) == 1
        assert lengths.pop() > plain


REFUSED = {
    "http://127.0.0.1:1/a.png": "not fetched",
    "https://example.com/a.png": "not fetched",
    "/etc/passwd": "not fetched",
    "file:///etc/passwd": "no such file",
    "file://../secret.png": "no such file",
    "file://sub/../../secret.png": "no such file",
    "file://%2e%2e/secret.png": "no such file",
    "file://outside.png": "no such file",
    "file://up/secret.png": "no such file",
    "file://loop.png": "no such file",
    "file://pipe.png": "no such file",
    "file://sub": "no such file",
    "file://missing.png": "no such file",
    "file://a%00b.png": "no such file",
    "file:///proc/self/environ": "no such file",
    "data:image/png,plain": "base64",
    "data:image/png;base64,###": "base64",
    data_url("image/png", b"no picture"): "cannot be read",
    data_url("image/png", picture(400)): "million pixels",
    data_url(
        "application/postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    ): "cannot be read",
}


@pytest.mark.parametrize("url", REFUSED, ids=lambda url: url[:32])
def test_media_that_are_refused(client, url):
    answer = ask(client, part("image_url", url))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages[0].content[0].image_url")
    assert REFUSED[url] in answer.json()["error"]["message"]


def test_limits_of_media_count_for_all_of_a_request(client):
    second = part("audio_url", data_url("audio/wav", tone(0.1)))
    refused = [
        [part("audio_url", data_url("audio/wav", tone(2.5)))],
        [part("audio_url", data_url("audio/wav", tone(0.9))), second, second],
        [part("image_url", data_url("image/png", picture(250)))] * 2,
        [part("video_url", data_url("image/gif", clip(30)))],
    ]
    for parts in refused:
        answer = ask(client, *parts)
        assert answer.status_code == 400
        assert "the limit is" in answer.json()["error"]["message"]


VALID = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    "model": "nano",
    "modalities": ["text", "audio"],
    "audio": {"voice": "ethan", "format": "wav"},
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_tokens": 0,
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "repetition_penalty": 1.1,
    "seed": 3,
    "stop": ["x"],
    "ignore_eos": False,
    "return_token_ids": True,
    "sampling_params_list": [{"temperature": 0.1, "max_tokens": 2}, {"max_tokens": 2}],
}

HAND_MADE: list[tuple[str, object]] = [
    ("messages", []),
    ("messages", [3]),
    ("messages[0].role", [{"role": "robot", "content": "x"}]),
    ("messages[0].role", [{"content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": ""}]),
    ("messages[0].content", [{"role": "user", "content": "\ud800"}]),
    ("messages[0].content", [{"role": "user", "content": 3}]),
    ("messages[0].content", [{"role": "user", "content": []}]),
    ("messages[0].content[0]", [{"role": "user", "content": ["x"]}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "speech"}]}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": ["text"]}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages[0].content[0].image_url", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages[0].content[0].input_audio", [{"role": "user", "content": [{"type": "input_audio", "input_audio": 3}]}]),
    ("messages[0].name", [{"role": "user", "content": "x", "name": "me"}]),
    ("messages[0].tool_calls", [{"role": "assistant", "content": "x", "tool_calls": [1]}]),
    ("modalities", []),
    ("modalities[0]", ["smell"]),
    ("voice", "nobody"),
    ("audio.format", {"voice": "ethan", "format": "mp3"}),
    ("audio.format", {"voice": "ethan", "format": "aac"}),
    ("audio.speed", {"voice": "ethan", "speed": 2}),
    ("temperature", -0.1),
    ("temperature", 1e9),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("max_tokens", 0),
    ("max_tokens", 1 << 40),
    ("min_tokens", 50),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("sampling_params_list", [{}] * 4),
    ("sampling_params_list[1].temperature", [{}, {"temperature": "hot"}]),
    ("sampling_params_list[0].temprature", [{"temprature": 1}]),
    ("sampling_params_list[0].min_tokens", [{"min_tokens": 3, "max_tokens": 2}]),
    ("n", 2),
    ("tools", [{"type": "function"}]),
    ("logprobs", True),
    ("response_format", {"type": "json_object"}),
    ("presence_penalty", 0.5),
    ("stop_token_ids", [3]),
    ("temprature", 1.0),
    ("stream_options.include", {"include": True}),
    ("stream_options", True),
    ("model", "other"),
]
"""(the field that the answer must name, the value that is put at the root of that field)"""


def fuzzed(count: int) -> list[tuple[str, dict]]:
    """Valid bodies with one field of another type, the same ones every time."""
    draw = random.Random(7)
    wrong = [{}, {"a": 1}, [], [[]], [{}, 3], "text", "", -7.5, 10**30, True, [None], "\x00", [True], {"": None}]
    places = [key for key in VALID if key not in ("messages",)]
    bodies = []
    for key in itertools.islice(itertools.cycle(places), count):
        fitting = {bool: bool, float: (int, float), int: int, str: str, list: (list, str), dict: dict}[type(VALID[key])]
        value = draw.choice([w for w in wrong if not isinstance(w, fitting) or (fitting is int and w is True)])
        bodies.append((key, VALID | {key: value}))
    return bodies


def test_two_hundred_bad_bodies(client):
    bad = [(field, VALID | {field.split("[")[0].split(".")[0]: value}) for field, value in HAND_MADE] + fuzzed(150)
    assert len(bad) == 200
    for field, body in bad:
        body = {key: value for key, value in body.items() if key != "audio"} if "voice" in field[:5] else body
        answer = client.post(
            "/v1/chat/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        told = answer.json()["error"]
        assert 400 <= answer.status_code < 500, (field, told)
        assert told["param"].startswith(field) or field.startswith(told["param"]), (field, told)
        assert told["param"] in told["message"], (field, told)


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"3",
    b"null",
    b'{"messages": [' * 20000,
    b"\xff\xfe",
    b'{"messages": NaN}',
    b"{'messages': 1}",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/speech"])
@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content[:12]))
def test_bodies_that_are_no_json_objects(client, path, content):
    answer = client.post(path, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"]


def test_a_page_elsewhere_cannot_send_a_form(client):
    """A browser sends text/plain to any origin without asking first."""
    body = json.dumps({"messages": VALID["messages"]})
    answer = client.post("/v1/chat/completions", content=body, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input", {"input": ""}),
        ("input", {}),
        ("input", {"input": "x" * 5000}),
        ("voice", {"input": "x", "voice": "nobody"}),
        ("response_format", {"input": "x", "response_format": "aac"}),
        ("response_format", {"input": "x", "response_format": "mp3", "stream": True}),
        ("response_format", {"input": "x", "response_format": "opus", "stream_format": "sse"}),
        ("speed", {"input": "x", "speed": 2.0}),
        ("pitch", {"input": "x", "pitch": 2.0}),
    ],
)
def test_bad_speech_bodies(client, field, fields):
    answer = client.post("/v1/audio/speech", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_errors_are_in_words_for_the_sender(client):
    """A field that is misspelt, a list that is empty, bytes that are no medium: what was expected, and no Python."""
    messages = [{"role": "user", "content": "?"}]

    def told(**body) -> str:
        return client.post("/v1/chat/completions", json={"messages": messages, **body}).json()["error"]["message"]

    assert told(temprature=1.0) == "temprature: unknown field; did you mean 'temperature'?"
    assert told(modalities=[]) == "modalities: expected at least 1, got 0"
    nonsense = {"audio_url": "wav, flac, mp3 or ogg", "image_url": "PNG, JPEG", "video_url": "an animation"}
    for key, expected in nonsense.items():
        message = ask(client, part(key, data_url("image/png", b"nonsense"))).json()["error"]["message"]
        assert message.startswith(f"messages[0].content[0].{key}: cannot be read as") and expected in message
        assert "BytesIO" not in message


def test_unknown_paths_and_methods_are_errors_in_the_same_form(client):
    assert client.get("/v1/nothing").json()["error"]["code"] == 404
    assert client.get("/v1/chat/completions").json()["error"]["code"] == 405


def test_nothing_that_the_document_allows_or_forbids_is_an_internal_error(server):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json").exclude(path_regex="profile")
    operations = [found.ok() for found in document.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/audio/speech", "/metrics"}
    for operation in operations:

        @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def holds(case):
            case.call_and_validate(checks=[schemathesis.checks.not_a_server_error])

        holds()
