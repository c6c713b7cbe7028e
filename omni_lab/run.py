"""`python -m omni_lab.run EXPERIMENT.yaml`: runs an experiment, writes its run directory, prints its table."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn


def _leave(*_: object) -> NoReturn:
    sys.exit(130)


if __name__ == "__main__":  # Ctrl-C during the imports, before there is anything to keep
    signal.signal(signal.SIGINT, _leave)

import yaml  # noqa: E402
from tqdm import tqdm  # noqa: E402

from omni_lab.command import DONE, FAILED, INTERRUPTED, WRONG, Parser  # noqa: E402
from omni_lab.experiment import Experiment, ExperimentError, load_configurations, twins  # noqa: E402

if TYPE_CHECKING:  # what computes is imported once the experiment is known to be right
    from omni_lab.results import RunDirectory
    from omni_lab.workload.job import Job
    from omni_lab.workload.open_target import Open


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status."""
    return execute(parser("omni_lab.run", __doc__).parse_args(argv))


def execute(options: argparse.Namespace, open_target: Open | None = None) -> int:
    """Runs the experiment that the options of `parser` name; the exit status.

    `open_target` gives what all configurations are measured on; None: what each of them names.
    """
    try:
        experiment, configurations = load_configurations(options.experiment, options.set)
        if options.resume and options.out is None:
            raise ExperimentError("--resume: expected --out DIR beside it, the directory of the run to go on with")
        from omni_lab.workload.job import new_run_path, plan_job

        job = plan_job(experiment, configurations)
        for line in twins(configurations):
            print(line, file=sys.stderr)
        if options.dry_run:
            print(_description(job))
            if open_target is None:
                print(*_servers(configurations), sep="\n")
            return DONE
        directory = job.open(options.out or new_run_path(experiment.name), options.resume)
    except ExperimentError as error:
        print(error, file=sys.stderr)
        return WRONG
    except (OSError, ValueError, RuntimeError, RecursionError) as error:  # of a file or path that is no such thing
        cause = " ".join(str(error).split()) or type(error).__name__
        print(f"{options.experiment}: an input or the output directory cannot be used: {cause[:300]}", file=sys.stderr)
        return WRONG
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _execute(directory, job, options.quiet, open_target)
    except KeyboardInterrupt:
        done = f"{len(directory.finished)} of {len(job.units)} cells are finished"
        print(f"interrupted: {done}; go on with --out {directory.path} --resume", file=sys.stderr)
        print(directory.path)
        return INTERRUPTED
    except Exception as error:  # a bug or a full disk: where the finished cells are matters as much as the cause
        traceback.print_exc()
        print(f"failed: {error!r}; what was measured is in {directory.path}", file=sys.stderr)
        return FAILED


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A command that runs an experiment, with the options of all such commands."""
    parser = Parser(prog=program, description=description)
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="dotted key and YAML value, laid over the file"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="the run's directory (default: results/<name>/<time>)")
    parser.add_argument("--dry-run", action="store_true", help="print the experiment and its cells, run nothing")
    parser.add_argument("--resume", action="store_true", help="go on with the cells that DIR lacks")
    parser.add_argument("--quiet", action="store_true", help="no progress bars, no times of starts")
    return parser


def _description(job: Job) -> str:
    """What would run: the effective experiment, or that of each rung, and the cells in their order."""
    lines = []
    for one in job.configurations if job.experiment.sweep else [job.experiment]:
        data = job.datasets[one.name]
        lines.append(yaml.safe_dump(one.model_dump(mode="json"), sort_keys=False, allow_unicode=True).rstrip())
        lines.append(f"# {len(data.prompts)} prompts in {data.path.name}, {data.skipped} lines skipped\n")
    lines.append(f"{len(job.units)} cells, in this order:")
    for unit in job.units:
        load = "open loop" if unit.concurrency is None else f"concurrency {unit.concurrency}"
        lines.append(f"  {unit.configuration.name}, {load}, repeat {unit.repeat}: {unit.requests} requests")
    return "\n".join(lines)


def _servers(configurations: list[Experiment]) -> list[str]:
    """How the servers would be started, one after the other."""
    from omni_lab.peers import own_server, vllm_omni

    described = {"server": own_server.described, "vllm-omni": vllm_omni.described}
    servers = [one for one in configurations if one.target != "pipeline"]
    return [f"\n# the server of {one.name}\n{described[one.target](one, Path('servers'))}" for one in servers]


def _execute(directory: RunDirectory, job: Job, quiet: bool, open_target: Open | None) -> int:
    """Runs what the directory lacks, prints the table; the exit status."""
    from omni_lab.core import PipelineError
    from omni_lab.metrics.table import cell_table, ratio_table, start_lines
    from omni_lab.views.trust import not_in_effect

    for line in job.skipped():
        print(line, file=sys.stderr)
    failure = None
    try:
        asyncio.run(job.execute(directory, _bars(quiet), open_target))
    except PipelineError as error:
        failure = error
    cells = directory.record["cells"]
    starts = [] if quiet else start_lines(directory.record["configurations"])
    for line in (*starts, *not_in_effect(directory.record)):
        print(line, file=sys.stderr)
    if cells:
        print(cell_table(cells))
        if len(job.configurations) > 1:
            print(f"\nrelative to {cells[0]['configuration']}\n{ratio_table(cells)}")
    if failure:
        print(f"failed: {failure}; what was measured is in {directory.path}", file=sys.stderr)
    print(directory.path)
    return FAILED if failure else DONE


def _bars(quiet: bool) -> Callable[[str, int], object]:
    @contextmanager
    def bar(title: str, total: int) -> Iterator[Callable[[], object]]:
        with tqdm(total=total, desc=title, disable=quiet, file=sys.stderr, leave=True, dynamic_ncols=True) as shown:
            yield shown.update

    return bar


if __name__ == "__main__":
    sys.exit(main())
