"""`hyperattn demo` on tiny models: what it shows is what the model does."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.rules import Exact, Pages, Window
from hyperattn_cli import main
from hyperattn_cli.commands import demo_long
from hyperattn_cli.shared import smollm2
from hyperattn_cli.shared.console import show_progress

from . import tiny

LABELS = ("original", "cone, patched in", "cone, replaced", "sparse")
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
    return {cells[0]: cells[1:] for cells in lines if cells[0] in LABELS and cells[1][0].isdigit()}


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
        f"{model.name}, float32 on cpu, 1 thread\nPart 1: fox.txt, 100 tokens, context 40\n"
    )
    rows = shown(out)
    assert list(rows) == ["original", "cone, patched in", "cone, replaced"]
    ids = tiny.tokenizer()(TEXT).input_ids[:100]
    for label, attention in zip(rows, ("sdpa", "sdpa", "cone")):
        expected = losses(model, attention, ids, 40)
        assert float(rows[label][0].replace(",", "")) == pytest.approx(expected, rel=2e-3)
    assert float(rows["cone, patched in"][1]) <= 1e-5
    assert float(rows["cone, replaced"][1]) > 1e-2
    assert "this loses the model's quality" in " ".join(out.split())
    assert "Left out. The rules of this part belong to SmolLM2-135M-Instruct" in out
    assert re.sub(r" \(\d+% done, about .* left\)", "", err).splitlines() == [
        "loading",
        "original",
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
    assert '"the fox" is continued with:' in out
    for label in ("original        ", "cone, patched in"):
        assert f"  {label}  {expected}\n" in out
    assert re.search(
        r"^Cone attention ran on (plain torch|the fused engine, cpu)", out, re.MULTILINE
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
    assert len(seen) == 3 and all(prefix == [tiny.BOS] for prefix in seen)


@pytest.mark.slow
def test_defaults_fit_a_short_model(capsys, model):
    """The default text, and windows no longer than the model's 96 positions."""
    code, out, _ = demo(capsys, "--model", model, "--generate", "2", "--device", "cpu")
    assert code == 0
    assert re.search(r"Part 1: argparse.py of Python 3\.\S+, 192 tokens, context 96\n", out)


def test_without_a_model_it_takes_smollm2(capsys, model, text, monkeypatch):
    monkeypatch.setattr(smollm2, "cached_smollm2", lambda: model)
    code, out, _ = demo(capsys, "--text", text, *ARGUMENTS)
    assert code == 0
    assert out.startswith("SmolLM2-135M-Instruct, float32 on cpu")


def rules_of(layers: int) -> dict:
    """A record of rules as in the committed file, for the tiny model with four heads."""
    rules = (Window(near=40, sinks=4), Pages(near=16, page=8, top=2), Exact(), Window(near=200))
    config = ha.HyperAttnConfig(
        (ha.SparseConfig(Exact()),),
        mode="replace",
        hosts=tuple(f"model.layers.{i}.self_attn" for i in range(layers)),
        overrides={f"model.layers.{i}.self_attn": (ha.SparseConfig(rules),) for i in range(layers)},
    )
    return config.to_dict()


@pytest.fixture
def short(tmp_path, monkeypatch):
    """The second part with a tiny model, and a text of 512 tokens."""
    tiny.save(tmp_path / "model", max_position_embeddings=600)
    (tmp_path / "rules.json").write_text(json.dumps(rules_of(2)))
    monkeypatch.setattr(demo_long, "RULES", tmp_path / "rules.json")
    monkeypatch.setattr(demo_long, "LENGTH", 512)
    monkeypatch.setattr(smollm2, "cached_smollm2", lambda: tmp_path / "model")
    return tmp_path / "model"


def test_the_long_text_is_what_the_models_read(capsys, short, text):
    """Perplexity and answers of both models, against the models themselves in one call each."""
    code, out, _ = demo(capsys, "--text", text, *ARGUMENTS, "--json")
    report = json.loads(out)
    assert code == 0 and report["left out"] is None
    tokenizer = tiny.tokenizer()
    ids = tokenizer(TEXT).input_ids
    example = demo_long.hide_facts(tokenizer, ids)
    whole = tokenizer.decode(example.ids)
    for _, statement, end in demo_long.FACTS:
        assert whole.count(statement + end) == 2 and len(example.ids) == 512
    original = AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32).eval()
    sparse = AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32).eval()
    ha.patch_model(sparse, ha.HyperAttnConfig.from_dict(rules_of(2)))
    end = whole.index(demo_long.FACTS[0][1], whole.index(demo_long.FACTS[2][1]))
    stop = len(tokenizer(whole[:end] + demo_long.FACTS[0][1]).input_ids)
    for row, model in zip(report["long text"], (original, sparse), strict=True):
        with torch.no_grad():
            logits = model(example.ids[None]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[: stop - 1], example.ids[1:stop])
        assert row["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-3)
        likely = logits.argmax(-1)
        found = sum(torch.equal(likely[a - 1 : b - 1], example.ids[a:b]) for a, b in example.spans)
        assert (row["found"], row["hidden"]) == (found, 3) and row["seconds"] > 0
    pairs = [
        sum(min(i + 1, 44) for i in range(512)) / (512 * 513 / 2),
        Pages(near=16, page=8, top=2).share(512),
        1.0,
        sum(min(i + 1, 204) for i in range(512)) / (512 * 513 / 2),
    ]
    first, second = report["long text"]
    assert first["logits"] == first["ratio"] == 1
    assert second["logits"] == pytest.approx(sum(pairs) / 4, rel=1e-3)


def test_models_that_take_turns_and_one_that_fails(short):
    """An error in one thread ends the other at its next layer, and is raised."""
    models = {
        name: AutoModelForCausalLM.from_pretrained(short, dtype=torch.float32).eval()
        for name in ("a", "b")
    }
    order = []
    for name, model in models.items():
        for number, layer in enumerate(model.base_model.layers):
            layer.register_forward_hook(lambda *_, at=(name, number): order.append(at))
    ids = torch.arange(5, 60)
    hidden, seconds = demo_long.read_by_turns(models, ids, lambda: None)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)] and set(seconds) == {"a", "b"}
    with torch.no_grad():
        expected = models["a"].base_model(ids[None]).last_hidden_state[0]
    assert torch.equal(hidden["a"], expected) and torch.equal(hidden["b"], expected)

    def fail(*_):
        raise ValueError("on purpose")

    models["b"].base_model.layers[0].register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        demo_long.read_by_turns(models, ids, lambda: None)


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
