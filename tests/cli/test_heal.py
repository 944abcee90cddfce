"""`hyperattn heal` on a tiny injected Llama: who learns, who does not, resumption to the bit, and what is written."""

import json
import re

import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import hf_hyperattn as ha
from hf_hyperattn.inject import Healing
from hf_hyperattn.inject.heal import without_patch
from hf_hyperattn.mechanisms.sparse import Window
from hyperattn_cli import main

from . import tiny
from .test_inject import prose

BIAS = (0.0, -1.0, float("-inf"), 0.5)
RATES = {"lr": 1e-3, "patch_lr": 3e-2}


def ids_of(seed: int) -> torch.Tensor:
    return torch.tensor(tiny.tokenizer()(prose(seed)).input_ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heal")
    (folder / "one.txt").write_text(prose(1))
    tiny.save(folder / "stock", max_position_embeddings=256)
    injected(folder).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    return folder


def stock(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "stock", dtype=torch.float32).eval()


def injected(folder):
    config = ha.HsaConfig(
        (4, 16), "key", near=4, sinks=2, refine_top_k=1, block_bias=BIAS, tuned_length=64
    )
    return ha.patch_model(stock(folder), config, mode="replace")


def healing(folder, rank=0, steps=8, **more) -> Healing:
    ids = ids_of(1)[: 64 * (steps + 2)]  # of longer texts the command reads no more
    rates = {name: rate for name, rate in RATES.items() if rank or name == "patch_lr"}
    return Healing(injected(folder), {"one": ids}, 64, steps, rank, **rates, **more)


def logits(model, ids=None):
    with torch.no_grad():
        return model((ids_of(2) if ids is None else ids)[None, :80]).logits[0]


@pytest.mark.parametrize("rank", [0, 2])
def test_before_the_first_step_it_is_the_injected_model_and_its_teacher_the_stock_one(folder, rank):
    heal = healing(folder, rank)
    assert torch.equal(logits(heal.adapter), logits(injected(folder)))
    with without_patch(heal.model, heal.adapter):
        assert torch.equal(logits(heal.model), logits(stock(folder)))
    assert torch.equal(logits(heal.adapter), logits(injected(folder)))


def test_the_loss_is_the_divergence_from_the_untouched_model(folder):
    heal, window = healing(folder, steps=1), healing(folder, steps=1).draw_window(0)
    own, student = (logits(m(folder), window).double().log_softmax(-1) for m in (stock, injected))
    kl = (own.exp() * (own - student)).sum(-1).mean().item()
    heal.run()
    assert heal.losses == pytest.approx([kl], rel=1e-4)


def test_a_step_follows_the_gradient_of_plain_autograd(folder):
    """With plain softmax, without recomputation or pieces."""
    heal, model = healing(folder, rank=2), injected(folder)
    window = heal.draw_window(0)
    heal.optimizer.step = heal.optimizer.zero_grad = lambda: None
    heal.train_step(window)
    own = logits(stock(folder), window).log_softmax(-1)
    loss = (
        F.kl_div(
            model(window[None]).logits[0].log_softmax(-1), own, reduction="sum", log_target=True
        )
        / 64
    )
    loss.backward()
    for i, layer in enumerate(model.model.layers):
        name = f"base_model.model.model.layers.{i}.self_attn"
        grad = heal.trained()[f"{name}.hyper.lora_hyper.default.hsa.block_bias"].grad
        torch.testing.assert_close(
            grad, layer.self_attn.hyper.hsa.block_bias.grad, rtol=1e-3, atol=1e-6
        )
        assert grad[BIAS.index(float("-inf"))] == 0 < grad.abs().max()
        down = heal.adapter.get_parameter(f"{name}.q_proj.lora_A.default.weight").detach()
        up = heal.adapter.get_parameter(f"{name}.q_proj.lora_B.default.weight").grad
        scale = (
            heal.adapter.peft_config["default"].lora_alpha / 2
        )  # W + scale B A: dB = scale dW Aᵀ
        torch.testing.assert_close(
            up, scale * layer.self_attn.q_proj.weight.grad @ down.T, rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("rank", [0, 2])
def test_only_the_patch_and_lora_learn(folder, rank):
    heal = healing(folder, rank)
    before = {name: p.detach().clone() for name, p in heal.adapter.named_parameters()}
    heal.run()
    changed = {
        name for name, p in heal.adapter.named_parameters() if not torch.equal(p, before[name])
    }
    assert changed == set(heal.trained())
    assert all("lora_" in name for name in changed)
    assert any("block_bias" in name for name in changed)
    assert any("lora_A" in name for name in changed) == bool(rank)


def test_what_is_held_out_is_never_read_and_gains(folder):
    heal = healing(folder, steps=20)
    heal.texts["one"], words = torch.arange(300), heal.texts["one"]
    windows = torch.stack([heal.draw_window(i) for i in range(400)])
    assert windows.shape == (400, 64) and windows.min() < 9 and 226 < windows.max() < 300 - 64
    heal.texts["one"] = words
    (before,) = heal.held_out().values()
    heal.run()
    (after,) = heal.held_out().values()
    assert after[0] == before[0] and 0 < after[2] < before[2]


def test_a_prefix_opens_every_window_and_old_states_know_none(folder):
    plain, opened = healing(folder), healing(folder, prefix=[tiny.BOS])
    for step in range(8):
        assert opened.draw_window(step).tolist() == [
            tiny.BOS,
            *plain.draw_window(step)[:-1].tolist(),
        ]
    read = []
    opened.run_teacher = lambda ids: read.append(ids) or torch.zeros(len(ids), 32)
    opened.held_out()
    assert read[0].tolist() == [tiny.BOS, *opened.texts["one"][-63:].tolist()]
    assert (
        opened.collect_settings()["prefix"] == [tiny.BOS]
        and "prefix" not in plain.collect_settings()
    )


def test_products_in_bfloat16_learn_nearly_the_same_in_float32(folder, tmp_path):
    full, half = healing(folder, 2, steps=20), healing(folder, 2, steps=20, bf16=True)
    (before,) = half.held_out().values()
    assert {"one": before} == full.held_out()  # which is measured in float32
    full.run()
    half.run(tmp_path / "state", 20)
    assert half.losses == pytest.approx(full.losses, rel=0.2) and half.losses != full.losses
    (after,) = half.held_out().values()
    assert after[2] < before[2] and {p.dtype for p in half.trained().values()} == {torch.float32}
    with pytest.raises(ValueError, match="other settings"):
        healing(folder, 2, steps=20).run(tmp_path / "state")


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_that_was_cut_off_ends_in_the_same_bits(folder, tmp_path, rank):
    whole = healing(folder, rank, seed=3)
    whole.run()

    def stop(_):
        if len(cut.losses) == 5:
            raise KeyboardInterrupt

    cut = healing(folder, rank, seed=3)
    with pytest.raises(KeyboardInterrupt):
        cut.run(tmp_path / "state", 2, stop)
    again = healing(folder, rank, seed=3)
    again.run(tmp_path / "state", 3)
    assert again.losses == whole.losses
    assert all(torch.equal(p, whole.trained()[name]) for name, p in again.trained().items())
    with pytest.raises(ValueError, match="other settings"):
        healing(folder, rank, seed=4).run(tmp_path / "state")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_the_command_gives_windows_the_bos_token_of_the_tokenizer(
    capsys, folder, tmp_path, monkeypatch
):
    given = []
    monkeypatch.setattr(Healing, "run", lambda self, *_: given.append(list(self.prefix)))
    for bos in (False, True):
        model = tmp_path / f"bos-{bos}"
        injected(folder).save_pretrained(model)
        tiny.tokenizer(bos).save_pretrained(model)
        main(
            [
                "heal",
                str(model),
                "--text",
                str(folder / "one.txt"),
                "--steps",
                "2",
                "--output",
                str(tmp_path / "out"),
            ]
        )
    assert given == [[], [tiny.BOS]]


def test_rules_without_parameters_learn_through_lora(folder):
    model = ha.patch_model(stock(folder), ha.SparseConfig(Window(8, 2)), mode="replace")
    heal = Healing(model, {"one": ids_of(1)}, 64, 20, rank=2, lr=RATES["lr"])
    (before,) = heal.held_out().values()
    heal.run()
    (after,) = heal.held_out().values()
    assert 0 < after[2] < before[2] and all("lora_" in name for name in heal.trained())


def heal_command(capsys, folder, *more) -> tuple[int, str, str]:
    text = ["--text", str(folder / "one.txt"), "--device", "cpu"]
    text += [] if "--patch-lr" in more else ["--patch-lr", "0.03"]
    text += ["--lr", "1e-3"] if "--lora" in more else []
    code = main(["heal", str(folder / "model"), *text, "--steps", "10", *map(str, more)])
    return code, *capsys.readouterr()


def test_the_checkpoint_computes_what_was_learned(capsys, folder, tmp_path):
    code, out, err = heal_command(capsys, folder, "--output", tmp_path / "new")
    assert code == 0, out + err
    expected = healing(folder, steps=10)
    before = expected.held_out()
    expected.run()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    assert torch.equal(logits(written), logits(expected.adapter))
    report = json.loads((tmp_path / "new" / "hyperattn_heal.json").read_text())
    assert report["losses"] == expected.losses
    rows = re.search(r"one\.txt .*", out).group().split()
    shown = [before["one"][2], expected.held_out()["one"][2]]
    assert list(map(float, rows[-2:])) == pytest.approx(shown, abs=1e-5)
    assert "hyperattn heal model --text one.txt" in (tmp_path / "new" / "README.md").read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("more", [("--lora", 2), ("--adapter",)])
def test_the_adapter_works_on_the_injected_and_on_the_stock_model(capsys, folder, tmp_path, more):
    code, out, err = heal_command(capsys, folder, "--output", tmp_path / "new", *more)
    assert code == 0, out + err
    expected = healing(folder, 2 * (more[0] == "--lora"), steps=10)
    expected.run()
    for base in (
        stock(folder),
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
    ):
        adapted = PeftModel.from_pretrained(base.eval(), tmp_path / "new")
        torch.testing.assert_close(logits(adapted), logits(expected.adapter), rtol=0, atol=1e-6)


def test_an_interrupted_command_goes_on_only_when_told_to(capsys, folder, tmp_path, monkeypatch):
    step = Healing.train_step

    def interrupted(self, ids):
        if len(self.losses) == 7:
            raise KeyboardInterrupt
        return step(self, ids)

    monkeypatch.setattr(Healing, "train_step", interrupted)
    line = ("--output", tmp_path / "new", "--save-every", 3)
    assert heal_command(capsys, folder, *line)[0] == 130
    monkeypatch.setattr(Healing, "train_step", step)
    code, _, err = heal_command(capsys, folder, *line)
    assert code == 2 and "--resume" in err and len(err.splitlines()) == 1
    assert (
        main(
            [
                "heal",
                str(folder / "stock"),
                "--text",
                str(folder / "one.txt"),
                "--force",
                *map(str, line),
            ]
        )
        == 2
    )
    assert (
        tmp_path / "new.heal-state.safetensors"
    ).is_file()  # the work stays where the new run cannot begin
    assert heal_command(capsys, folder, *line, "--resume")[0] == 0
    whole = healing(folder, steps=10)
    whole.run()
    assert (
        json.loads((tmp_path / "new" / "hyperattn_heal.json").read_text())["losses"] == whole.losses
    )
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_where_nothing_is_gained_nothing_is_written(capsys, folder, tmp_path):
    code, out, err = heal_command(
        capsys, folder, "--output", tmp_path / "new", "--patch-lr", "1", "--json"
    )
    assert (code, "nothing is written" in err) in ((1, True), (0, False))
    assert list(json.loads(out)["report"]["texts"]) == ["one.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["new"] * (code == 0)


def test_it_refuses_models_without_a_patch_or_with_nothing_to_learn(capsys, folder, tmp_path):
    text = ["--text", str(folder / "one.txt"), "--output", str(tmp_path / "new"), "--length", "64"]
    assert main(["heal", str(folder / "stock"), *text]) == 2
    assert "not a patched causal LM" in capsys.readouterr().err
    model = ha.patch_model(stock(folder), ha.SparseConfig(Window(8, 2)), mode="replace")
    with pytest.raises(ValueError, match="no parameter that could learn; allowed: --lora R"):
        Healing(model, {"one": ids_of(1)}, 64)
    with pytest.raises(
        ValueError, match="patch_lr 0.01: the patch has no parameter that could learn; leave it out"
    ):
        Healing(model, {"one": ids_of(1)}, 64, rank=2, patch_lr=1e-2)
    with pytest.raises(ValueError, match="lr 0.0003 is of LoRA's matrices; allowed: with --lora R"):
        Healing(injected(folder), {"one": ids_of(1)}, 64, lr=3e-4)
    with pytest.raises(ValueError, match="is not patched"):
        Healing(stock(folder), {"one": ids_of(1)}, 64)
    with pytest.raises(ValueError, match="128 or more"):
        Healing(injected(folder), {"one": ids_of(1)[:127]}, 64)
