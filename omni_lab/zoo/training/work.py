"""The work folder of a training: which recipe began it, who uses it now, and what a stage needs to find in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omni_lab.core import PipelineError
from omni_lab.zoo import turn

VERSION = "seven books of spectrum, paces"
"""Another text whenever older work folders are of no more use."""

NEEDS = {
    "codes": ("features.npy",),
    "codec": ("codebooks.pt", "repertoire/0000.npz", "recordings/0000.npz"),
    "paces": ("codebooks.pt", "codec.pt"),
    "thinker": ("tokenizer", "repertoire/0000.npz", "sentences/0000.npz"),
    "talker": ("tokenizer", "codebooks.pt", "repertoire/0000.npz", "sentences/0000.npz"),
    "export": ("tokenizer", "codec.pt", "thinker.pt", "talker.pt"),
    "evaluate": ("voice", "codebooks.pt"),
}
"""What stages find of earlier ones."""


@contextmanager
def held(work: Path) -> Iterator[None]:
    """The folder for one run, made if it is not there.

    Raises PipelineError if it cannot be made, if another recipe began it, or while another run is in it.
    """
    with ExitStack() as stack:
        try:
            work.mkdir(parents=True, exist_ok=True)
            stack.enter_context(turn(work, wait=False))
        except BlockingIOError:
            raise PipelineError(f"--work: another run is in {work}; stop it or give another folder") from None
        except OSError as error:
            raise PipelineError(
                f"--work: {work} cannot be made ({error.strerror}); give a folder to write to"
            ) from None
        _stamp(work)
        yield


def check(work: Path, stage: str) -> None:
    """Raises PipelineError if something is missing that earlier stages make."""
    for name in NEEDS.get(stage, ()):
        if not (work / name).exists():
            raise PipelineError(f"stage {stage}: {work / name} is missing; run the stages before {stage} first")


def _stamp(work: Path) -> None:
    stamp = work / "VERSION"
    if not any(work.iterdir()):
        stamp.write_text(VERSION, encoding="utf-8")
    found = stamp.read_text(encoding="utf-8") if stamp.exists() else "no VERSION"
    if found != VERSION:
        raise PipelineError(
            f"--work: another recipe began {work} ({found}, expected {VERSION!r}); give an empty folder"
        )
