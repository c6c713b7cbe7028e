"""Figures as files: what a picture holds, that nothing is fetched for it, and the README's pictures anew."""

from __future__ import annotations

import io
import re
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import kaleido
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from choreographer.browsers import Chromium
from PIL import Image

from omni_lab import load
from omni_lab.command import FAILED, WRONG
from omni_lab.views import buffers, export, theme
from omni_lab.views.request import audio_arrivals

ROOT = Path(__file__).parents[1]
LADDER = ROOT / "results" / "reference" / "ladder"
PICTURE_BYTES = 150_000

draws = pytest.mark.skipif(
    Chromium.find_browser(skip_local=False) is None, reason="no Chromium or Chrome (Debian: apt install chromium)"
)


def small_figure() -> go.Figure:
    return go.Figure(go.Scatter(x=[1, 2], y=[1, 4]), {"title": {"text": "Growth $x^2$"}, "height": 240})


@draws
@pytest.mark.parametrize("dark", [False, True])
def test_a_png_has_the_size_and_the_paper_that_were_asked_for(dark: bool, tmp_path: Path):
    path = export.save(small_figure(), tmp_path / "new" / "figure.png", dark, width=300, scale=1.5)
    picture = Image.open(path)
    assert picture.size == (450, 360)
    paper = theme.template(dark).layout.paper_bgcolor
    assert picture.convert("RGB").getpixel((2, 2)) == tuple(bytes.fromhex(paper.removeprefix("#")))


@draws
def test_an_svg_is_complete_in_itself(tmp_path: Path):
    figure = small_figure()
    drawn = export.save(figure, tmp_path / "figure.svg").read_text("utf-8")
    assert drawn.startswith("<svg")
    assert "Growth $x^2$" in drawn
    assert set(re.findall(r"https?://[\w.]+", drawn)) <= {"http://www.w3.org"}
    assert figure == small_figure()


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP proxy that answers nothing: its address, and what it was asked for."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    asked.append(client.recv(4096).partition(b"\r\n")[0])

        threading.Thread(target=listen, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)


@draws
def test_no_script_is_fetched(proxy: tuple[str, list[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    address, asked = proxy
    monkeypatch.setenv("CHOREO_PROXY_SERVER", address)
    export.save(small_figure(), tmp_path / "figure.svg")
    assert [line for line in asked if b"cdn" in line or b"plot" in line] == []
    kaleido.calc_fig_sync(small_figure(), opts={"format": "svg"})
    assert any(b"cdn" in line for line in asked), "this proxy would not have seen it"


def test_what_is_missing_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"figure\.bmp: no picture format.*\.png, \.svg"):
        export.save(small_figure(), tmp_path / "figure.bmp")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match=r"none was found: install one .*apt install chromium"):
        export.save(small_figure(), tmp_path / "figure.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["steps"], "at concurrency 1, 16, 64: name one with --concurrency"),
        (["ladder", "--configurations", "batch,rampe"], "no configuration rampe; it has batch, cuda_graph"),
        (["ladder", "--concurrency", "5"], "no concurrency 5; it has 1, 16, 64"),
        (["loads", "--metric", "speed"], "--metric speed: this figure can show "),
        (["causes", "--stage", "vocoder"], "nothing for the figure causes"),
    ],
)
def test_the_command_names_what_it_was_not_given(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    figure, *options = arguments
    assert export.main([str(LADDER), figure, "never.png", *options]) == WRONG
    assert words in capsys.readouterr().err
    assert not Path("never.png").exists()


def test_the_command_fails_without_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nothing"))
    assert export.main([str(LADDER), "ladder", str(tmp_path / "ladder.png")]) == FAILED
    assert "apt install chromium" in capsys.readouterr().err


@draws
def test_the_command_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "ladder.svg").mkdir()
    assert export.main([str(LADDER), "ladder", str(tmp_path / "ladder.svg")]) == WRONG
    assert "ladder.svg" in capsys.readouterr().err


def readme_pictures() -> list[tuple[str, list[str]]]:
    """Path of each picture in docs/pictures that the README shows, and the arguments of the command that makes it."""
    text = (ROOT / "README.md").read_text("utf-8")
    commands = [shlex.split(line) for line in re.findall(r"-m omni_lab\.views\.export (.+)", text)]
    made = {words[2]: words for words in commands}
    return [(picture, made.get(picture, [])) for picture in re.findall(r"\((docs/pictures/[^)]+)\)", text)]


def test_the_readme_shows_three_small_pictures():
    pictures = [ROOT / picture for picture, _ in readme_pictures()]
    assert len(pictures) >= 3
    assert [path.name for path in pictures if path.stat().st_size > PICTURE_BYTES] == []
    assert {path.name for path in pictures} == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}


@draws
@pytest.mark.parametrize(("picture", "arguments"), readme_pictures())
def test_the_readme_says_how_its_pictures_are_made(picture: str, arguments: list[str], tmp_path: Path):
    assert arguments, f"README.md: no command beside {picture}"
    run, figure, _, *options = arguments
    again = tmp_path / Path(picture).name
    assert export.main([str(ROOT / run), figure, str(again), *options]) == 0
    kept, drawn = (Image.open(io.BytesIO(path.read_bytes())) for path in (ROOT / picture, again))
    assert kept.size == drawn.size
    shades = [np.asarray(image.convert("L").resize((96, 54)), float) for image in (kept, drawn)]
    assert np.abs(shades[0] - shades[1]).mean() < 8, f"{picture} shows something else; make it anew"


def test_a_typical_request_is_the_one_in_the_middle():
    rows = {
        "configuration": "a",
        "concurrency": 1,
        "audio_underrun_s": [0.3, 0.0, 0.0, 0.0],
        "audio_ttfp_ms": [1, 4, 3, 2],
    }
    requests = pd.DataFrame({"id": list("wxyz"), **rows})
    silent = requests.assign(configuration="b", audio_ttfp_ms=np.nan)
    assert buffers.typical(pd.concat([requests, silent]))["id"].tolist() == ["y"]
    assert buffers.typical(silent).empty
    assert buffers.typical(requests.drop(columns="audio_ttfp_ms")).empty


def test_each_listener_has_a_row_with_its_own_buffer():
    run = export.only(load(LADDER), ["async_chunk", "ramp"], 16)
    typical = buffers.typical(run.requests)
    assert typical["configuration"].tolist() == ["async_chunk", "ramp"]
    figure = buffers.buffers(typical)
    arrivals = [trace for trace in figure.data if trace.name == "chunk arrives"]
    assert [trace.yaxis for trace in arrivals] == ["y", "y2"]
    for trace, (_, request) in zip(arrivals, typical.iterrows(), strict=True):
        np.testing.assert_allclose(trace.x, audio_arrivals(request)[0])
    for place, (_, request) in enumerate(typical.iterrows(), 1):
        axis = "x" if place == 1 else f"x{place}"
        silent_ms = sum(span.x1 - span.x0 for span in figure.layout.shapes if span.xref == axis)
        assert silent_ms == pytest.approx(1000 * request["audio_underrun_s"], abs=1)
        assert str(request["configuration"]) in figure.layout.annotations[place - 1].text
    names = [trace.name for trace in figure.data if trace.showlegend]
    assert len(names) == len(set(names))
    assert not buffers.buffers(typical.iloc[:0]).data
