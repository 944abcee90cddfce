"""What pyproject.toml cannot say: a wheel with compiled kernels.

By itself a build makes a plain wheel, for all systems, whose kernels are compiled on first use. With
HF_HYPERATTN_PREBUILT=1 and without build isolation (it needs a C++ compiler, torch and Transformers; `make wheel`) the
wheel is for the Linux machines that the compiler compiles for, x86-64 or AArch64, and carries them
(scripts/prebuild.py).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILT = os.environ.get("HF_HYPERATTN_PREBUILT", "0") not in ("", "0")
MACHINES = {62: "x86_64", 183: "aarch64"}  # by what the heads of libraries (ELF) call them
FOLDER = Path("hf_hyperattn", "engines", "prebuilt")


class BuildPy(build_py):
    """The package, with compiled kernels where they are asked for."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        shutil.rmtree(Path(self.build_lib, FOLDER), ignore_errors=True)  # of an earlier build
        if PREBUILT:
            script = Path(__file__).parent / "scripts" / "prebuild.py"
            plain = [
                sys.executable,
                "-B",
            ]  # it imports the package from there: no bytecode in the wheel
            subprocess.run([*plain, str(script), os.path.abspath(self.build_lib)], check=True)


class Prebuilt(Distribution):
    """A distribution for one platform where it carries kernels."""

    def has_ext_modules(self):
        return PREBUILT


class BdistWheel(bdist_wheel):
    """A wheel for any Python of the systems that its kernels run on."""

    def get_tag(self):
        made = (
            [path.read_bytes() for path in Path(self.bdist_dir).rglob("prebuilt/*.so")]
            if PREBUILT
            else []
        )
        if not made:  # a plain wheel, or an editable install, whatever is asked for
            return super().get_tag()
        newest = max(
            int(minor) for content in made for minor in re.findall(rb"GLIBC_2\.(\d+)", content)
        )
        machine = MACHINES[int.from_bytes(made[0][18:20], "little")]
        return "py3", "none", f"manylinux_2_{max(newest, 17)}_{machine}"


setup(distclass=Prebuilt, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
