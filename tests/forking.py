"""Programs in processes of their own that need not import torch and Transformers again.

A server process imports the package once, and forks for each program. The registries of the package are as after
the import, whatever the tests registered. Tests of the import itself need a new interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

CAN_FORK = hasattr(os, "fork")
SERVER = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
if CAN_FORK:
    SERVER.set_forkserver_preload(["hf_hyperattn", "transformers.models.llama.modeling_llama"])
TIMEOUT = 240


def run_module(name: str, *arguments, cwd: Path) -> subprocess.CompletedProcess:
    """Run `python -m name arguments` in a forked process, and return what `subprocess.run` would.

    Args:
        name: Name of the module.
        arguments: Arguments of the program.
        cwd: Working directory. Modules in it can be imported.

    Raises:
        TimeoutError: The program takes more than 240 seconds.
    """
    line = [name, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = SERVER.Process(target=be_program, args=(line, str(cwd), str(out), str(err)))
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(" ".join(line))
        return subprocess.CompletedProcess(
            line, process.exitcode, stdout=out.read_text(), stderr=err.read_text()
        )


def be_program(line: list[str], cwd: str, out: str, err: str) -> None:
    """Become the program: its folder, its arguments, and its output in files."""
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    name, *arguments = line
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
