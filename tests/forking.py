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
    SERVER.set_forkserver_preload(
        ["hf_hyperattn", "transformers.models.llama.modeling_llama", "peft"]
    )
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
    return run_forked(be_module, [name, *map(str, arguments)], cwd)


def run_code(code: str, *arguments, cwd: Path) -> subprocess.CompletedProcess:
    """Run `python -c code arguments` in a forked process, as `run_module` runs a module."""
    return run_forked(be_code, [code, *map(str, arguments)], cwd)


def run_forked(program, line: list[str], cwd: Path) -> subprocess.CompletedProcess:
    """Run a function of a line in a forked process, with the working directory `cwd`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = SERVER.Process(target=program, args=(line, str(cwd), str(out), str(err)))
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(" ".join(line))
        return subprocess.CompletedProcess(
            line, process.exitcode, stdout=out.read_text(), stderr=err.read_text()
        )


def be_module(line: list[str], cwd: str, out: str, err: str) -> None:
    """Become `python -m`."""
    settle(cwd, out, err)
    sys.argv = line
    runpy.run_module(line[0], run_name="__main__", alter_sys=True)


def be_code(line: list[str], cwd: str, out: str, err: str) -> None:
    """Become `python -c`."""
    settle(cwd, out, err)
    code, *arguments = line
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def settle(cwd: str, out: str, err: str) -> None:
    """Send the output of this process to files, and move to its folder."""
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
