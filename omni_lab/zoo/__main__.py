"""`python -m omni_lab.zoo`: list the embedded checkpoints; `python -m omni_lab.zoo path NAME`: print one directory."""

from __future__ import annotations

import argparse
import sys

from omni_lab import zoo
from omni_lab.core import PipelineError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m omni_lab.zoo", description="Checkpoints that come with omni_lab.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("path", help="print the directory of one checkpoint").add_argument("name")
    options = parser.parse_args(arguments)
    try:
        if options.command == "path":
            print(zoo.path(options.name))
        else:
            for name in zoo.names():
                print(f"{name:8}{zoo.path(name)}")
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
