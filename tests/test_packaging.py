"""The wheel and the source archive: built as an installer builds them, looked into, installed and used."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hf_hyperattn.engines import native
from hf_hyperattn.engines.score import TERMS

ROOT = Path(__file__).parents[1]
PACKAGES = ("hf_hyperattn", "hyperattn_cli", "model_patches", "hub_cards")
CHECKOUT_ONLY = ("scripts", "recipes", "benchmarks", "tests", "docs", ".ci", ".github")
FILES = set(
    "Makefile README.md LICENSE CHANGELOG.md CITATION.cff CONTRIBUTING.md SECURITY.md constraints.txt "
    "constraints-lowest.txt setup.py".split()
)
LEFT_BEHIND = ".git .venv build dist outputs *.egg-info __pycache__ .*_cache .hypothesis".split()
BUILD = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, target: Path, prebuilt: str = "0") -> Path:
    """What setuptools builds of a source tree, by the calls that pip makes."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(target)]
    environment = {**os.environ, "HF_HYPERATTN_PREBUILT": prebuilt}
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env=environment)
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
    place = (
        folder / "unpacked"
    )  # by tar itself: Python before 3.11.4 cannot be asked for safe members
    place.mkdir()
    subprocess.run(["tar", "xzf", str(build("sdist", tree, folder)), "-C", str(place)], check=True)
    (inner,) = place.iterdir()
    return inner


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    """The wheel built from the source archive, as `pip install` of one does it."""
    return build("wheel", archive, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder with the wheel installed into it, and nothing else."""
    return install(wheel, tmp_path_factory.mktemp("site"))


def install(wheel: Path, folder: Path) -> Path:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, "--quiet", "--target", str(folder), str(wheel)], check=True)
    return folder


def use(site: Path, code: str, **more: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | more
    environment["PYTHONPATH"] = str(site)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_packages_and_no_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {"hf_hyperattn_autoload.py"}.union(*(files_in(ROOT / p, ROOT) for p in PACKAGES))
    assert held == expected


def test_source_archive_holds_what_is_run_from_a_checkout(archive, tree):
    held = files_in(archive, archive)
    assert FILES <= held
    for folder in (*PACKAGES, *CHECKOUT_ONLY):
        assert files_in(tree / folder, tree) <= held, folder
    assert not [name for name in held if name.endswith((".pyc", ".so"))]


def test_notes_of_a_release():
    said = subprocess.run(
        [sys.executable, "scripts/release.py", "--notes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    section = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert said.stdout.strip() == section.partition("\n")[2].strip()


def test_workflows_call_make_targets():
    """The public CI runs what anybody runs: targets of the Makefile, and actions of GitHub alone."""
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(
        path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    )
    targets = re.findall(r"run: make ([a-z-]+)", text)
    assert {
        "lint",
        "types",
        "test",
        "test-repository",
        "test-lowest",
        "test-docs",
        "test-more",
        "docs",
        "release",
    } <= set(targets)
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert all(action.startswith("actions/") for action in re.findall(r"uses: (\S+)", text))
    assert not re.findall(r"https?://", text)


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        entries = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
        assert name.replace("METADATA", "licenses/LICENSE") in archive.namelist()
    for line in ("Name: hf-hyperattn", "License-Expression: Apache-2.0", "Requires-Python: >=3.10"):
        assert line in metadata.splitlines()
    extras = {
        line.split()[1] for line in metadata.splitlines() if line.startswith("Provides-Extra")
    }
    assert extras == {
        "cpu",
        "plots",
        "experiments",
        "recipes",
        "demo",
        "test",
        "roads",
        "tools",
        "typing",
        "docs",
        "dev",
    }
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


# The wheel that carries compiled kernels.

LEVELS = [name for name in native.LEVELS if name in native.read_levels()]
CROSS = "aarch64-linux-gnu-g++"
#: A level takes 40 s of one core. The oldest and the newest of this CPU are compiled; release.py compiles all.
BUILT = LEVELS[:1] + LEVELS[1:][-1:]
#: Of all scores only those that these tests use are compiled.
SCORES = ["umbral", "geodesic", "dot+*umbral_on_product"]
CARRIED = " ".join([*BUILT, *SCORES])


@pytest.fixture(scope="module")
def prebuilt_wheel(archive, tmp_path_factory):
    try:
        native.find_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    if "v2" not in LEVELS:
        pytest.skip("no x86-64 Linux")
    return build("wheel", archive, tmp_path_factory.mktemp("prebuilt"), CARRIED)


@pytest.fixture(scope="module")
def prebuilt_site(prebuilt_wheel, tmp_path_factory):
    return install(prebuilt_wheel, tmp_path_factory.mktemp("prebuilt_site"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_prebuilt_wheel_holds_kernels_and_the_plain_one_none(prebuilt_wheel, archive, tmp_path):
    assert (
        prebuilt_wheel.name.split("-")[2:4] == ["py3", "none"]
        and "manylinux_2_" in prebuilt_wheel.name
    )
    with zipfile.ZipFile(prebuilt_wheel) as held:
        names = {name for name in held.namelist() if ".dist-info/" not in name}
    files = ("manifest.json", *(f"{level}.so" for level in BUILT))
    kernels = {f"hf_hyperattn/engines/prebuilt/{name}" for name in files}
    expected = {"hf_hyperattn_autoload.py"}.union(*(files_in(ROOT / p, ROOT) for p in PACKAGES))
    assert names == expected | kernels
    plain = build("wheel", archive, tmp_path / "plain")  # from the same folder
    assert plain.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(plain) as held:
        assert not [name for name in held.namelist() if "prebuilt" in name]


#: What a process does that has no compiler. The cost of building is told apart by the second call.
WORK = """
import time, torch, hf_hyperattn as ha
from hf_hyperattn import functional as F
from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.mechanisms.sparse import Pages, Window
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
torch.set_num_threads(1)
q, k, v = torch.randn(3, 1, 2, 200, 24)
seconds = []
for _ in range(2):
    start = time.process_time()
    F.cone_attention(q, k, v, is_causal=True)
    seconds.append(time.process_time() - start)
assert seconds[0] - seconds[1] < 1, seconds

def near(a, b, tolerance):
    error, size = (a - b).detach().abs().max().item(), b.detach().abs().max().item()
    assert error <= tolerance * max(1.0, size), error

for call in (F.cone_attention, F.hyperbolic_attention):
    results = {}
    for backend, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        out = call(*leaves, is_causal=True, backend=backend)
        results[backend] = out, *torch.autograd.grad(out.cos().sum(), leaves)
    for a, b in zip(results["auto"], results["reference"]):
        near(a, b, 2e-4)
    near(call(q[:, :, -1:], k, v), call(q[:, :, -1:], k, v, backend="reference"), 2e-5)

how = {"is_causal": True, "rules": [Window(9), Pages(8, 2, 4, 5, query="previous")]}
near(F.sparse_attention(q, k, v, **how), F.sparse_attention(q, k, v, backend="reference", **how), 2e-5)

size = dict(vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
ids = torch.randint(16, (1, 300))
losses = {}
for backend in ("auto", "reference"):
    torch.manual_seed(1)
    model = ha.set_backend(ha.patch_model(LlamaForCausalLM(LlamaConfig(**size)), ha.ConeConfig()), backend)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(0.5) if name.endswith(".gate") else None
    step = torch.optim.SGD(model.parameters(), lr=0.1)
    losses[backend] = []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        step.zero_grad(), loss.backward(), step.step()
        losses[backend].append(loss.item())
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        losses[backend].append(model(ids[:, :1], past_key_values=cache).logits.square().mean().item())
near(*(torch.tensor(losses[b]) for b in ("auto", "reference")), 1e-4)

hierarchy = ha.Hierarchy.windows(200, (16, 64))
hsa_call = lambda b: F.hierarchical_attention(q, k, v, is_causal=True, hierarchy=hierarchy, tying="key", backend=b)
near(hsa_call("auto"), hsa_call("rows"), 2e-4)

carried = native.load_prebuilt()
assert carried.library is library.core() and library.TABLES
assert {loaded.library for loaded in library.TABLES.values()} == {carried.library}, library.TABLES.keys()
assert not native.build_directory().exists() and not native._logged
print(carried.level)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", ["1", *BUILT])
def test_the_prebuilt_wheel_computes_without_a_compiler(prebuilt_site, tmp_path, level):
    """Forward, a training step, decoding and key-tied attention, each on the compiled engine."""
    alone = {
        "CXX": "/nonexistent",
        "PATH": str(tmp_path),
        "HF_HYPERATTN_BUILD_DIR": str(tmp_path / "built"),
    }
    said = use(prebuilt_site, WORK, HF_HYPERATTN_NATIVE=level, **alone).split()
    assert said == [level] if level != "1" else said == BUILT[-1:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not shutil.which(CROSS), reason=f"needs {CROSS}")
def test_a_wheel_for_aarch64_is_made_by_a_cross_compiler_and_computes(
    archive, tmp_path, monkeypatch
):
    """Under emulation, where HF_HYPERATTN_AARCH64_PYTHON is a Python of AArch64 with what the package needs."""
    monkeypatch.setenv("CXX", CROSS)
    wheel = build("wheel", archive, tmp_path, " ".join(["armv8", *SCORES]))
    assert re.search(r"-py3-none-manylinux_2_\d+_aarch64\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as held:
        assert [Path(name).name for name in held.namelist() if name.endswith(".so")] == ["armv8.so"]
        held.extractall(tmp_path / "site")
    python = os.environ.get("HF_HYPERATTN_AARCH64_PYTHON")
    if not python:
        pytest.skip("built; not used: HF_HYPERATTN_AARCH64_PYTHON names no Python of AArch64")
    environment = {
        "PYTHONPATH": str(tmp_path / "site"),
        "HF_HYPERATTN_BUILD_DIR": str(tmp_path / "built"),
    }
    environment |= {"PATH": os.environ["PATH"], "CXX": "/nonexistent"}
    done = subprocess.run(
        [python, "-c", WORK], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.split() == ["armv8"], done.stdout + done.stderr


@pytest.mark.slow
def test_the_wheel_carries_every_score_of_the_package():
    code = "import json; from scripts.prebuild import recorded as r; print(json.dumps(sorted(r())))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HYPERATTN_NATIVE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    keys = json.loads(done.stdout.splitlines()[-1])
    held = {name.strip("*^") for key in keys for name in key.split("+")}
    own = {
        name for name, term in TERMS.items() if type(term).__module__.startswith("hf_hyperattn.")
    }
    assert held == {
        name for name in own if ":" not in name
    }  # weighted ones, of multiple kernel learning, are compiled
    for name in ("umbral", "penumbral_squared", "geodesic", "squared_lorentz", "dot+hype_sinh"):
        assert name in keys  # by name
    for name in ("umbral", "penumbral_squared", "geodesic", "squared_lorentz"):
        assert f"dot+*{name}_on_product" in keys  # patched


def pins_in(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


@pytest.fixture
def requirements():
    """Direct dependencies, those of extras too."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    return {
        canonicalize_name(r.name): r for r in map(Requirement, wanted) if r.name != "hf-hyperattn"
    }


def test_what_is_tested_is_allowed(requirements):
    pins = pins_in("constraints.txt")
    for name, requirement in requirements.items():
        assert name in pins, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pins[name]), requirement


def test_the_lower_bounds_are_those_of_the_package(requirements):
    for name, pinned in pins_in("constraints-lowest.txt").items():
        (bound,) = (s.version for s in requirements[name].specifier if s.operator == ">=")
        assert name == "torch" or Version(pinned) == Version(bound), name
