"""The server as clients see it: openai's, curl, plain HTTP; the answers are those of the pipeline."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import soundfile

from omni_lab.core import Request, Sampling
from omni_lab.server.sound import pcm16
from tests.pipelines import EAGER, Answer, answers, experiment
from tests.serving import Served, served

TEXT = "Good morning."
CHAT = [{"role": "user", "content": f"Please read: {TEXT}"}]
QUICK = ["executor=inline", "stages.talker.sampling.temperature=0.0"]


@pytest.fixture(scope="module")
def server(voice):
    with served(experiment(voice, *QUICK)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(voice) -> Answer:
    """What the pipeline itself answers to CHAT."""
    setup = experiment(voice, *QUICK)
    sampling = {name: Sampling(**stage.sampling.model_dump()) for name, stage in setup.stages.items()}
    return answers(setup, [Request("direct", CHAT, speaker="lark", sampling=sampling)])[0][0][0]


def chat(server: Served, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": CHAT, **fields}, timeout=60)


def events(response: httpx.Response) -> list[dict]:
    """The JSON of each server-sent event; the last line must be [DONE]."""
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_a_whole_answer_in_vllm_omnis_shape(server, expected):
    answer = chat(server).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == expected.text == TEXT
    assert message["audio"]["transcript"] == ""
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(message["audio"]["data"])), dtype="int16")
    assert rate == 24000
    assert samples.tobytes() == pcm16(expected.wave)
    assert answer["choices"][0]["audio_metadata"]["frame_count"] == len(expected.wave)
    assert answer["choices"][0]["finish_reasons"] == expected.finished.reasons
    assert answer["usage"]["prompt_tokens"] == expected.finished.prompt_tokens
    assert answer["usage"]["completion_tokens"] == len(expected.text_ids)
    assert chat(server, return_token_ids=True).json()["choices"][0]["token_ids"] == expected.text_ids


def test_a_stream_in_vllm_omnis_shape(server, expected):
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = chat(server, stream=True, stream_options=options, return_token_ids=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events(response)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(expected.text_ids)
    choices = {kind: [c["choices"][0] for c in chunks if c["modality"] == kind] for kind in ("text", "audio")}
    assert choices["text"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices["text"]) == expected.text
    assert [token for choice in choices["text"] for token in choice.get("token_ids", [])] == expected.text_ids
    pieces = [base64.b64decode(choice["delta"]["content"]) for choice in choices["audio"]]
    assert len(pieces) == len(expected.chunks) > 1
    assert all(piece[:4] == b"RIFF" and int.from_bytes(piece[40:44], "little") == len(piece) - 44 for piece in pieces)
    assert b"".join(piece[44:] for piece in pieces) == pcm16(expected.wave)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if "usage" in chunk]
    assert counts == sorted(set(counts)) and counts[-1] == len(expected.text_ids)
    assert [choice["finish_reason"] for choice in choices["text"]][-1] == "stop"


def test_openais_client(client, expected):
    answer = client.chat.completions.create(
        model="voice", messages=CHAT, modalities=["text", "audio"], audio={"voice": "lark", "format": "flac"}
    )
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == expected.text
    assert message.audio.id.startswith("audio_")
    samples, _ = soundfile.read(io.BytesIO(base64.b64decode(message.audio.data)), dtype="float32")
    assert np.abs(samples - expected.wave).max() < 1e-4
    assert answer.usage.completion_tokens == len(expected.text_ids)
    text = client.chat.completions.create(model="voice", messages=CHAT, modalities=["text"])
    assert text.choices[0].message.content == expected.text
    assert text.choices[0].message.audio is None
    assert [model.id for model in client.models.list()] == ["voice"]


@pytest.mark.parametrize("interval_ms", [0, 60_000])
def test_text_that_comes_within_the_interval_is_one_event(voice, expected, interval_ms):
    with served(experiment(voice, *QUICK, f"server.text_interval_ms={interval_ms}")) as server:
        streamed = events(chat(server, stream=True, modalities=["text"], return_token_ids=True))
    told = [ids for chunk in streamed if (ids := chunk["choices"][0].get("token_ids"))]
    assert [token for ids in told for token in ids] == expected.text_ids
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in streamed) == TEXT
    assert len(told) <= 2 if interval_ms else len(told) == len(expected.text_ids) > 2


@pytest.mark.parametrize("form", ["pcm16", "wav"])
def test_openais_client_streams(client, expected, form):
    stream = client.chat.completions.create(
        model="voice",
        messages=CHAT,
        modalities=["text", "audio"],
        audio={"voice": "lark", "format": form},
        stream=True,
        stream_options={"include_usage": True},
    )
    transcript, data, ids, expiry, usage, reasons = "", b"", set(), None, None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reasons.append(choice.finish_reason)
            audio = choice.delta.audio
            if audio:
                ids.add(audio.id)
                transcript += audio.transcript or ""
                data += base64.b64decode(audio.data or "")
                expiry = audio.expires_at or expiry
    assert transcript == expected.text
    if form == "wav":
        header, data = data[:44], data[44:]
        assert header[:4] == b"RIFF"
        assert soundfile.info(io.BytesIO(header + data)).samplerate == 24000
    assert data == pcm16(expected.wave)
    assert len(ids) == 1
    assert expiry
    assert usage.completion_tokens == len(expected.text_ids)
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}


def test_openais_async_client(server, expected):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="voice", messages=CHAT, modalities=["text"], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(run()) == [expected.text] * 4


def test_openais_client_gets_typed_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="voice", messages=CHAT, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt", messages=CHAT)
    assert missing.value.param == "model"


@pytest.fixture(scope="module")
def spoken(client) -> bytes:
    """PCM of TEXT by the speech endpoint, whole; the other forms must hold the same samples."""
    return client.audio.speech.create(model="voice", voice="lark", input=TEXT, response_format="pcm").content


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus"])
def test_speech_in_each_file_format(client, spoken, form):
    answer = client.audio.speech.create(model="voice", voice="lark", input=TEXT, response_format=form)
    assert int(answer.response.headers["content-length"]) == len(answer.content)
    samples, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    wave = np.frombuffer(spoken, "<i2") / 32768
    assert rate == 24000
    assert len(samples) == len(wave)
    if form in ("wav", "flac"):
        assert np.abs(samples - wave).max() < 1e-4
    else:  # lossy, but the same speech
        assert np.corrcoef(samples, wave)[0, 1] > 0.9


def test_streamed_speech_is_raw_or_has_one_header(client, spoken):
    with client.audio.speech.with_streaming_response.create(
        model="voice", voice="lark", input=TEXT, response_format="wav", extra_body={"stream": True}
    ) as answer:
        parts = list(answer.iter_bytes())
    data = b"".join(parts)
    assert "content-length" not in answer.headers
    assert len(parts) > 1
    assert data[:4] == b"RIFF"
    assert data.count(b"RIFF") == 1
    assert data[44:] == spoken


@pytest.mark.parametrize("form", ["pcm", "wav"])
def test_speech_as_events(server, spoken, form):
    body = {"input": TEXT, "voice": "lark", "response_format": form, "stream_format": "sse"}
    response = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=60)
    *deltas, done = [json.loads(line[6:]) for line in response.text.split("\n") if line]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    data = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    assert data[44 if form == "wav" else 0 :] == spoken
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["output_tokens"] > 0


def test_curl(server, expected, tmp_path):
    body = json.dumps({"messages": CHAT, "modalities": ["text"]})
    command = ["curl", "-sf", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert answer["choices"][0]["message"]["content"] == expected.text


def test_bodies_of_vllm_omnis_client(server, expected):
    """As its benchmark sends them (0.30): fields that mean nothing here, a list of parts, more tokens than fit."""
    captured = {
        "model": "voice",
        "messages": [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}],
        "temperature": 0.0,
        "max_tokens": 2048,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_stage_metrics": True,
        "ref_audio": "data:audio/wav;base64,UklGRqQMAABXQVZFZm10IBAAAAABAAEAgD4A",
        "ref_text": "reference text 0",
        "task_type": "Base",
        "language": "English",
        "max_new_tokens": 2048,
        "modalities": ["text", "audio"],
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=captured, timeout=60)
    text = "".join(c["choices"][0]["delta"]["content"] for c in events(response) if c.get("modality") == "text")
    assert text == expected.text
    speech = {"model": "voice", "input": TEXT, "stream": True, "stream_format": "audio", "response_format": "pcm"}
    extras = {key: captured[key] for key in ("ref_audio", "ref_text", "task_type", "language", "max_new_tokens")}
    response = httpx.post(f"{server.url}/v1/audio/speech", json=speech | extras | {"voice": "ethan"}, timeout=60)
    assert response.status_code == 200
    assert len(response.content) % 2 == 0
    assert response.content[:4] != b"RIFF"


@pytest.mark.parametrize(("stop", "text"), [("morning", "Good "), ([".", "ood mor"], "G"), (["nothing"], TEXT)])
def test_stop_cuts_text_and_ends_speech(server, expected, stop, text):
    answer = chat(server, stop=stop).json()["choices"][0]
    assert answer["message"]["content"] == text
    assert answer["finish_reason"] == "stop"
    frames = answer["audio_metadata"]["frame_count"]
    assert frames == len(expected.wave) if text == TEXT else frames > 0
    streamed = events(chat(server, stop=stop, stream=True, modalities=["text"]))
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in streamed) == text
    server.until(lambda: server.at_work == 0)


def test_max_tokens_and_seeds(server):
    cut = chat(server, max_completion_tokens=2, modalities=["text"]).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 2
    exact = chat(server, max_tokens=6, ignore_eos=True, modalities=["text"]).json()
    assert exact["usage"]["completion_tokens"] == 6
    warm = {"temperature": 5.0, "max_tokens": 12, "ignore_eos": True, "modalities": ["text"]}
    texts = [chat(server, seed=seed, **warm).json()["choices"][0]["message"]["content"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_of_each_stage(server):
    stages = [
        {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True},
        {"max_tokens": 5, "min_tokens": 5, "top_k": -1},
    ]
    answer = chat(server, sampling_params_list=stages).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == 4
    assert answer["choices"][0]["finish_reasons"] == {"text": "length", "audio": "length"}


def test_metrics_have_true_values(server, expected):
    before = {name: server.metric("omni_tokens_total", kind=name) for name in ("prompt", "text", "codec")}
    edge = server.metric("omni_handoff_bytes_total", edge="code2wav->client")
    done = server.metric("omni_requests_total", endpoint="chat", outcome="ok")
    steps = server.metric("omni_stage_tokens_total", replica="0", stage="talker")
    chat(server)
    frames = sum(chunk.frames for chunk in expected.chunks)
    made = {"prompt": expected.finished.prompt_tokens, "text": len(expected.text_ids), "codec": frames}
    after = {name: server.metric("omni_tokens_total", kind=name) for name in made}
    assert {name: after[name] - before[name] for name in made} == made
    assert server.metric("omni_requests_total", endpoint="chat", outcome="ok") == done + 1
    assert server.metric("omni_handoff_bytes_total", edge="code2wav->client") - edge >= expected.wave.nbytes
    assert server.metric("omni_stage_tokens_total", replica="0", stage="talker") - steps == frames
    assert server.metric("omni_requests_running") == server.metric("omni_requests_waiting") == 0
    assert server.metric("omni_audio_ttfp_seconds_count") >= 1
    assert server.metric("omni_ready") == 1


def test_a_profile_of_running_stages(server, tmp_path):
    server.service.limits.profile_dir = str(tmp_path)
    idle = httpx.post(f"{server.url}/stop_profile", timeout=60)
    assert idle.status_code == 409
    started = httpx.post(f"{server.url}/start_profile", json={"stages": ["talker"], "steps": 2}, timeout=60)
    assert started.json()["status"] == "started"
    assert httpx.post(f"{server.url}/start_profile", timeout=60).status_code == 409
    chat(server)
    (trace,) = httpx.post(f"{server.url}/stop_profile", timeout=60).json()
    assert (trace["stage"], trace["steps"], trace["error"]) == ("talker", 2, "")
    assert Path(trace["path"]).is_relative_to(tmp_path)
    assert Path(trace["path"]).stat().st_size == trace["bytes"] > 0
    unknown = httpx.post(f"{server.url}/start_profile", json={"stages": ["painter"]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "stages[0]")


def test_the_page_needs_nothing_from_elsewhere(server):
    page = httpx.get(server.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "v1/chat/completions" in page.text
    assert "://" not in page.text.replace("http://www.w3.org/", "")


def test_the_command(tmp_path, voice):
    """A process of its own: 503 while it starts, then answers, ends on SIGTERM after the requests at work."""
    command = [sys.executable, "-m", "omni_lab.serve", "experiments/async_output.yaml", "--port", "0"]
    for setting in (f"model.checkpoint={voice}", EAGER, *QUICK):
        command += ["--set", setting]
    root = Path(__file__).parents[1]
    process = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr)
        url = next(word for line in lines for word in line.replace(",", " ").split() if word.startswith("http"))
        while not next(lines).startswith("ready"):
            pass
        assert httpx.get(f"{url}/health").json() == {"status": "healthy"}
        answers: list[httpx.Response] = []
        body = {"messages": CHAT, "stream": True}
        asked = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60))
        )
        asked.start()
        while "omni_requests_running 1.0" not in httpx.get(f"{url}/metrics").text:
            assert asked.is_alive()
        process.terminate()
        asked.join()
        assert events(answers[0])[-1]["choices"][0]["finish_reason"] == "stop"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_command_names_what_is_wrong(capsys, tmp_path):
    from omni_lab.serve import main

    assert main([str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    file = tmp_path / "wrong.yaml"
    file.write_text("name: x\nserver: {max_queues: 3}\n")
    assert main([str(file)]) == 2
    assert "server.max_queues: unknown key; did you mean 'max_queue'?" in capsys.readouterr().err
    file.write_text("name: x\nserver: {media_dir: nowhere}\n")
    assert main([str(file)]) == 2
    assert f"{tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert main(["experiments/ladder.yaml"]) == 2
    assert "sweep: expected one configuration" in capsys.readouterr().err
