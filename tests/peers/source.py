"""The test suites of Transformers and PEFT, from checkouts or from the source archives of the installed versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

FOLDER = Path.home() / ".cache" / "hf_hyperattn" / "peers"
#: What Transformers' archive lacks although its common tests import it: those tests are left out.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}


def suite(project: str) -> Path:
    """The folder whose package `<project>_tests` is the project's `tests`.

    TRANSFORMERS_SOURCE and PEFT_SOURCE name checkouts; without them the archive of the installed version is downloaded
    from the package index, once.
    """
    place = FOLDER / f"{project}-{version(project)}"
    package = place / f"{project}_tests"
    checkout = os.environ.get(f"{project.upper()}_SOURCE")
    if checkout:
        place = Path(tempfile.mkdtemp(prefix="peers-"))
        (place / f"{project}_tests").symlink_to(Path(checkout).resolve() / "tests")
        return place
    if not package.is_dir():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as stage:
            unpack(project, Path(stage))
            (Path(stage) / "tests").rename(package)
    return place


def unpack(project: str, stage: Path) -> None:
    """Download the source archive and put its `tests` into a folder."""
    options = ["--no-deps", "--no-build-isolation", "--no-binary", project, "-d", str(stage)]
    line = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        *options,
        f"{project}=={version(project)}",
    ]
    subprocess.run(line, check=True)
    (archive,) = stage.glob("*.tar.gz")
    subprocess.run(["tar", "xzf", str(archive), "-C", str(stage)], check=True)
    (unpacked,) = (path for path in stage.iterdir() if path.is_dir())
    shutil.move(unpacked / "tests", stage / "tests")
    stubs = STUBS if project == "transformers" else {}
    for name, text in stubs.items():
        path = stage / "tests" / name
        path.parent.mkdir(exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (stage / "tests" / "__init__.py").touch()
