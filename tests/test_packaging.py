"""The wheel and the source archive: built as an installer builds them, looked into, installed and used."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGES = ("hf_hyperattn", "model_patches", "hub_cards")
CHECKOUT_ONLY = ("recipes", "benchmarks", "tests", "docs", ".ci")
FILES = set("Makefile README.md LICENSE CHANGELOG.md CITATION.cff CONTRIBUTING.md constraints.txt".split())
LEFT_BEHIND = ".git .venv build dist outputs *.egg-info __pycache__ .*_cache .hypothesis".split()
BUILD = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path) -> Path:
    """What setuptools builds of a source tree, by the calls that pip makes."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


def files_in(folder: Path, root: Path) -> set[str]:
    paths = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(root).as_posix() for p in paths}


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, because a build writes beside the sources."""
    copy = tmp_path_factory.mktemp("tree") / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND), symlinks=True)
    return copy


@pytest.fixture(scope="module")
def archive(tree, tmp_path_factory):
    """The unpacked source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", tree, folder)) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (inner,) = (folder / "unpacked").iterdir()
    return inner


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    """The wheel built from the source archive, as `pip install` of one does it."""
    return build("wheel", archive, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder with the wheel installed into it, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--quiet", "--target", str(folder), str(wheel)], check=True)
    return folder


def use(site: Path, code: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(site)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_packages_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"hf_hyperattn_autoload.py", "hyperattn_cli.py"}.union(*(files_in(ROOT / p, ROOT) for p in PACKAGES))
    assert held == expected


def test_source_archive_holds_what_is_run_from_a_checkout(archive, tree):
    held = files_in(archive, archive)
    assert FILES <= held
    for folder in (*PACKAGES, *CHECKOUT_ONLY):
        assert files_in(tree / folder, tree) <= held, folder
    assert not [name for name in held if name.endswith((".pyc", ".so"))]


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        entries = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    for line in ("Name: hf-hyperattn", "License-Expression: Apache-2.0", "Requires-Python: >=3.10"):
        assert line in metadata.splitlines()
    extras = {line.split()[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")}
    assert extras == {"cpu", "plots", "experiments", "recipes", "demo", "test", "roads", "typing", "dev"}
    assert "hyperattn = hyperattn_cli:main" in entries
    assert "torch.backends" not in entries  # what fails there makes `import torch` fail


@pytest.mark.slow
def test_the_installed_wheel_works(site):
    code = """
import hf_hyperattn, hub_cards, model_patches, torch
from importlib.metadata import version
for module in (hf_hyperattn, hub_cards, model_patches):
    print(module.__file__)
print(version("hf-hyperattn") == hf_hyperattn.__version__)
from transformers import AutoModelForCausalLM, LlamaConfig
size = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(LlamaConfig(**size), attn_implementation="cone")
print(model(torch.arange(4)[None]).logits.isfinite().all().item())
from hub_cards import render
"""
    lines = use(site, code).splitlines()
    assert all(Path(line).is_relative_to(site) for line in lines[:3])
    assert lines[3:] == ["True", "True"]


@pytest.mark.slow
def test_the_installed_command_works(site):
    code = "import sys; sys.argv = ['hyperattn', '--version']; from hf_hyperattn.cli import main; main()"
    assert use(site, code).startswith("hyperattn 0.")
    assert (site / "bin" / "hyperattn").is_file() or (site / "Scripts").is_dir()


def pins_in(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


@pytest.fixture
def requirements():
    """Direct dependencies, those of extras too."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    return {canonicalize_name(r.name): r for r in map(Requirement, wanted) if r.name != "hf-hyperattn"}


def test_what_is_tested_is_allowed(requirements):
    pins = pins_in("constraints.txt")
    for name, requirement in requirements.items():
        assert name in pins, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins[name]), requirement


def test_the_lower_bounds_are_those_of_the_package(requirements):
    for name, pinned in pins_in("constraints-lowest.txt").items():
        (bound,) = (s.version for s in requirements[name].specifier if s.operator == ">=")
        assert name == "torch" or Version(pinned) == Version(bound), name
