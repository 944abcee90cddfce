"""Two hundred wrong command lines, made from the parser: one line on stderr, exit code 2, nothing on stdout or disk."""

import argparse

import pytest
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.cli import build_parser, main

from . import tiny

#: Of every command a line that is right but for what is done to it below; in a folder with these files.
RIGHT = {
    "autoload": ["status"],
    "card": ["patched"],
    "demo": ["--model", "model", "--text", "text.txt"],
    "describe": ["model"],
    "export": ["model", "out", "--remote-code"],
    "heal": ["injected", "--text", "text.txt", "--length", "64", "--output", "out"],
    "inject": ["model", "--mechanism", "hsa", "--text", "text.txt", "--length", "64", "--output", "out"],
    "push": ["patched", "who/what", "--dry-run"],
}
COLLABORATIVE = ["model", "--mechanism", "collaborative", "--rank", "4"]
WORDS = ("", "many", "4x", "0x4", "--4", "1 2", "four\nlines")
OUT_OF_RANGE = ("-5", "1" + "0" * 30)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


#: Wrong without any command, and what makes a right line of any command wrong.
NO_COMMAND = ([], ["fly"], ["--fly"], ["demos"], [""], ["-1"], ["describe\n"], ["--version=3"])
TOO_MUCH = (
    ["--unknown"], ["--unknown=3"], ["-z"], ["--", "one", "more", "x"], ["--traceback=yes"], ["--TRACEBACK"],
    ["more words", "than\nthere may be", "x"],
)  # fmt: skip
#: Wrong values of an option by its type, besides those of all numbers.
OF_TYPE = {int: ("1.5",), float: ("nan", "inf", "-inf", "0")}
INJECT = ["inject", *RIGHT["inject"]]
HEAL = ["heal", *RIGHT["heal"]]
HSA = ["inject", "model", "--mechanism", "hsa", "--length", "64"]
#: Wrong files and folders, and the lines in which they stand where it says HERE.
PLACES = [
    (
        ("missing.txt", ".", "zeros.txt", "latin.txt", "short.txt", "", "a\0b"),
        (
            ["demo", "--model", "model", "--text", "HERE"],
            [*HSA, "--text", "HERE"],
            ["inject", *COLLABORATIVE, "--length", "64", "--text", "HERE"],
            ["heal", "injected", "--text", "HERE", "--output", "out", "--length", "64"],
        ),
    ),
    (
        ("./missing", "/missing", "text.txt", "empty", "a/b/c", "a\0b", "who/what", "~/missing", "../missing"),
        (
            ["demo", "--model", "HERE", "--text", "text.txt"],
            ["describe", "HERE"],
            ["describe", "HERE", "--json"],
            ["card", "HERE"],
            ["push", "HERE", "who/what", "--dry-run"],
            ["export", "HERE", "out", "--remote-code"],
            ["inject", "HERE", "--mechanism", "hsa", "--length", "64", "--text", "text.txt"],
            ["inject", "HERE", *COLLABORATIVE[1:]],
            ["heal", "HERE", "--text", "text.txt", "--output", "out"],
        ),
    ),
    (
        ("text.txt", "full", "missing/out", "text.txt/out"),
        ([*INJECT[:-1], "HERE"], ["inject", *COLLABORATIVE, "--output", "HERE"], [*HEAL[:-1], "HERE"]),
    ),
    (("text.txt", "full", "text.txt/out", "a\0b"), (["export", "model", "HERE", "--remote-code"],)),
    (("yes", "ON", "", "on off"), (["autoload", "HERE"],)),
    (("", "a/b/c", "a b", "../x", "a--b", "-x"), (["push", "patched", "HERE", "--dry-run"],)),
    (("missing.txt", ".", "text.txt", "zeros.txt", ""), (["card", "patched", "--facts", "HERE"],)),
]
#: Right lines, and what makes each wrong.
BESIDES = [
    (INJECT, (
        ["--rank", "4"], ["--mechanism", "cone"], ["--mechanism", ""], ["--text"], ["--text", "text.txt", "text.txt"],
        ["--length", "97"], ["--length", "63"], ["--rows", "15"], ["--budget", "1"], ["--pairs", "1.01"],
        ["--text", "text.txt", "missing.txt"],
    )),
    (["inject", *COLLABORATIVE], (
        ["--budget", "0.1"], ["--pairs", "0.5"], ["--rows", "32"], ["--length", "64"], ["--rank", "0"],
        ["--rank", "-5"], ["--rank", "1" + "0" * 30], ["--rank", "33"], ["--text"], ["--seed", "-1"],
    )),
    (HEAL, (
        ["--lora", "0"], ["--lr", "2"], ["--patch-lr", "0"], ["--steps", "0"], ["--length", "97"], ["--seed", "-1"],
        ["--save-every", "0"], ["--device", "abacus"], ["--text", "text.txt", "text.txt"], ["--text", "brief.txt"],
    )),
    (["heal", "model", *RIGHT["heal"][1:]], ([],)),
    (["demo", *RIGHT["demo"]], (
        ["--prompt", ""], ["--prompt", "\n"], ["--device", "abacus"], ["--device", ""], ["--device", "cuda:99"],
        ["--length", "97"], ["--length", "1"], ["--tokens", "31"], ["--generate", "0"],
    )),
    (["describe"], ([], ["model", "model"])),
    (["card"], ([], ["model"], ["unpatched", "--write"])),
    (["push"], (["patched"], ["unpatched", "who/what", "--dry-run"])),
    (["export"], (["model", "--remote-code"], ["unpatched", "out", "--remote-code"])),
]  # fmt: skip


def wrong_values(right: list[str], action: argparse.Action):
    """A right line with one of its options left out, without its value, or with a wrong one."""
    option = next((o for o in action.option_strings if o.startswith("--")), None)
    if action.required and option:
        at = right.index(option)
        yield right[:at] + right[at + (1 if action.nargs == 0 else 2) :]
    if option in (None, "--help", "--traceback"):
        return
    if action.nargs == 0:
        yield [*right, f"{option}=1"]
        return
    yield [*right, option]
    if action.type in OF_TYPE:
        for word in (*WORDS, *(OUT_OF_RANGE if option != "--rank" else ()), *OF_TYPE[action.type]):
            yield [*right, f"{option}={word}"]


def wrong_lines():
    """Wrong command lines: (words)."""
    yield from NO_COMMAND
    for name, parser in commands().items():
        right = [name, *RIGHT.get(name, [])]
        yield from ([*right, *more] for more in TOO_MUCH)
        for action in parser._actions:
            yield from wrong_values(right, action)
    for words, lines in PLACES:
        yield from ([word if part == "HERE" else part for part in line] for word in words for line in lines)
    for right, wrongs in BESIDES:
        yield from ([*right, *more] for more in wrongs)


LINES = list(wrong_lines())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    tiny.save(folder / "model")
    tiny.save(folder / "unpatched")
    ha.HyperAttnConfig([ha.ConeConfig()]).save_pretrained(folder / "patched")
    (folder / "text.txt").write_text("some text that is long enough to be measured on. " * 100)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ha.patch_model(model, ha.HsaConfig((4, 16)), mode="replace").save_pretrained(folder / "injected")
    tiny.tokenizer().save_pretrained(folder / "injected")
    (folder / "short.txt").write_text("too short")
    (folder / "brief.txt").write_text("long enough to be read, and not to learn from. " * 2)
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
