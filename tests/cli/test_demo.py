"""`hyperattn demo` on tiny models: what it shows is what the model does."""

import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from hyperattn_cli import main
from hyperattn_cli.shared.console import show_progress

from . import tiny

TEXT = "The quick brown fox jumps over the lazy dog, then goes home. " * 20
ARGUMENTS = [
    "--length",
    "40",
    "--tokens",
    "100",
    "--generate",
    "5",
    "--prompt",
    "the fox",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "fox.txt"
    file.write_text(TEXT)
    return file


def demo(capsys, *arguments) -> tuple[int, str, str]:
    code = main(["demo", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def shown(out: str) -> dict[str, list[str]]:
    """Cells of the plain table by row label."""
    lines = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if len(cells) > 4 and cells[0] != "attention"}


def losses(folder, attention: str, ids: list[int], window: int) -> float:
    """exp of the mean cross-entropy that the model itself gives, window by window."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32
    )
    total = count = 0
    for start in range(0, len(ids), window):
        piece = torch.tensor([ids[start : start + window]])
        total += model(piece, labels=piece).loss.item() * (piece.shape[1] - 1)
        count += piece.shape[1] - 1
    return math.exp(total / count)


def test_rows_are_what_the_model_does(capsys, model, text):
    code, out, err = demo(capsys, "--model", model, "--text", text, *ARGUMENTS)
    assert code == 0
    assert out.startswith(
        f"{model.name}, float32 on cpu, 1 thread\nText: fox.txt, 100 tokens, context 40\n"
    )
    rows = shown(out)
    assert list(rows) == ["stock (sdpa)", "cone, patched in", "cone, replaced", "hsa, defaults"]
    ids = tiny.tokenizer()(TEXT).input_ids[:100]
    for label, attention in zip(rows, ("sdpa", "sdpa", "cone", "hsa")):
        expected = losses(model, attention, ids, 40)
        assert float(rows[label][0].replace(",", "")) == pytest.approx(expected, rel=2e-3)
    assert float(rows["cone, patched in"][4]) <= 1e-5
    assert float(rows["cone, replaced"][4]) > 1e-2
    assert "this loses the model's quality" in " ".join(out.split())
    assert re.sub(r" \(\d+% done, about .* left\)", "", err).splitlines() == [
        "loading",
        "stock (sdpa)",
        "hsa, defaults",
        "cone, patched in",
        "loading",
        "cone, replaced",
    ]


def test_generation_is_shown_and_the_patched_model_saved(capsys, model, text, tmp_path):
    _, out, _ = demo(
        capsys, "--model", model, "--text", text, *ARGUMENTS, "--output", tmp_path / "saved"
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([tiny.tokenizer()("the fox").input_ids])
    new = loaded.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    expected = repr(tiny.tokenizer().decode(new, skip_special_tokens=True))
    assert '"the fox" goes on, greedily:' in out
    for label in ("stock (sdpa)    ", "cone, patched in"):
        assert f"  {label}  {expected}\n" in out
    assert re.search(
        r"^cone attention ran on (plain torch|the fused engine, cpu)", out, re.MULTILINE
    )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(saved(prompt).logits, loaded(prompt).logits)
    assert any("cone" in name for name, _ in saved.named_parameters())
    assert (tmp_path / "saved" / "README.md").is_file() and (
        tmp_path / "saved" / "tokenizer.json"
    ).is_file()


def test_a_full_folder_is_refused_before_anything_is_measured(capsys, model, tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    code, out, err = demo(capsys, "--model", model, *ARGUMENTS, "--output", tmp_path)
    assert code == 2 and out == "" and "is not empty; allowed: an absent or empty directory" in err


@pytest.mark.slow
def test_a_model_with_bos_gets_it_before_every_window(capsys, tmp_path, text, monkeypatch):
    from hyperattn_cli.commands import demo as command

    seen = []
    real = command.perplexity
    monkeypatch.setattr(
        command, "perplexity", lambda *a, **k: (seen.append(k["prefix"]), real(*a, **k))[1]
    )
    assert (
        demo(capsys, "--model", tiny.save(tmp_path, bos=True), "--text", text, *ARGUMENTS)[0] == 0
    )
    assert len(seen) >= 4 and all(prefix == [tiny.BOS] for prefix in seen)


@pytest.mark.slow
def test_defaults_fit_a_short_model(capsys, model):
    """The default text, and windows no longer than the model's 96 positions."""
    code, out, _ = demo(capsys, "--model", model, "--generate", "2", "--device", "cpu")
    assert code == 0
    assert re.search(r"Text: argparse.py of Python 3\.\S+, 192 tokens, context 96\n", out)


def test_without_a_model_it_takes_smollm2(capsys, model, text, monkeypatch):
    from hyperattn_cli.shared import smollm2

    monkeypatch.setattr(smollm2, "cached_smollm2", lambda: model)
    code, out, _ = demo(capsys, "--text", text, *ARGUMENTS)
    assert code == 0
    assert out.startswith("SmolLM2-135M-Instruct, float32 on cpu")


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)  # noqa: B023
        with show_progress(4) as bar:
            bar.advance(2)
            bar.describe("measuring")
        out, error = capsys.readouterr()
        assert out == "" and (
            "2/4" in error if terminal else error == "measuring (50% done, about 0 s left)\n"
        )
