"""Every notebook is thin, kept without outputs, and runs on the reference results without a word of complaint."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

DIRECTORY = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(DIRECTORY.glob("*.ipynb"))
PAGE = Path(__file__).parents[1] / "docs" / "workbench.md"

CELL_LINES, NOTEBOOK_LINES = 12, 120
"""Lines of code in a cell and in a notebook, at most; what needs more belongs into the package."""

KEPT_BYTES, SHOWN_BYTES = 200_000, 5_000_000
"""Size of a notebook's file, and of what a run shows: outputs, and the state of widgets without their code."""

CODE = ("_esm", "_css", "bundle")
"""What the state of a widget calls its code; `bundle` is plotly's, once a page."""

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_the_notebooks_are_numbered_without_a_gap_and_described():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(12)]
    page = PAGE.read_text("utf-8")
    assert [path.name for path in NOTEBOOKS if path.stem not in page] == []


@every_notebook
def test_a_notebook_is_kept_as_it_should_be(path: Path):
    assert list(blemishes(nbformat.read(path, 4), path.stat().st_size)) == []


@every_notebook
def test_a_notebook_runs_on_the_reference_results(path: Path, tmp_path: Path):
    done = run(nbformat.read(path, 4), path.parent, tmp_path)
    assert list(complaints(done)) == []
    assert shown_bytes(done) < SHOWN_BYTES


def test_the_checks_see_what_is_wrong_with_a_notebook():
    cells = [new_code_cell("x = 1", execution_count=3), new_code_cell("\n".join(["x"] * 13))]
    found = list(blemishes(new_notebook(cells=cells), 300_000))
    assert len(found) == 6
    named = ("300000 bytes", "first cell", "MODE", "kernel", "cell 0: outputs", "cell 1: 13 lines")
    assert all(any(words in line for line in found) for words in named)


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import warnings; warnings.warn('worn out')", "UserWarning: worn out"),
        ("import sys; print('a word', file=sys.stderr)", "a word"),
        ("print('FutureWarning: soon')", "FutureWarning: soon"),
        ("1 / 0", "ZeroDivisionError"),
        ("MODE", None),
    ],
)
def test_the_run_sees_errors_and_warnings(code: str, complaint: str | None, tmp_path: Path):
    cells = [new_markdown_cell("# A question?"), new_code_cell("MODE = 'full'", metadata={"tags": ["parameters"]})]
    done = run(new_notebook(cells=[*cells, new_code_cell(code)]), tmp_path, tmp_path)
    found = list(complaints(done))
    assert found == [] if complaint is None else complaint in " ".join(found)
    if complaint is None:
        assert done.cells[-1].outputs[0].data["text/plain"] == "'reference'"


def blemishes(notebook: NotebookNode, size: int) -> Iterator[str]:
    """What is wrong with a notebook as it is kept, `size` bytes of it, in words."""
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if size > KEPT_BYTES:
        yield f"{size} bytes, more than {KEPT_BYTES}"
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        yield "the first cell is no text that says what the question is"
    if not re.match(r'MODE = "reference"', parameters(notebook)):
        yield 'no cell tagged "parameters" that begins with MODE = "reference"'
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "the kernel in the metadata is not python3, which every environment has"
    if (lines := sum(len(cell.source.splitlines()) for cell in code)) > NOTEBOOK_LINES:
        yield f"{lines} lines of code, more than {NOTEBOOK_LINES}"
    for place, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            yield f"cell {place}: outputs or a count; clear them before you keep the notebook"
        if cell.cell_type == "code" and (lines := len(cell.source.splitlines())) > CELL_LINES:
            yield f"cell {place}: {lines} lines, more than {CELL_LINES}"


def parameters(notebook: NotebookNode) -> str:
    """The code of the cell tagged `parameters`, empty if there is none."""
    tagged = (cell.source for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return next(tagged, "")


def run(notebook: NotebookNode, directory: Path, scratch: Path, mode: str = "reference") -> NotebookNode:
    """Runs all cells in `directory` with MODE set, by this interpreter and in an IPython without anyone's settings.

    An error ends the run; it is among the outputs.
    """
    spec = scratch / "kernels" / "omni_lab"
    spec.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "omni_lab", "language": "python"}))
    for place, cell in enumerate(notebook.cells):
        if "parameters" in cell.metadata.get("tags", []):
            notebook.cells.insert(place + 1, new_code_cell(f"MODE = {mode!r}"))
            break
    kernel = AsyncKernelManager(
        kernel_name="omni_lab", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(spec.parent)])
    )
    client = NotebookClient(notebook, km=kernel, timeout=120, resources={"metadata": {"path": str(directory)}})
    client.owns_km = True  # it ends the kernel that it started
    try:
        return client.execute(env={**os.environ, "IPYTHONDIR": str(scratch / "ipython")})
    except CellExecutionError:
        return notebook


def complaints(done: NotebookNode) -> Iterator[str]:
    """Errors, what was written to stderr, and warnings in any other text, each with the number of its cell."""
    for place, cell in enumerate(done.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                yield f"cell {place}: {output.ename}: {output.evalue}"
            elif output.get("name") == "stderr":
                yield f"cell {place}: {output.text}"
            else:
                text = output.get("text", "") or output.get("data", {}).get("text/plain", "")
                yield from (
                    f"cell {place}: {line}" for line in text.splitlines() if re.search(r"\bWarning\b|\w+Warning:", line)
                )


def shown_bytes(done: NotebookNode) -> int:
    """What a run shows, as JSON: outputs and the widgets' state, without the widgets' own code."""
    widgets = done.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    state = [{k: v for k, v in widget["state"].items() if k not in CODE} for widget in widgets.values()]
    buffers = [widget.get("buffers", []) for widget in widgets.values()]
    return len(json.dumps([cell.get("outputs", []) for cell in done.cells])) + len(json.dumps([state, buffers]))
