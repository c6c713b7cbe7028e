"""The HTTP client: what it sends, how it reads both wire shapes, what it says of broken answers, its own ceiling."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile

from omni_lab import bench
from omni_lab.core import PipelineError, Request, RequestError, Sampling
from omni_lab.experiment import load_experiment
from omni_lab.metrics.records import RequestRow
from omni_lab.metrics.request import request_figures
from omni_lab.run import main as run_main
from omni_lab.server.bodies import ChatBody
from omni_lab.workload import http_client
from omni_lab.workload.client import closed_loop
from omni_lab.workload.echo import ceilings
from omni_lab.workload.http_client import connect
from omni_lab.workload.wire import chat_body, decode_sound, read_answer, server_sent_events
from tests.pipelines import SMALL
from tests.serving import served

RATE = 24_000
MS = 1_000_000

EXPERIMENT = (
    SMALL
    + """\
stages: {thinker: {sampling: {max_tokens: 8}}, talker: {sampling: {temperature: 0.0, max_tokens: 13}}}
chunking: {initial_frames: 2, frames: 5, left_context: 5}
workload: {num_prompts: 3, concurrency: [2], warmup: 1, repeats: 1, output: {text_tokens: 8, codec_frames: 12}}
results: {save_audio: 3, save_tokens: true}
"""
)


def sound(frames: int, start: int = 0) -> np.ndarray:
    """Samples of so many codec frames as a decode gives them: all but the last 555."""
    samples = np.arange(start * 1920, (start + frames) * 1920 - (0 if start else 555))
    return (np.sin(samples / 30) * 8000).astype("<i2")


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def sse(*events: dict) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]


def omni_stream() -> list[bytes]:
    """As vLLM-Omni's server writes it: `modality`, a complete wav file in each audio chunk, usage as it grows."""

    def text(content: str, count: int) -> dict:
        usage = {"prompt_tokens": 17, "completion_tokens": count, "total_tokens": 17 + count}
        delta = {"content": content} | ({} if count else {"role": "assistant"})
        return {"id": "x", "modality": "text", "choices": [{"index": 0, "delta": delta}], "usage": usage}

    def audio(samples: np.ndarray, finish: str | None = None) -> dict:
        content = base64.b64encode(wav(samples)).decode()
        choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
        return {"id": "x", "modality": "audio", "choices": [choice], "usage": {"completion_tokens": 0}}

    last = {"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 3, "total_tokens": 20}}
    return sse(
        text("", 0),
        text("Good ", 1),
        audio(sound(4)),
        text("morning", 3),
        audio(sound(25, 4)),
        audio(sound(2, 29), "stop"),
        last,
    )


def openai_stream() -> list[bytes]:
    """OpenAI's: `delta.audio` with the transcript and raw PCM."""

    def chunk(finish: str | None = None, **audio: str) -> dict:
        delta = {"audio": {"id": "a"} | audio} if audio else {}
        return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    def data(samples: np.ndarray) -> str:
        return base64.b64encode(samples.tobytes()).decode()

    return sse(
        chunk(transcript=""),
        chunk(transcript="Good "),
        chunk(data=data(sound(4))),
        chunk(transcript="morning"),
        chunk(data=data(sound(25, 4))),
        chunk(data=data(sound(2, 29))),
        chunk(finish="stop"),
        {"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 3}},
    )


def read(parts: Sequence[bytes], keep_audio: bool = False) -> RequestRow:
    """The row of a stream whose parts arrive 10 ms apart, from 10 ms after the request."""
    row = RequestRow("r", 0, due_ns=0)
    read_answer(row, [(10 * MS * (index + 1), part) for index, part in enumerate(parts)], keep_audio)
    row.end_ns = 10 * MS * len(parts)
    return row


def test_omni_shape() -> None:
    row = read(omni_stream(), keep_audio=True)
    assert row.error is None and row.text == "Good morning" and row.prompt_tokens == 17
    assert row.text_tokens == [1, 2] and row.text_ns == [20 * MS, 40 * MS]
    assert row.audio_frames == [4, 25, 2] and row.audio_ns == [30 * MS, 50 * MS, 60 * MS]
    assert row.reasons == {"audio": "stop"}
    figures = request_figures(row, RATE)
    assert figures.audio_ttfp_ms == 30 and figures.ttft_ms == 20 and figures.itl_ms == [10, 10]
    expected = np.concatenate([sound(4), sound(25, 4), sound(2, 29)]) / 32768
    assert figures.audio_duration_s == len(expected) / RATE
    np.testing.assert_array_equal(np.concatenate(row.audio), expected.astype(np.float32))


def test_openai_shape() -> None:
    row, other = read(openai_stream(), keep_audio=True), read(omni_stream(), keep_audio=True)
    assert row.error is None and row.text == other.text and row.prompt_tokens == 17
    assert row.audio_frames == other.audio_frames and row.audio_samples == other.audio_samples
    np.testing.assert_array_equal(np.concatenate(row.audio), np.concatenate(other.audio))
    assert row.reasons == {"text": "stop"}


def test_a_header_alone_is_no_sound() -> None:
    """The first PCM byte counts, not a header, not an empty chunk."""
    header = {"modality": "audio", "choices": [{"delta": {"content": base64.b64encode(wav(sound(0)[:0])).decode()}}]}
    empty = {"modality": "audio", "choices": [{"delta": {"content": ""}}]}
    row = read([*sse(header, empty)[:-1], *omni_stream()])
    assert row.audio_ns == [50 * MS, 70 * MS, 80 * MS]


@pytest.mark.parametrize("stream", [omni_stream, openai_stream])
def test_events_do_not_depend_on_how_the_bytes_arrive(stream) -> None:
    whole = b": ping\r\n\r\n" + b"".join(stream()).replace(b"\n\n", b"\r\n\r\n")
    expected = [data for _, data in server_sent_events([(0, b"".join(stream()))])]
    draw = random.Random(1)
    for _ in range(20):
        cuts = sorted({0, len(whole), *(draw.randrange(len(whole)) for _ in range(draw.choice([1, 5, 40])))})
        reads = [(stop, whole[start:stop]) for start, stop in itertools.pairwise(cuts)]
        found = list(server_sent_events(reads))
        assert [data for _, data in found] == expected
        for time_ns, data in found:  # the read that brought the end of the event, which is its blank line
            assert time_ns == min(cut for cut in cuts if cut >= whole.index(data) + len(data) + 4)


def test_streamed_wav_has_one_header() -> None:
    """OpenAI's wav: a header without a length in the first chunk, raw samples in the others."""
    header = bytearray(wav(sound(1)[:0]))
    header[4:8] = header[40:44] = b"\xff\xff\xff\xff"
    np.testing.assert_array_equal(decode_sound(bytes(header) + sound(4).tobytes()), sound(4) / np.float32(32768))
    np.testing.assert_array_equal(decode_sound(sound(4).tobytes()), sound(4) / np.float32(32768))


def test_broken_answers() -> None:
    boom = {"error": {"message": "no live replica", "code": 500}}
    assert "no live replica" in read(sse(boom)).error
    assert read(omni_stream()[:3]).error.startswith("the stream ended without a finish reason or [DONE]; its end: '")
    assert read([b'{"detail": "no stream here"}']).error.endswith("""its end: '{"detail": "no stream here"}'""")
    assert read([]).error.endswith("its end: ''")
    assert "no chat chunk" in read([b"data: {\n\n"]).error
    assert "no chat chunk" in read(sse({"choices": ["x"]})).error
    assert "no chat chunk" in read(sse({"modality": "audio", "choices": [{"delta": {"content": "%"}}]})).error


def request(**changes) -> Request:
    sampling = {"thinker": Sampling(min_tokens=5, max_tokens=5), "talker": Sampling(0.9, 50, 0.8, 1.05, 7, 0, 99)}
    messages = [{"role": "user", "content": "Good morning."}]
    return Request(**({"id": "r-1", "messages": messages, "speaker": "ethan", "sampling": sampling} | changes))


def test_bodies_are_what_a_server_takes(tmp_path: Path) -> None:
    omni = json.loads(chat_body(request(return_codes=True), "nano", "omni"))
    assert omni["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    thinker, talker = omni["sampling_params_list"]
    assert thinker["ignore_eos"] and thinker["min_tokens"] == thinker["max_tokens"] == 5
    assert not talker["ignore_eos"]
    assert (talker["temperature"], talker["top_k"], talker["top_p"], talker["seed"]) == (0.9, 50, 0.8, 7)
    body = ChatBody.model_validate(omni)
    assert body.voice == "ethan" and body.return_token_ids and body.modalities == ["text", "audio"]
    openai = ChatBody.model_validate(json.loads(chat_body(request(), "nano", "openai")))
    assert openai.audio.voice == "ethan" and openai.max_completion_tokens == 5
    file = tmp_path / "a.wav"
    file.write_bytes(wav(sound(1)))
    part = {"type": "audio", "audio": str(file)}
    sent = json.loads(chat_body(request(messages=[{"role": "user", "content": [part]}]), "nano", "omni"))
    url = sent["messages"][0]["content"][0]["audio_url"]["url"]
    assert base64.b64decode(url.partition(";base64,")[2]) == file.read_bytes()
    with pytest.raises(RequestError, match=r"messages\.audio: cannot be read"):
        chat_body(request(messages=[{"role": "user", "content": [part | {"audio": "/nowhere.wav"}]}]), "nano", "omni")


@asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[str]:
    """A server on a real socket: the n-th request gets the n-th reply, and then the connection is closed."""
    left = list(replies)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert not left, "a request was not sent, or sent twice"


def reply(status: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode() + body


def test_every_failure_is_counted_once_and_says_why() -> None:
    """Nothing is sent a second time, and the error's body is kept."""
    whole = b"".join(omni_stream())

    async def load() -> list[RequestRow]:
        replies = (
            reply("200 OK", whole),
            reply("429 Too Many Requests", b'{"error": {"message": "the queue is full"}}'),
            reply("200 OK", whole[:900], len(whole)),  # cut off
            b"",  # closed without a word
        )
        async with answering(*replies) as url, connect(url, "secret", "nano") as target:
            sent = await closed_loop(target.send, [request() for _ in replies], 1)
            measured = await target.take_records()
            assert [(chunk.frames, chunk.final) for chunk in measured.chunks[:3]] == [
                (4, False),
                (25, False),
                (2, True),
            ]
            return sent.rows

    good, full, cut, closed = asyncio.run(load())
    assert good.error is None and good.text == "Good morning"
    assert full.error == 'HTTP 429: {"error": {"message": "the queue is full"}}'
    assert cut.error and cut.error.startswith("Response payload is not completed")
    assert closed.error == "Server disconnected"
    assert all(row.end_ns >= row.sent_ns > 0 for row in (good, full, cut, closed))


def test_answers_are_read_after_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests are in flight their bytes are only kept, unless there are too many of them."""
    whole = reply("200 OK", b"".join(omni_stream()))

    async def texts() -> tuple[str, str]:
        async with answering(whole) as url, connect(url, model="nano") as target:
            row = (await closed_loop(target.send, [request()], 1)).rows[0]
            before = row.text
            await target.take_records()
            return before, row.text

    assert asyncio.run(texts()) == ("", "Good morning")
    monkeypatch.setattr(http_client, "KEPT_BYTES", 1000)
    assert asyncio.run(texts()) == ("Good morning", "Good morning")


def test_connections_are_kept_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request takes the connection of the one before it, unless that has been idle: the server may be closing it."""
    monkeypatch.setattr(http_client, "IDLE_S", 0.3)
    whole = reply("200 OK", b"".join(omni_stream())).replace(b"Connection: close\r\n", b"")
    opened = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        with suppress(asyncio.IncompleteReadError):  # the client has gone
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                writer.write(whole)

    async def loads() -> list[int]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url, counts = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", []
        async with connect(url, model="nano") as target:
            for count in (3, 1):
                rows = (await closed_loop(target.send, [request()] * count, 1)).rows
                counts.append(opened)
                assert [row.error for row in rows] == [None] * count
                await asyncio.sleep(0.4)
        server.close()
        return counts

    assert asyncio.run(loads()) == [1, 2]


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_the_address_is_a_servers_with_or_without_v1(ending: str) -> None:
    async def run() -> str:
        async with connect(f"http://127.0.0.1:1{ending}", model="any") as target:
            return target.url

    assert asyncio.run(run()) == "http://127.0.0.1:1/v1/chat/completions"


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def ask() -> None:
        async with connect(url):
            pass

    with pytest.raises(PipelineError, match="nobody answers"):
        asyncio.run(ask())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> Path:
    path = tmp_path_factory.mktemp("bench") / "small.yaml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture(scope="module")
def url(file: Path) -> Iterator[str]:
    with served(load_experiment(file)) as running:
        yield running.url


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def in_process(file: Path) -> list[dict]:
    out = file.parent / "in_process"
    assert run_main([str(file), "--out", str(out), "--quiet"]) == 0
    return lines(out)


@pytest.mark.parametrize("shape", ["omni", "openai"])
def test_bench_gives_the_files_of_a_run(file: Path, url: str, in_process: list[dict], shape: str) -> None:
    """The same prompts get the same answers as in this process, and the same files tell of them."""
    out = file.parent / shape
    assert bench.main(["--base-url", url, str(file), "--out", str(out), "--quiet", "--shape", shape]) == 0
    record = json.loads((out / "run.json").read_text())
    cell = record["cells"][0]
    assert (cell["completed"], cell["failed"], cell["stages"]) == (3, 0, {})
    assert cell["mean_audio_ttfp_ms"] > 0 and cell["mean_audio_rtf"] > 0
    assert record["configurations"]["small"]["effective"]["server"] == url
    assert (out / "report.html").is_file()
    found = sorted(lines(out), key=lambda line: line["index"])
    expected = sorted(in_process, key=lambda line: line["index"])
    assert [line["prompt"] for line in found] == [line["prompt"] for line in expected]
    if shape == "openai":  # which cannot state the length of the speech
        assert all(line["error"] is None and line["audio_duration_s"] for line in found)
        return
    for name in ("text", "text_token_ids", "text_tokens", "prompt_tokens", "codec_frames", "audio_chunk_samples"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    for line, other in zip(found, expected, strict=True):
        ours, theirs = (
            soundfile.read(directory / "audio" / f"{line['id']}.flac")[0]
            for directory in (out, file.parent / "in_process")
        )
        np.testing.assert_allclose(ours, theirs, atol=2 / 32768)
        assert line["finish_reason"] == other["finish_reason"]


def test_target_server(file: Path, in_process: list[dict]) -> None:
    """A run that starts the server itself, as a process, and stops it."""
    out = file.parent / "served"
    options = ["--set", "target=server", "--set", "workload={num_prompts: 1, warmup: 0}", "--set", "executor=process"]
    assert run_main([str(file), *options, "--set", "connector=shared_memory", "--out", str(out), "--quiet"]) == 0
    assert [line["text_token_ids"] for line in lines(out)] == [in_process[0]["text_token_ids"]]
    effective = json.loads((out / "run.json").read_text())["configurations"]["small"]["effective"]
    assert effective["command"][1:3] == ["-m", "omni_lab.serve"]
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", int(effective["server"].rpartition(":")[2])))


def test_bench_says_what_is_wrong(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.main([str(file)])
    assert left.value.code == 2 and "--base-url" in capsys.readouterr().err
    gone = ["--base-url", "http://127.0.0.1:9", str(file), "--quiet"]
    assert bench.main([*gone, "--out", str(tmp_path / "a")]) == 1
    assert "http://127.0.0.1:9/v1/models: nobody answers" in capsys.readouterr().err
    assert bench.main([*gone, "--out", str(tmp_path / "b"), "--set", "profile.enabled=true"]) == 1
    assert "profile.enabled: expected false" in capsys.readouterr().err


def test_echo_measures_the_client_alone() -> None:
    first, second = ceilings([1, 3], 6)
    assert (first.concurrency, second.concurrency) == (1, 3)
    for one in (first, second):
        assert one.requests_per_s > 0 and one.busy_share > 0
        assert 0 < one.added_ms_median <= one.added_ms_p99
