"""A JupyterLab of its own on a copy of the notebooks, and a real browser that looks at it and keeps a diary."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build" / "browser"
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

START_S, WAIT_S = 120, 120
"""How long the server may take to start, and anything on a page to happen; nobody waits longer than it takes."""


@dataclass
class Diary:
    """What a page complained about, and the addresses outside `home` that it asked for."""

    home: str
    errors: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def follow(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: self._asked(request.url))

    def _asked(self, address: str) -> None:
        if not address.startswith((self.home, "blob:", "data:")):
            self.outside.append(address)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a JupyterLab with the options of `make lab`, on a copy of the notebooks, without anyone's settings."""
    scratch = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", scratch / "notebooks")
    (scratch / "experiments").symlink_to(ROOT / "experiments")
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    announcements = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (scratch / "config" / "labconfig").mkdir(parents=True)
    (scratch / "config" / "labconfig" / "page_config.json").write_text(json.dumps(announcements))
    options = [
        "--LabApp.expose_app_in_browser=True",
        "--IdentityProvider.token=",
        "--ServerApp.port=0",
        "--ServerApp.open_browser=False",
        "--allow-root",
    ]
    with (scratch / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options, "notebooks"],
            cwd=scratch,
            env=os.environ | {name: str(scratch / place) for name, place in places.items()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _address(scratch / "runtime", server, scratch / "log")
    finally:
        server.terminate()
        server.wait(30)


def _address(runtime: Path, server: subprocess.Popen, log: Path) -> str:
    """What the server writes down once it listens. Fails with its log if it does not."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(file.read_text())["url"]
            except (ValueError, KeyError):
                pass  # half written
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start within {START_S} s:\n{log.read_text()}")


@pytest.fixture(scope="module")  # its loop stays on this thread while it is open
def browser() -> Iterator[Browser]:
    """A browser of the machine, for which no other machine has a name. Skips where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser on PATH: none of {', '.join(PROGRAMS)} (Debian: apt install chromium)")
    expect.set_options(timeout=1000 * WAIT_S)
    alone = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[alone])
        yield browser
        browser.close()


@pytest.fixture
def diary(lab: str) -> Diary:
    """What happens on the page of a test."""
    return Diary(lab)


@pytest.fixture
def page(browser: Browser, lab: str, diary: Diary) -> Iterator[Page]:
    """An empty page whose addresses are the server's."""
    page = browser.new_page(viewport={"width": 1440, "height": 1000}, base_url=lab)
    page.set_default_timeout(1000 * WAIT_S)
    diary.follow(page)
    yield page
    page.close()
