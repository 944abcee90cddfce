"""Functions run in forked children that are killed: before their n-th change of the file system, or after a time."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

CHANGES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
    "ctypes.dlsym",  # the exchange of two folders is looked up by its name, then called
}


def changes_files(event: str, arguments: tuple) -> bool:
    """Whether an audit event stands for a change of the file system that is about to happen."""
    if event == "open":
        return isinstance(arguments[2], int) and bool(
            arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
    return event in CHANGES


def start(
    function: Callable, *arguments, kill_at: int | None = None, before: Callable = lambda: None
) -> int:
    """Fork a child that runs the function; gives its process id. The child dies before its `kill_at`-th change."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        before()
        count = itertools.count(1)

        def hook(event, details):
            if kill_at is not None and changes_files(event, details) and next(count) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def killed(
    function: Callable, *arguments, kill_at: int | None = None, after: float | None = None, **more
) -> bool:
    """Run the function in a child; whether it was killed, by number of changes or after a time in seconds."""
    child = start(function, *arguments, kill_at=kill_at, **more)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed; its traceback is above"
    return False
