"""Checkpoints that come with the package: `voice` is committed, `nano` is built on first use."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omni_lab.core import PipelineError
from omni_lab.zoo.nano_config import VERSION

CHECKPOINTS = Path(__file__).parent / "checkpoints"


def names() -> list[str]:
    """The embedded checkpoints."""
    return ["nano", "voice"]


def path(name: str) -> Path:
    """Directory of an embedded checkpoint, built first if it must be. Raises PipelineError for an unknown name."""
    if name not in names():
        raise PipelineError(f"checkpoint {name!r} is unknown; embedded checkpoints are: {', '.join(names())}")
    directory = CHECKPOINTS / name
    if name == "nano":
        _build_nano(directory)
    return directory


def resolve(name_or_path: str | Path) -> Path:
    """Directory of a checkpoint given by an embedded name or as any directory in the layout of Qwen3-Omni."""
    if str(name_or_path) in names():
        return path(str(name_or_path))
    directory = Path(name_or_path).expanduser()
    if not directory.is_dir():
        raise PipelineError(
            f"checkpoint {str(name_or_path)!r} is no directory and no embedded one; those are: {', '.join(names())}"
        )
    if not (directory / "config.json").is_file():
        raise PipelineError(f"checkpoint {directory} has no config.json; give a directory as save_pretrained writes it")
    return directory


def bundled_set() -> Path:
    """The workload that comes with the package: 255 sentences that `voice` can say, in Seed-TTS form."""
    return Path(__file__).parent / "repertoire.lst"


def _build_nano(target: Path) -> None:
    """Build beside `target` and rename, so that a reader sees a whole checkpoint or none; builders take turns."""
    stamp = target / "VERSION"
    if _reads(stamp, VERSION):
        return
    with turn(target.parent):
        if _reads(stamp, VERSION):
            return
        for left_over in target.parent.glob(".nano-*"):  # of builds that were killed
            shutil.rmtree(left_over)
        print(f"building the checkpoint nano in {target}, once", file=sys.stderr)
        from omni_lab.zoo import nano  # imports transformers' model classes: seconds

        scratch = Path(tempfile.mkdtemp(prefix=".nano-", dir=target.parent))
        nano.build(scratch)
        (scratch / "VERSION").write_text(VERSION, encoding="utf-8")
        scratch.chmod(0o755)
        (scratch / "model.safetensors").chmod(0o644)
        if target.exists():
            target.rename(target.parent / f"{scratch.name}-old")
        scratch.rename(target)
        shutil.rmtree(target.parent / f"{scratch.name}-old", ignore_errors=True)


@contextmanager
def turn(directory: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on a directory; the system frees it when the process ends, however it ends.

    Raises BlockingIOError if somebody else holds it and there shall be no `wait`.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _reads(file: Path, content: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == content
