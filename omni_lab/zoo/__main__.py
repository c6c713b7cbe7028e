"""`python -m omni_lab.zoo`: list the embedded checkpoints, print the directory of one, or train the voice again."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from omni_lab import zoo
from omni_lab.core import PipelineError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m omni_lab.zoo", description="Checkpoints that come with omni_lab.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("path", help="print the directory of one checkpoint").add_argument("name")
    train = commands.add_parser("train", help="train the checkpoint `voice` again; see docs/voice.md")
    train.add_argument("name", choices=["voice"])
    train.add_argument("--work", type=Path, required=True, help="folder for data, states, curves and the checkpoint")
    train.add_argument("--hours", type=float, default=8.0, help="of computing in all, what is done already included")
    train.add_argument("--stages", help="only these, separated by commas, for all of the hours in one round")
    options = parser.parse_args(arguments)
    try:
        if options.command == "path":
            print(zoo.path(options.name))
        elif options.command == "train":
            _train(options.work, options.hours, options.stages)
        else:
            for name in zoo.names():
                print(f"{name:8}{zoo.path(name)}")
    except (PipelineError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _train(work: Path, hours: float, chosen: str | None) -> None:
    from omni_lab.zoo.training import recipe  # imports torch and the teacher: seconds

    stages = tuple(chosen.split(",")) if chosen else recipe.STAGES
    if unknown := set(stages) - set(recipe.STAGES):
        raise PipelineError(f"--stages: {', '.join(sorted(unknown))} is unknown; stages are {', '.join(recipe.STAGES)}")
    recipe.Recipe(work, hours, say=functools.partial(print, flush=True)).run(stages, (1.0,) if chosen else None)


if __name__ == "__main__":
    sys.exit(main())
