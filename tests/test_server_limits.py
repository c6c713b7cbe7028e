"""What a server refuses, and that one client's trouble is not another's."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from pathlib import Path

import httpx
import pytest

from omni_lab.pipeline.wiring import End
from omni_lab.serve import listen
from omni_lab.server.app import build_app
from omni_lab.server.service import Service
from tests.pipelines import experiment
from tests.serving import Served, served

CHAT = [{"role": "user", "content": "hello"}]
LONG = [{"max_tokens": 4, "ignore_eos": True}, {"max_tokens": 400, "ignore_eos": True}]
"""Speech of 399 frames: 2 MB in a stream."""
SHORT = [{"max_tokens": 2, "ignore_eos": True}, {"max_tokens": 3, "ignore_eos": True}]
QUICK = ["executor=inline", "stages.talker.sampling.temperature=0.0"]
KEY = "a key"


def body(**fields) -> dict:
    return {"messages": CHAT, **fields}


@pytest.fixture(scope="module")
def server(nano):
    limits = "{max_concurrent: 2, max_queue: 1, queue_timeout_s: 1.0, max_body_mb: 1, slow_reader_s: 1.0}"
    with served(experiment(nano, *QUICK, f"server={limits}")) as running:
        yield running


def post(server: Served, **fields) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body(**fields), timeout=60)


@pytest.fixture
def streaming(server):
    """Starts a long answer; gives the response once its first part is there. Those left open are closed in the end."""
    client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))
    opened = []

    def start(**fields) -> httpx.Response:
        request = client.build_request(
            "POST", f"{server.url}/v1/chat/completions", json=body(stream=True, sampling_params_list=LONG, **fields)
        )
        response = client.send(request, stream=True)
        parts = response.iter_raw()
        opened.append((response, parts))  # the connection is closed with the iterator
        next(parts)
        return response

    yield start
    for response, _ in opened:
        response.close()
    client.close()
    server.until(lambda: server.at_work == 0)


def test_a_client_that_disconnects_ends_its_answer_in_every_stage(server, streaming):
    aborted = server.metric("omni_requests_total", endpoint="chat", outcome="aborted")
    response = streaming()
    assert server.at_work > 0
    response.close()
    server.until(lambda: server.at_work == 0 and not server.service.pipeline.requests)
    assert server.metric("omni_requests_total", endpoint="chat", outcome="aborted") == aborted + 1
    talked = server.metric("omni_stage_tokens_total", replica="0", stage="talker")
    assert server.metric("omni_stage_tokens_total", replica="0", stage="talker") == talked
    assert server.metric("omni_requests_running") == 0
    assert post(server, sampling_params_list=SHORT).status_code == 200


def test_so_does_one_that_gives_up_before_the_answer(server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body(sampling_params_list=LONG), timeout=0.3)
    server.until(lambda: server.service.admission.running == 0 and server.at_work == 0)


def test_a_full_server_refuses_at_once_and_a_queue_has_an_end(server, streaming):
    streaming()
    streaming()
    waited: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: waited.append(post(server)))
    waiting.start()
    server.until(lambda: server.service.admission.waiting == 1)
    assert server.metric("omni_requests_waiting") == 1
    assert server.metric("omni_requests_running") == 2
    refused = post(server)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    waiting.join()
    assert waited[0].status_code == 429
    assert "queue_timeout_s" in waited[0].json()["error"]["message"]


def test_a_client_that_leaves_the_queue_makes_room(server, streaming):
    first = streaming()
    streaming()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/chat/completions", json=body(), timeout=0.2)
    server.until(lambda: server.service.admission.waiting == 0)
    first.close()
    assert post(server, sampling_params_list=SHORT).status_code == 200


def test_a_client_that_does_not_read_is_cut_off_and_slows_no_one(server):
    content = json.dumps(body(stream=True, sampling_params_list=LONG)).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    aborted = server.metric("omni_requests_total", endpoint="chat", outcome="aborted")
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        deaf.sendall(head.encode() + content)
        server.until(lambda: server.service.admission.running == 1)
        assert post(server, sampling_params_list=SHORT).status_code == 200
        server.until(lambda: server.service.admission.running == 0 and server.at_work == 0)
        assert server.metric("omni_requests_total", endpoint="chat", outcome="aborted") == aborted + 1
        received = bytearray()
        deaf.settimeout(5)
        try:
            while part := deaf.recv(1 << 16):
                received += part
        except ConnectionResetError:
            pass
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_a_body_has_a_largest_size(server):
    padding = "x" * (1 << 20)
    url = f"{server.url}/v1/chat/completions"
    declared = httpx.post(url, json=body(user=padding))
    headers = {"Content-Type": "application/json"}
    chunked = httpx.post(url, content=iter([json.dumps(body(user=padding)).encode()]), headers=headers)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert response.json()["error"]["param"] == "body"


def test_a_body_has_to_arrive(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as slow:
        slow.settimeout(10)
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        slow.sendall(b'Connection: close\r\nContent-Length: 1000\r\n\r\n{"messages"')
        answer = b"".join(iter(lambda: slow.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"param":"body"' in answer


@pytest.fixture(scope="module")
def guarded(nano):
    limits = "{deadline_s: 0.4, cors_origins: ['https://page.example'], max_prompt_tokens: 24}"
    with served(experiment(nano, *QUICK, f"server={limits}"), KEY) as running:
        yield running


def test_a_key(guarded):
    url = f"{guarded.url}/v1/models"
    assert httpx.get(f"{guarded.url}/health").status_code == 200
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": KEY}, {"Authorization": "Bearer \xe9"}):
        refused = httpx.get(url, headers={name: value.encode("latin-1") for name, value in headers.items()})
        assert refused.status_code == 401
        assert refused.json()["error"]["param"] == "Authorization"
    assert httpx.get(url, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert httpx.post(f"{guarded.url}/v1/chat/completions", json=body()).status_code == 401
    assert httpx.get(f"{guarded.url}/metrics").status_code == 401


def test_a_deadline(guarded):
    client = httpx.Client(base_url=guarded.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    late = client.post("/v1/chat/completions", json=body(sampling_params_list=LONG))
    assert late.status_code == 504
    assert "deadline_s" in late.json()["error"]["message"]
    stream = client.post("/v1/chat/completions", json=body(sampling_params_list=LONG, stream=True))
    lines = [line for line in stream.text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["error"]["code"] == 504
    guarded.until(lambda: guarded.at_work == 0)


def test_a_longest_prompt(guarded):
    headers = {"Authorization": f"Bearer {KEY}"}
    for words in (40, 100_000):
        messages = [{"role": "user", "content": "word " * words}]
        refused = httpx.post(f"{guarded.url}/v1/chat/completions", json=body(messages=messages), headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"


def test_pages_of_other_origins(server, guarded):
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{guarded.url}/v1/chat/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in httpx.options(f"{server.url}/v1/models", headers=asked).headers
    other = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://page.example"})
    assert "access-control-allow-origin" not in other.headers


def test_503_before_the_stages_answer_and_after_one_is_gone(nano):
    async def run() -> None:
        service = Service(experiment(nano, *QUICK))
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def unready(cause: str) -> None:
                health = await client.get("/health")
                answer = await client.post("/v1/chat/completions", json=body())
                assert health.status_code == answer.status_code == 503
                assert cause in health.json()["reason"]
                assert cause in answer.json()["error"]["message"]
                assert answer.headers["retry-after"] == "1"

            await unready("starting")
            async with service.running():
                assert (await client.get("/health")).status_code == 200
                service.pipeline.executor.workers[1].turn = None  # the executor stops at its next round
                service.pipeline.executor.wake.set()
                while service.unready is None:
                    await asyncio.sleep(0.01)
                await unready("executor stopped")
                assert "omni_ready 0.0" in (await client.get("/metrics")).text

    asyncio.run(run())


def test_a_worker_that_is_killed_fails_its_answers_at_once_and_the_server_serves_again(nano):
    greedy = [{**one, "temperature": 0.0} for one in SHORT]
    settings = ("executor=process", "connector=shared_memory", *QUICK[1:])
    with served(experiment(nano, *settings)) as server:
        before = post(server, sampling_params_list=greedy).json()["choices"][0]["message"]
        question = body(stream=True, sampling_params_list=LONG)
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=question, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.service.pipeline.executor.processes[End("talker")].kill()
            *_, error, _, done, _ = lines
        told = json.loads(error.removeprefix("data: "))["error"]
        assert done == "data: [DONE]" and told["code"] == 500
        assert told["message"].startswith("stage talker, replica 0, request chatcmpl-") and "killed" in told["message"]

        refused = post(server)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert "stage talker has no worker" in refused.json()["error"]["message"]
        assert post(server, modalities=["text"]).status_code == 200
        server.until(lambda: httpx.get(f"{server.url}/health").status_code == 200, 60)
        assert (
            post(server, sampling_params_list=greedy).json()["choices"][0]["message"]["audio"]["data"]
            == (before["audio"]["data"])
        )


def test_what_is_at_work_at_the_end_is_told(nano: Path) -> None:
    """A server that is asked to end gives answers `drain_s`; then they end with an error, not in the middle."""
    with served(experiment(nano, *QUICK, "server.drain_s=0.2")) as ending:
        asked = body(stream=True, sampling_params_list=LONG)
        with httpx.stream("POST", f"{ending.url}/v1/chat/completions", json=asked, timeout=60) as response:
            parts = response.iter_lines()
            next(parts)
            ending.server.should_exit = True
            *_, error, done = (line for line in parts if line)
    assert done == "data: [DONE]" and json.loads(error.removeprefix("data: "))["error"]["message"]


def test_small_events_are_sent_at_once() -> None:
    """Nagle's algorithm would hold each back until the client has acknowledged the one before, 40 ms later."""
    with (
        listen("127.0.0.1", 0, slow_reader_s=1.0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
