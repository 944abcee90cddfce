"""Damaged checkpoints on the command line: one line on stderr, exit code 2, no traceback, nothing written."""

import signal

import pytest

import hf_hyperattn as ha
from hyperattn_cli import main

from . import damaged, tiny

ALL = damaged.OF_CONFIG | damaged.OF_RECORD | damaged.OF_TOKENIZER | damaged.OF_ADAPTER
SECONDS = 20  # of this process's own work, whatever else the machine does


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory, stock):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("patched")
    ha.patch_model(AutoModelForCausalLM.from_pretrained(stock), ha.ConeConfig()).save_pretrained(
        folder
    )
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def in_time():
    """Fails, in place of hanging, what takes too long."""
    if not hasattr(signal, "SIGPROF"):
        yield
        return
    old = signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"it takes more than {SECONDS} s"))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, old)


def refused(capfd, *arguments) -> str:
    """What the command says; asserts that it is one line, and the exit code 2."""
    capfd.readouterr()
    code = main([*map(str, arguments)])
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert code == 2, (code, out, err)
    assert len(lines) == 1 and lines[0].startswith(f"hyperattn {arguments[0]}: error: "), err
    assert "Traceback" not in err and 40 < len(lines[0]) < 1100
    print(lines[0][:230])
    return lines[0]


def test_there_are_enough():
    assert len(ALL) >= 60


COPIED = {case for case in damaged.OF_TOKENIZER if "config" not in case and "folder" not in case}


@pytest.mark.parametrize("case", [case for case in ALL if case not in COPIED])
def test_export(case, patched, tmp_path, capfd, in_time):
    source = damaged.damaged(patched, tmp_path / "source", ALL[case])
    refused(capfd, "export", "--remote-code", source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("case", damaged.OF_CONFIG | damaged.OF_RECORD)
def test_describe(case, patched, tmp_path, capfd, in_time):
    source = damaged.damaged(patched, tmp_path / "source", ALL[case])
    refused(capfd, "describe", source)


@pytest.mark.parametrize("case", damaged.OF_CONFIG | damaged.OF_TOKENIZER)
def test_inject_and_demo(case, stock, tmp_path, capfd, in_time):
    source = damaged.damaged(stock, tmp_path / "source", ALL[case])
    text = tmp_path / "text.txt"
    text.write_text("some text that is long enough to be measured on. " * 400)
    target = tmp_path / "out"
    refused(
        capfd,
        "inject",
        source,
        "--mechanism",
        "hsa",
        "--text",
        text,
        "--length",
        64,
        "--output",
        target,
    )
    refused(capfd, "demo", "--model", source, "--text", text, "--length", 64)
    if case in damaged.OF_CONFIG:
        refused(
            capfd, "inject", source, "--mechanism", "collaborative", "--rank", 4, "--output", target
        )
    assert not target.exists()


def test_whole_ones_are_taken(stock, patched, tmp_path, capfd):
    """What is refused above is refused for its damage."""
    assert main(["describe", str(stock)]) == main(["describe", str(patched)]) == 0
    assert main(["export", "--remote-code", str(patched), str(tmp_path / "out")]) == 0
    arguments = ["--mechanism", "collaborative", "--rank", "4"]
    assert main(["inject", str(stock), *arguments]) == 2  # rotary positions
    assert "rotary" in capfd.readouterr().err
