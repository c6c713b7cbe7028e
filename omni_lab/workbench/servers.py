"""Servers in a notebook: ours, started here, or any that is running, measured with the workload of an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from omni_lab.experiment import Experiment, load_configurations, load_experiment
from omni_lab.frames import Run
from omni_lab.peers import own_server
from omni_lab.workbench.loop import background
from omni_lab.workbench.runs import ROOT, RunJob, watch
from omni_lab.workload.http_client import connect
from omni_lab.workload.open_target import Progress
from omni_lab.workload.target import Target
from omni_lab.workload.wire import Shape


@contextmanager
def serving(name: str, settings: Iterable[str] = (), url: str | None = None) -> Iterator[str]:
    """The address of a server: `url` if there is one already, else ours, which serves the experiment in this block.

    `settings` are laid over experiments/<name>.yaml like the command's `--set`. Our server runs in processes of its
    own, as `python -m omni_lab.serve` starts it, and is stopped at the end. Raises ExperimentError for a wrong
    experiment and PipelineError, with the end of the server's log, if it cannot start.
    """
    if url is not None:
        yield url
        return
    experiment = load_experiment(ROOT / "experiments" / f"{name}.yaml", list(settings))
    with TemporaryDirectory() as folder:
        server = own_server.prepare(experiment, Path(folder))
        running = server.running()
        start = background().submit(running.__aenter__())
        try:
            start.result()
            yield server.url
        finally:
            if not start.cancel():
                background().submit(running.__aexit__(None, None, None)).result()


def attach(
    url: str,
    name: str,
    settings: Iterable[str] = (),
    api_key: str | None = None,
    model: str | None = None,
    shape: Shape = "omni",
) -> Run:
    """Measures a server that is running, as `python -m omni_lab.bench` does; the run, whose cells are called `name`.

    The prompts, loads and lengths are those of experiments/<name>.yaml with `settings` laid over it; what the server
    does with them is its own affair. `shape`: whose requests to send, vLLM-Omni's or OpenAI's. Shows a bar; an
    interrupt keeps what is finished. Raises ExperimentError for a wrong experiment and PipelineError if nobody answers.
    """

    def open_target(experiment: Experiment, progress: Progress, folder: Path) -> AbstractAsyncContextManager[Target]:
        return connect(url, api_key, model, shape)

    found = load_configurations(ROOT / "experiments" / f"{name}.yaml", list(settings))
    return watch(RunJob(*found, open_target=open_target))
