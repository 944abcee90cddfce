"""Two hundred wrong command lines, made from the parser: one line on stderr, exit code 2, nothing on stdout or disk."""

import argparse

import pytest
from transformers import AutoModelForCausalLM, BertConfig, BertModel

import hf_hyperattn as ha
from hyperattn_cli import build_parser, main

from . import tiny

#: Of every command a line that is right but for what is done to it below; in a folder with these files.
RIGHT = {
    "autoload": ["status"],
    "bench": ["model", "--mechanism", "cone", "--length", "32"],
    "compare": [
        "model",
        "--text",
        "text.txt",
        "--mechanisms",
        "cone,none",
        "--length",
        "16",
        "--steps",
        "2",
    ],
    "completion": ["bash"],
    "convert": ["encoder", "--output", "out", "--to", "hat", "--set", "segment_length=16"],
    "eval": ["model", "--text", "text.txt"],
    "hyperbolicity": ["model"],
    "list": ["cone"],
    "card": ["patched"],
    "demo": ["--model", "model", "--text", "text.txt"],
    "describe": ["model"],
    "export": ["model", "out", "--remote-code"],
    "heal": ["injected", "--text", "text.txt", "--length", "64", "--output", "out"],
    "inject": [
        "model",
        "--mechanism",
        "hsa",
        "--text",
        "text.txt",
        "--length",
        "64",
        "--output",
        "out",
    ],
    "look": ["model", "--text", "text.txt", "--out", "out"],
    "push": ["patched", "who/what", "--dry-run"],
}
COLLABORATIVE = ["model", "--mechanism", "collaborative", "--rank", "4"]
WORDS = ("", "many", "4x", "0x4", "--4", "1 2", "four\nlines")
OUT_OF_RANGE = ("-5", "1" + "0" * 30)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


#: Wrong without any command, and what makes a right line of any command wrong.
NO_COMMAND = (["fly"], ["--fly"], ["demos"], [""], ["-1"], ["describe\n"], ["--version=3"])
TOO_MUCH = (
    ["--unknown"],
    ["--unknown=3"],
    ["-z"],
    ["--", "one", "more", "x"],
    ["--traceback=yes"],
    ["--TRACEBACK"],
    ["more words", "than\nthere may be", "x"],
)
#: Wrong values of an option by its type, besides those of all numbers.
OF_TYPE = {int: ("1.5",), float: ("nan", "inf", "-inf", "0")}
PROGRESS = ("loading", "reading", "looking at cone")
INJECT = ["inject", *RIGHT["inject"]]
LOOK = ["look", "model", "--text", "text.txt"]
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
            ["look", "model", "--out", "out", "--text", "HERE"],
            ["heal", "injected", "--text", "HERE", "--output", "out", "--length", "64"],
        ),
    ),
    (
        (
            "./missing",
            "/missing",
            "text.txt",
            "empty",
            "a/b/c",
            "a\0b",
            "who/what",
            "~/missing",
            "../missing",
        ),
        (
            ["demo", "--model", "HERE", "--text", "text.txt"],
            ["describe", "HERE"],
            ["describe", "HERE", "--json"],
            ["card", "HERE"],
            ["push", "HERE", "who/what", "--dry-run"],
            ["export", "HERE", "out", "--remote-code"],
            ["inject", "HERE", "--mechanism", "hsa", "--length", "64", "--text", "text.txt"],
            ["inject", "HERE", *COLLABORATIVE[1:]],
            ["look", "HERE", "--out", "out", "--text", "text.txt"],
            ["heal", "HERE", "--text", "text.txt", "--output", "out"],
        ),
    ),
    (
        ("text.txt", "full", "missing/out", "text.txt/out"),
        (
            [*INJECT[:-1], "HERE"],
            ["inject", *COLLABORATIVE, "--output", "HERE"],
            [*HEAL[:-1], "HERE"],
        ),
    ),
    (("text.txt", "full", "text.txt/out", "a\0b"), (["export", "model", "HERE", "--remote-code"],)),
    (("text.txt", "missing/out", "text.txt/out"), ([*LOOK, "--out", "HERE"],)),
    (("yes", "ON", "", "on off"), (["autoload", "HERE"],)),
    (("", "a/b/c", "a b", "../x", "a--b", "-x"), (["push", "patched", "HERE", "--dry-run"],)),
    (
        ("missing.txt", ".", "zeros.txt", "latin.txt", "short.txt", ""),
        (
            ["eval", "model", "--text", "HERE"],
            ["hyperbolicity", "model", "--text", "HERE"],
            ["compare", "model", "--mechanisms", "cone", "--length", "16", "--text", "HERE"],
        ),
    ),
    (
        ("./missing", "/missing", "text.txt", "empty", "a/b/c"),
        (
            ["bench", "HERE", "--mechanism", "cone"],
            ["compare", "HERE", "--mechanisms", "cone", "--text", "text.txt"],
            ["convert", "HERE", "--output", "out", "--to", "hat"],
            ["eval", "HERE", "--text", "text.txt"],
            ["hyperbolicity", "HERE"],
        ),
    ),
    (
        ("text.txt", "full", "missing/out"),
        (["convert", "model", "--output", "HERE", "--to", "hat"],),
    ),
    (("missing.txt", ".", "text.txt", "zeros.txt", ""), (["card", "patched", "--facts", "HERE"],)),
]
#: Right lines, and what makes each wrong.
BESIDES = [
    (
        INJECT,
        (
            ["--rank", "4"],
            ["--mechanism", "cone"],
            ["--mechanism", ""],
            ["--text"],
            ["--text", "text.txt", "text.txt"],
            ["--length", "97"],
            ["--length", "63"],
            ["--rows", "15"],
            ["--budget", "1"],
            ["--pairs", "1.01"],
            ["--text", "text.txt", "missing.txt"],
        ),
    ),
    (
        ["inject", *COLLABORATIVE],
        (
            ["--budget", "0.1"],
            ["--pairs", "0.5"],
            ["--rows", "32"],
            ["--length", "64"],
            ["--rank", "0"],
            ["--rank", "-5"],
            ["--rank", "1" + "0" * 30],
            ["--rank", "33"],
            ["--text"],
            ["--seed", "-1"],
        ),
    ),
    (
        HEAL,
        (
            ["--lora", "0"],
            ["--lr", "2"],
            ["--patch-lr", "0"],
            ["--steps", "0"],
            ["--length", "97"],
            ["--seed", "-1"],
            ["--save-every", "0"],
            ["--device", "abacus"],
            ["--text", "text.txt", "text.txt"],
            ["--text", "brief.txt"],
        ),
    ),
    (["heal", "model", *RIGHT["heal"][1:]], ([],)),
    (
        ["demo", *RIGHT["demo"]],
        (
            ["--prompt", ""],
            ["--prompt", "\n"],
            ["--device", "abacus"],
            ["--device", ""],
            ["--device", "cuda:99"],
            ["--length", "97"],
            ["--length", "1"],
            ["--tokens", "31"],
            ["--generate", "0"],
        ),
    ),
    (
        [*LOOK, "--out", "out"],
        (
            ["--length", "97"],
            ["--length", "31"],
            ["--query", "96"],
            ["--query", "-1"],
            ["--layers", "2"],
            ["--layers", "some"],
            ["--layers", ""],
            ["--layers", "0,9"],
            ["--layers", "1-2"],
        ),
    ),
    (["describe"], ([], ["model", "model"])),
    (["card"], ([], ["model"], ["unpatched", "--write"])),
    (["push"], (["patched"], ["unpatched", "who/what", "--dry-run"])),
    (["export"], (["model", "--remote-code"], ["unpatched", "out", "--remote-code"])),
]


def replaced(right: list[str], more: list[str]) -> list[str]:
    """A line with more behind it, in place of what it says of the same options."""
    options, kept, drop = {word for word in more if word.startswith("--")}, [], False
    for word in right:
        drop = word in options if word.startswith("--") else drop
        kept += [] if drop else [word]
    return [*kept, *more]


COMPARE = ["compare", *RIGHT["compare"]]
EVAL = ["eval", "model", "--text", "text.txt"]
CONVERT = ["convert", "encoder", "--output", "out", "--to", "hat", "--set"]
#: Wrong lines, and words of the mend that each error names.
MENDS = [
    (["comapre"], "did you mean 'compare'"),
    (["lst"], "did you mean 'list'"),
    (["benchmark"], "did you mean 'bench'"),
    (["hyperbolic"], "did you mean 'hyperbolicity'"),
    (["evaluate", "model"], "did you mean 'eval'"),
    (["complete", "bash"], "did you mean 'completion'"),
    (["doctr"], "did you mean 'doctor'"),
    (["--json", "list"], "no option '--json'"),
    (["fly"], "allowed: autoload, bench"),
    (["list", "conee"], "did you mean 'cone'"),
    (["list", "hyperbolicc"], "did you mean 'hyperbolic'"),
    (["list", ""], "allowed: sparse, hsa"),
    (["list", "none"], "allowed: sparse"),
    (["list", "cone", "hype"], "leave it out"),
    (["list", "--jsno"], "did you mean '--json'"),
    (["completion"], "SHELL is missing"),
    (["completion", "bsh"], "did you mean 'bash'"),
    (["completion", "powershell"], "allowed: bash, zsh, fish"),
    (["completion", "bash", "zsh"], "leave it out"),
    (["eval", "model"], "--text is missing"),
    (["eval", "model", "--txt", "text.txt"], "did you mean '--text'"),
    ([*EVAL, "--mechanism", "cne"], "did you mean 'cone'"),
    ([*EVAL, "--mechanism", "hat"], "allowed: sparse"),
    ([*EVAL, "--mechanism", "cone+"], "several with +"),
    ([*EVAL, "--mechanism", "cone+hyperbolic"], "--mechanism cone+hyperbolic: "),
    ([*EVAL, "--mechanism", "cone", "--mode", "mix"], "allowed: blend, replace"),
    ([*EVAL, "--mode", "replace"], "leave it out"),
    ([*EVAL, "--dtype", "float8"], "allowed: float32, bfloat16, float16"),
    ([*EVAL, "--dtype", "bfloat"], "did you mean 'bfloat16'"),
    ([*EVAL, "--device", "abacus"], "allowed: cpu, cuda"),
    ([*EVAL, "--length", "1"], "allowed: 2 or more"),
    ([*EVAL, "--length", "97"], "allowed: up to 96"),
    ([*EVAL, "--tokens", "31"], "allowed: 32 or more"),
    (
        ["eval", "patched-model", "--text", "text.txt", "--mechanism", "cone"],
        "leave out --mechanism",
    ),
    (["eval", "encoder", "--text", "text.txt"], "allowed: a model that AutoModelForCausalLM loads"),
    (["bench", "model"], "add what to measure beside it: --mechanism cone"),
    (["bench", "model", "--mechanism", "cone", "--length", "90"], "allowed: 96 tokens together"),
    (["bench", "model", "--mechanism", "cone", "--generate", "1"], "allowed: 2 or more"),
    (["bench", "model", "--mechanism", "cone", "--repeats", "0"], "allowed: 1 or more"),
    (["bench", "model", "--mechanism", "cone", "--length", "x"], "no whole number"),
    (["bench", "model", "--mechansim", "cone"], "did you mean '--mechanism'"),
    (["bench"], "MODEL is missing"),
    (["compare", "model", "--mechanisms", "cone"], "--text is missing"),
    (["compare", "model", "--text", "text.txt"], "--mechanisms is missing"),
    (replaced(COMPARE, ["--mechanisms", "none"]), "allowed: names once each"),
    (replaced(COMPARE, ["--mechanisms", "cone,cone"]), "allowed: names once each"),
    (replaced(COMPARE, ["--mechanisms", "cone,hypr"]), "did you mean 'hype'"),
    (replaced(COMPARE, ["--mechanisms", "cone;hype"]), "several with +"),
    ([*COMPARE, "--budget", "20"], "allowed: such as 90s, 20min or 1.5h"),
    ([*COMPARE, "--budget", "20 minutes"], "allowed: such as 90s, 20min or 1.5h"),
    ([*COMPARE, "--budget", "0s"], "allowed: such as 90s"),
    ([*COMPARE, "--budget", "20min"], "leave one out"),
    ([*COMPARE, "--seeds", "2"], "allowed: 3 or more"),
    ([*COMPARE, "--seeds", "101"], "allowed: 3 to 100"),
    ([*COMPARE, "--rate", "1"], "allowed: above 0 and below 1"),
    ([*COMPARE, "--added-rate", "0"], "allowed: above 0 and below 1"),
    ([*COMPARE, "--layers", "last-thirds"], "'last-third'"),
    ([*COMPARE, "--rank", "0"], "allowed: 1 or more"),
    ([*COMPARE, "--held-out", "0"], "allowed: 1 or more"),
    (
        replaced(COMPARE, ["--text", "text.txt", "short.txt", "--held-out", "1"]),
        "--held-out 1 with 2 texts; allowed: 2",
    ),
    (
        replaced(COMPARE, ["--text", "text.txt", "./text.txt"]),
        "a second text called text.txt; allowed: texts of diff",
    ),
    (replaced(COMPARE, ["--length", "97"]), "allowed: up to 96"),
    ([*COMPARE, "--out", "text.txt"], "allowed: a folder"),
    ([*COMPARE, "--out", "missing/out"], "allowed: a place in an existing folder"),
    ([*COMPARE, "--out", "other"], "use another --out, or remove it"),
    (["compare", "patched-model", *COMPARE[2:]], "allowed: a model with its own attention"),
    (["compare", "encoder", *COMPARE[2:]], "allowed: a model that AutoModelForCausalLM loads"),
    (["convert", "encoder", "--output", "out"], "--to is missing"),
    (["convert", "encoder", "--to", "hat"], "--output is missing"),
    (["convert", "encoder", "--output", "out", "--to", "hatt"], "did you mean 'hat'"),
    (["convert", "encoder", "--output", "out", "--to", "cone"], "allowed: collaborative, hat"),
    (
        ["convert", "encoder", "--output", "out", "--to", "hat", "--set", "layout"],
        "allowed: NAME=VALUE",
    ),
    (
        ["convert", "encoder", "--output", "out", "--to", "hat", "--set", "layuot=I1"],
        "did you mean 'layout'",
    ),
    (
        ["convert", "encoder", "--output", "out", "--to", "hat", "--set", "segment_length=1"],
        "HatConfig.segment_length",
    ),
    (["convert", "encoder", "--output", "out", "--to", "hat", "--set", "layout=I9"], "I1, I2, I3"),
    (["convert", "encoder", "--output", "out", "--to", "collaborative"], "add --set rank=R"),
    (["convert", "model", "--output", "out", "--to", "hat"], "allowed: bert"),
    (
        ["convert", "patched-model", "--output", "out", "--to", "hat"],
        "allowed: a model with its own attention",
    ),
    (["convert", "encoder", "--output", "full", "--to", "hat"], "full"),
    (
        ["convert", "encoder", "--output", "missing/out", "--to", "hat"],
        "allowed: a place in an existing folder",
    ),
    (["hyperbolicity", "text.txt"], "allowed: .npy, .csv, .safetensors"),
    (["hyperbolicity", "words.csv"], "allowed: numbers, one point a row"),
    (["hyperbolicity", "nan.csv"], "allowed: finite numbers"),
    (["hyperbolicity", "few.csv"], "allowed: 8 points or more"),
    (["hyperbolicity", "missing.npy"], "allowed: numbers, one point a row"),
    (["hyperbolicity", "few.csv", "--text", "text.txt"], "leave it out"),
    (
        ["hyperbolicity", "model", "--tokens", "64"],
        "--tokens says nothing without --text; leave it out",
    ),
    (
        ["hyperbolicity", "model", "--text", "text.txt", "--tokens", "97"],
        "--tokens 97 exceeds what the model reads",
    ),
    (["hyperbolicity", "model", "--size", "3"], "allowed: 4 or more"),
    (["hyperbolicity", "model", "--seed", "-1"], "allowed: 0 or more"),
    (["hyperbolicity", "model", "--sedd", "3"], "did you mean '--seed'"),
    ([*EVAL, "--text=more.txt"], "--text is given twice; allowed: once (see"),
    (
        [*COMPARE, "--tex", "more.txt"],
        "--text is given twice; allowed: once, with all files behind it",
    ),
    ([*COMPARE, "--mechanisms", "hype"], "--mechanisms is given twice; allowed: once (see"),
    (["describe", "model", "--json", "--heads", "--json"], "--json is given twice; allowed: once"),
    ([*CONVERT, "layout=I1", "--set", "layout=I1"], "--set layout is given twice; leave one out"),
    (["inject", "model", "--mechanism", "hsaa", "--text", "text.txt"], "did you mean 'hsa'"),
    (["describe", "model", "--jsn"], "did you mean '--json'"),
    (["autoload", "of"], "did you mean 'off'"),
    (["demo", "--force"], "--force says nothing without --output; leave it out"),
    (["demo", *RIGHT["demo"], "--generate", "95", "--prompt", "ab"], "allowed: 96 tokens together"),
    (
        [*HSA, "--text", "text.txt", "--force"],
        "--force says nothing without --output; leave it out",
    ),
    (["demo", "--generate", "many"], "allowed: digits, such as --generate 1024"),
    (["demo", "--generate"], "allowed: --generate VALUE"),
]


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
            yield [*replaced(right, [option])[:-1], f"{option}={word}"]


def wrong_lines():
    """Wrong command lines: (words)."""
    yield from NO_COMMAND
    for name, parser in commands().items():
        right = [name, *RIGHT.get(name, [])]
        yield from ([*right, *more] for more in TOO_MUCH)
        for action in parser._actions:
            yield from wrong_values(right, action)
    for words, lines in PLACES:
        yield from (
            [word if part == "HERE" else part for part in line] for word in words for line in lines
        )
    for right, wrongs in BESIDES:
        yield from (replaced(right, more) for more in wrongs)


LINES = list(wrong_lines())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lines")
    tiny.save(folder / "model")
    tiny.save(folder / "unpatched")
    ha.HyperAttnConfig([ha.ConeConfig()]).save_pretrained(folder / "patched")
    (folder / "text.txt").write_text("some text that is long enough to be measured on. " * 100)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ha.patch_model(model, ha.HsaConfig((4, 16)), mode="replace").save_pretrained(
        folder / "injected"
    )
    tiny.tokenizer().save_pretrained(folder / "injected")
    (folder / "short.txt").write_text("too short")
    (folder / "brief.txt").write_text("long enough to be read, and not to learn from. " * 2)
    (folder / "zeros.txt").write_bytes(b"text\0text" * 100)
    (folder / "latin.txt").write_bytes("Größe ".encode("latin-1") * 100)
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "mine").write_text("keep")
    size = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    BertModel(BertConfig(vocab_size=260, **size)).save_pretrained(folder / "encoder")
    tiny.tokenizer().save_pretrained(folder / "encoder")
    model = ha.patch_model(AutoModelForCausalLM.from_pretrained(folder / "model"), ha.ConeConfig())
    model.save_pretrained(folder / "patched-model")
    tiny.tokenizer().save_pretrained(folder / "patched-model")
    (folder / "other").mkdir()
    (folder / "other" / "hyperattn_compare.json").write_text(
        '{"request": {"model": "another"}, "runs": {}}'
    )
    (folder / "words.csv").write_text("one,two\n")
    (folder / "nan.csv").write_text("1,nan\n" * 9)
    (folder / "few.csv").write_text("1,2\n3,4\n")
    return folder


def test_there_are_enough():
    assert len({tuple(line) for line in LINES}) >= 200


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(" ".join(line))[:80])
def test_one_line(line, place, monkeypatch, capsys):
    error_of(line, place, monkeypatch, capsys)


@pytest.mark.parametrize("line, mend", MENDS, ids=lambda part: repr(part)[:80])
def test_the_line_says_what_to_write_instead(line, mend, place, monkeypatch, capsys):
    assert mend in error_of(line, place, monkeypatch, capsys)


def error_of(line, place, monkeypatch, capsys) -> str:
    """The one line on stderr; nothing was printed or written."""
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    try:
        code = main(line)
    except SystemExit as left:  # argparse's own errors
        code = left.code
    out, err = capsys.readouterr()
    lines = [said for said in err.splitlines() if said not in PROGRESS]
    assert code == 2, (out, err)
    assert len(lines) == 1 and lines[0].startswith("hyperattn") and ": error: " in lines[0], err
    assert "Traceback" not in err and "--traceback shows where" not in err and len(lines[0]) < 1100
    assert (
        out in ("", "model: collaborative, rank 33, seed 0\n")
        and sorted(place.rglob("*")) == before
    )
    return lines[0]
