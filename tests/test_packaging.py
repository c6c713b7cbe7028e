"""pyproject.toml, environment.yml and constraints.txt agree, and what is installed is what the package needs."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
DECLARED = REQUIRED + [Requirement(line) for extra in EXTRAS.values() for line in extra if "omni-lab" not in line]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
NAMES = {"PIL": "pillow", "hibari": "hibari-tts", "pydantic_core": "pydantic", "yaml": "pyyaml"}
"""Requirements by the module that they bring, where the two names differ."""


def pinned() -> dict[str, Version]:
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in PINS}


def test_the_named_packages_are_declared():
    named = {"torch", "transformers", "plotly", "pandas", "soundfile"}
    assert named <= {requirement.name for requirement in REQUIRED}
    extras = {name: {Requirement(line).name for line in lines} for name, lines in EXTRAS.items()}
    assert set(extras) == {"dev", "distributed", "notebook", "quality", "train", "vllm"}
    assert {"jupyterlab", "ipywidgets", "torch-tb-profiler"} <= extras["notebook"]
    assert "vllm" in extras["vllm"]


def test_every_dependency_has_both_bounds_or_is_a_tool():
    tools = {Requirement(line).name for line in EXTRAS["dev"]}
    for requirement in DECLARED:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, f"{requirement}: no lower bound"
        assert "<" in operators or requirement.name in tools, f"{requirement}: no upper bound"


def test_the_conda_environment_installs_from_pyproject_alone():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, lines = environment["dependencies"]
    assert pip == "pip"
    assert python.startswith("python=")
    assert Version(python.removeprefix("python=")) in Requirement(f"python{PROJECT['requires-python']}").specifier
    constraint, editable = lines["pip"]
    assert constraint == "--constraint constraints.txt"
    wanted = Requirement(editable.replace("--editable .", "omni-lab"))
    assert wanted.extras == {"notebook", "quality", "dev"}


def test_pins_are_exact_and_satisfy_pyproject():
    pins = pinned()
    assert len(pins) == len(PINS)
    for pin in PINS:
        assert str(pin.specifier).startswith("=="), f"{pin}: constraints.txt pins exact versions"
        assert pins[canonicalize_name(pin.name)].local is None, f"{pin}: a local build is not to be had everywhere"
    for requirement in DECLARED:
        version = pins.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, f"{requirement}: pinned to {version}"
    for requirement in [*REQUIRED, *map(Requirement, EXTRAS["dev"])]:
        assert canonicalize_name(requirement.name) in pins, f"{requirement}: not pinned in constraints.txt"


def test_what_the_pinned_packages_need_is_pinned_too():
    """But for torch: which CUDA packages it brings depends on its build, and it pins them itself."""
    pins = pinned()
    for name in pins.keys() - {"torch"}:
        for line in importlib.metadata.requires(name) or []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                version = pins.get(canonicalize_name(need.name))
                assert version is not None, f"{name} needs {need}: not pinned in constraints.txt"
                assert version in need.specifier, f"{name} needs {need}: pinned to {version}"


def test_every_import_is_declared():
    declared = {canonicalize_name(requirement.name) for requirement in DECLARED}
    for file in sorted((ROOT / "omni_lab").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"omni_lab"}:
                name = canonicalize_name(NAMES.get(module, module))
                assert name in declared, f"{file.relative_to(ROOT)} imports {module}: not in pyproject.toml"


def test_a_wheel_has_all_files_of_the_package(tmp_path: Path):
    ignore = shutil.ignore_patterns("__pycache__", "nano", ".nano-*")
    shutil.copytree(ROOT / "omni_lab", tmp_path / "omni_lab", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", "dist", "."], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("omni_lab/")}
    source = {file.relative_to(tmp_path).as_posix() for file in (tmp_path / "omni_lab").rglob("*") if file.is_file()}
    assert source - packed == set()


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_make_names_the_pythons_it_can_use(python: str, tmp_path: Path):
    command = ["make", "lint", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python 3.11, 3.12 or 3.13" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_every_target_of_make_has_a_rule():
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    named = {name for line in lines if line.startswith(".PHONY:") for name in line.split()[1:]}
    assert named and named <= {line.split(":")[0] for line in lines if ":" in line and "export" not in line}


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8").splitlines()
