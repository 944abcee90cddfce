"""Two hundred wrong command lines, made from the parser: one line on stderr, exit code 2, nothing on stdout or disk."""

import argparse

import pytest

from hf_hyperattn.cli import build_parser, main

from . import tiny

#: Of every command a line that is right but for what is done to it below; in a folder with these files.
RIGHT = {
    "autoload": ["status"],
    "demo": ["--model", "model", "--text", "text.txt"],
    "describe": ["model"],
    "export": ["model", "out", "--remote-code"],
    "inject": ["model", "--mechanism", "hsa", "--text", "text.txt", "--length", "64", "--output", "out"],
}
COLLABORATIVE = ["model", "--mechanism", "collaborative", "--rank", "4"]
WORDS = ("", "many", "4x", "0x4", "--4", "1 2", "four\nlines")
OUT_OF_RANGE = ("-5", "1" + "0" * 30)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def wrong_lines():
    """Wrong command lines: (words)."""
    yield from ([], ["fly"], ["--fly"], ["demos"], [""], ["-1"], ["describe\n"], ["--version=3"])
    for name, parser in commands().items():
        right = [name, *RIGHT.get(name, [])]
        yield from (
            [*right, "--unknown"],
            [*right, "--unknown=3"],
            [*right, "-z"],
            [*right, "--", "one", "more", "x"],
        )
        yield from (
            [*right, "--traceback=yes"],
            [*right, "--TRACEBACK"],
            [*right, "more words", "than\nthere may be", "x"],
        )
        for action in parser._actions:
            option = next((o for o in action.option_strings if o.startswith("--")), None)
            if option in (None, "--help", "--traceback"):
                continue
            if action.nargs == 0:
                yield [*right, f"{option}=1"]
                continue
            yield [*right, option]  # without its value
            if action.type in (int, float):
                for word in WORDS:
                    yield [*right, f"{option}={word}"]
                for word in OUT_OF_RANGE if option != "--rank" else ():
                    yield [*right, f"{option}={word}"]
            if action.type is int:
                yield [*right, f"{option}=1.5"]
            if action.type is float:
                for word in ("nan", "inf", "-inf", "0"):
                    yield [*right, f"{option}={word}"]
        for action in parser._actions:
            if action.required and action.option_strings:  # left out
                at = right.index(action.option_strings[0])
                yield right[:at] + right[at + (1 if action.nargs == 0 else 2) :]
    for text in ("missing.txt", ".", "zeros.txt", "latin.txt", "short.txt", "", "a\0b"):
        yield ["demo", "--model", "model", "--text", text]
        yield ["inject", "model", "--mechanism", "hsa", "--length", "64", "--text", text]
        yield ["inject", *COLLABORATIVE, "--length", "64", "--text", text]
    for model in (
        "./missing",
        "/missing",
        "text.txt",
        "empty",
        "a/b/c",
        "a\0b",
        "who/what",
        "~/missing",
        "../missing",
    ):
        yield ["demo", "--model", model, "--text", "text.txt"]
        yield ["describe", model]
        yield ["describe", model, "--json"]
        yield ["export", model, "out", "--remote-code"]
        yield ["inject", model, "--mechanism", "hsa", "--length", "64", "--text", "text.txt"]
        yield ["inject", model, *COLLABORATIVE[1:]]
    for out in ("text.txt", "full", "missing/out", "text.txt/out"):
        yield ["inject", *RIGHT["inject"][:-1], out]
        yield ["inject", *COLLABORATIVE, "--output", out]
    for out in ("text.txt", "full", "text.txt/out", "a\0b"):
        yield ["export", "model", out, "--remote-code"]
    yield from (["inject", *RIGHT["inject"], *more] for more in (
        ["--rank", "4"], ["--mechanism", "cone"], ["--mechanism", ""], ["--text"], ["--text", "text.txt", "text.txt"],
        ["--length", "97"], ["--length", "63"], ["--rows", "15"], ["--budget", "1"], ["--pairs", "1.01"],
        ["--text", "text.txt", "missing.txt"],
    ))  # fmt: skip
    yield from (["inject", *COLLABORATIVE, *more] for more in (
        ["--budget", "0.1"], ["--pairs", "0.5"], ["--rows", "32"], ["--length", "64"], ["--rank", "0"],
        ["--rank", "-5"], ["--rank", "1" + "0" * 30], ["--rank", "33"], ["--text"], ["--seed", "-1"],
    ))  # fmt: skip
    yield from (["demo", *RIGHT["demo"], *more] for more in (
        ["--prompt", ""], ["--prompt", "\n"], ["--device", "abacus"], ["--device", ""], ["--device", "cuda:99"],
        ["--length", "97"], ["--length", "1"], ["--tokens", "31"], ["--generate", "0"],
    ))  # fmt: skip
    yield from (["autoload", word] for word in ("yes", "ON", "", "on off"))
    yield ["describe"]
    yield ["describe", "model", "model"]
    yield ["export", "model", "--remote-code"]
    yield ["export", "unpatched", "out", "--remote-code"]


LINES = list(wrong_lines())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    tiny.save(folder / "model")
    tiny.save(folder / "unpatched")
    (folder / "text.txt").write_text("some text that is long enough to be measured on. " * 100)
    (folder / "short.txt").write_text("too short")
    (folder / "zeros.txt").write_bytes(b"text\0text" * 100)
    (folder / "latin.txt").write_bytes("Größe ".encode("latin-1") * 100)
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text("keep")
    return folder


def test_there_are_enough():
    assert len({tuple(line) for line in LINES}) >= 200


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(" ".join(line))[:80])
def test_one_line(line, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    try:
        code = main(line)
    except SystemExit as left:  # argparse's own errors
        code = left.code
    out, err = capsys.readouterr()
    lines = [said for said in err.splitlines() if said != "loading"]
    assert code == 2, (out, err)
    assert len(lines) == 1 and lines[0].startswith("hyperattn") and ": error: " in lines[0], err
    assert "Traceback" not in err and "--traceback shows where" not in err and len(lines[0]) < 1100
    assert out in ("", "model: collaborative, rank 33, seed 0\n") and sorted(place.rglob("*")) == before
