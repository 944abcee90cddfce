"""What a command prints while it works."""

import sys
import time

from hyperattn_cli.shared.console import show_progress


def test_without_a_terminal_each_step_tells_what_is_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert not sys.stderr.isatty()
    with show_progress(10) as bar:
        bar.describe("first")
        now[0] += 30
        bar.advance(1)
        bar.describe("second")
        now[0] += 30
        bar.advance(6)
        bar.describe("third")
        bar.advance(3)
        bar.describe("last")
    assert capsys.readouterr().err.splitlines() == [
        "first",
        "second (10% done, about 4 min left)",
        "third (70% done, about 26 s left)",
        "last",
    ]
