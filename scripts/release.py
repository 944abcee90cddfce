"""Builds a release into dist/ and tries it (`make release`); docs/releasing.md says what comes after.

From the commit that is checked out: a source archive, from that a plain wheel, and on Linux (x86-64, AArch64) a wheel
with compiled kernels (HF_HYPERATTN_PREBUILT may name levels and scores, as for scripts/prebuild.py). Each is installed
into a fresh environment and exercised, with a compiler and without one.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = runpy.run_path(str(ROOT / "hf_hyperattn" / "address.py"))["VERSION"]
BACKEND = "from setuptools import build_meta as b; import sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
#: What each package has to do where it is installed; its last line names what computed.
EXERCISE = """
import sys, tempfile, torch, hf_hyperattn as ha
from hf_hyperattn import functional as F
from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu import library
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

assert ha.__version__ == sys.argv[1], ha.__version__
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 200, 24)
out, exact = (F.cone_attention(q, k, v, is_causal=True, backend=b) for b in ("auto", "reference"))
assert (out - exact).abs().max() < 1e-4
size = dict(vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
stock, ids = LlamaForCausalLM(LlamaConfig(**size)), torch.randint(16, (1, 300))
before = stock(ids).logits
model = ha.patch_model(stock, ha.ConeConfig())
assert (model(ids).logits - before).abs().max() < 1e-5
optimizer = torch.optim.AdamW(ha.parameter_groups(model, lr=1e-3, hyper_lr=1e-2))
for _ in range(2):
    model(ids, labels=ids).loss.backward(), optimizer.step(), optimizer.zero_grad()
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert (again(ids).logits - model(ids).logits).abs().max() < 1e-6
carried = native.load_prebuilt()
tables = [t for (score, _, _), t in library.TABLES.items() if score == "umbral"]
of_the_wheel = carried is not None and all(t.library is carried.library for t in tables)
print("plain torch" if not tables else "wheel" if of_the_wheel else "compiled")
"""


def main() -> None:
    """Build, install, exercise; the first thing that fails ends it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--dist", type=Path, default=ROOT / "dist", help="where the packages go (default: dist)"
    )
    parser.add_argument(
        "--environment", type=Path, help="a virtual environment with the dependencies, to use again"
    )
    parser.add_argument(
        "--notes", action="store_true", help="print what CHANGELOG.md says of this version, and end"
    )
    parser.add_argument(
        "--allow-dirty",
        action="store_true",
        help="build the commit though files were changed since",
    )
    args = parser.parse_args()
    if args.notes:
        print(notes())
        return
    check_sources(args.allow_dirty)
    args.dist.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        packages = build(Path(scratch), args.dist.absolute())
        python = environment(args.environment or Path(scratch, "environment"), packages["plain"])
        for kind, compiler, expected in cases(packages):
            said = try_package(python, packages[kind], compiler, Path(scratch))
            print(
                f"{kind}, {'with' if compiler else 'without'} a compiler: works, cone attention by {said}",
                flush=True,
            )
            if said != expected:
                sys.exit(
                    f"release.py: error: {packages[kind].name}: expected {expected}, not {said}"
                )
    print(f"built and tried: {', '.join(path.name for path in packages.values())}")


def notes() -> str:
    """The section of CHANGELOG.md on this version; ends the program where there is none."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(
        rf"^## {re.escape(VERSION)}\b.*\n((?:(?!^## ).*\n?)*)", changelog, re.MULTILINE
    )
    if section is None or not section[1].strip():
        sys.exit(
            f"release.py: error: CHANGELOG.md says nothing of {VERSION}; write its section first"
        )
    return section[1].strip()


def check_sources(allow_dirty: bool) -> None:
    """Refuse a version without notes, and changes that are in no commit."""
    notes()
    changed = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if changed.stdout and not allow_dirty:
        sys.exit(
            "release.py: error: there are changes in no commit; commit them, or give --allow-dirty"
        )


def build(scratch: Path, dist: Path) -> dict[str, Path]:
    """The packages by kind: "sdist", "plain", and where it can be made "prebuilt"."""
    source = scratch / "source"
    source.mkdir()
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    packages = {"sdist": build_one("sdist", source, dist, "0")}
    place = scratch / "unpacked"
    place.mkdir()
    subprocess.run(["tar", "xzf", str(packages["sdist"]), "-C", str(place)], check=True)
    (unpacked,) = place.iterdir()
    packages["plain"] = build_one("wheel", unpacked, dist, "0")
    if platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64"):
        wanted = os.environ.get("HF_HYPERATTN_PREBUILT", "1")
        packages["prebuilt"] = build_one("wheel", unpacked, dist, "1" if wanted == "0" else wanted)
    return packages


def build_one(kind: str, source: Path, dist: Path, prebuilt: str) -> Path:
    """What setuptools builds of a source tree, by the calls that pip makes."""
    print(f"building {kind}{' with kernels' if prebuilt != '0' else ''}", flush=True)
    command = [sys.executable, "-c", BACKEND, f"build_{kind}", str(dist)]
    settings = os.environ | {"HF_HYPERATTN_PREBUILT": prebuilt}
    done = subprocess.run(command, cwd=source, env=settings, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"release.py: error: building {kind} failed\n{done.stderr}")
    return dist / done.stdout.split()[-1]


def environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of an environment with the dependencies, made where it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        for package in (
            "torch",
            str(wheel),
        ):  # torch first and alone, so that no other package chooses its build
            pip(python, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), package)
    return python


def pip(python: Path, *words: str) -> None:
    """Run pip of an environment; what it builds of the source archive is the plain wheel."""
    settings = os.environ | {"HF_HYPERATTN_PREBUILT": "0"}
    subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", *words], env=settings, check=True
    )


def cases(packages: dict[str, Path]) -> Iterator[tuple[str, bool, str]]:
    """The package, whether there is a compiler, and what is to compute there."""
    yield "plain", False, "plain torch"
    if any(map(shutil.which, ("g++", "clang++"))):
        yield "sdist", True, "compiled"
        yield "plain", True, "compiled"
    if "prebuilt" in packages:
        yield "prebuilt", False, "wheel"


def try_package(python: Path, package: Path, compiler: bool, scratch: Path) -> str:
    """Install a package in place of any other, exercise it and its command, and say what computed."""
    pip(python, "install", "--quiet", "--no-deps", "--force-reinstall", str(package))
    settings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "HF_HYPERATTN"))
    }
    settings["HF_HYPERATTN_BUILD_DIR"] = tempfile.mkdtemp(dir=scratch)
    if not compiler:
        settings |= {"CXX": "/nonexistent", "PATH": str(python.parent)}
    run = lambda *command: (
        subprocess.run(
            [*map(str, command)],
            cwd=scratch,
            env=settings,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    )
    version = run(python.parent / "hyperattn", "--version").split()
    assert version == ["hyperattn", VERSION], version
    assert len(run(python.parent / "hyperattn", "doctor").splitlines()) >= 10
    return run(python, "-c", EXERCISE, VERSION).splitlines()[-1]


if __name__ == "__main__":
    main()
