"""Sub-commands on a tiny model: what each prints as text and as JSON, against evaluations of its own."""

import argparse
import ast
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel

import hf_hyperattn as ha
from hf_hyperattn.analysis.hyperbolicity import hyperbolicity
from hf_hyperattn.analysis.paired import paired
from hf_hyperattn.integration.patching.conversions import CONVERSIONS
from hf_hyperattn.registry import MECHANISMS
from hub_cards import Result
from hyperattn_cli import COMMANDS, LIGHT, build_parser, main, patch_names, read_mechanisms
from hyperattn_cli import CONVERSIONS as CONVERTED
from hyperattn_cli.commands import bench, compare
from hyperattn_cli.commands.compare_training import (
    NONE,
    Trial,
    build_trainable,
    choose_ranks,
    survey_recipe,
)
from hyperattn_cli.commands.list import GROUPS
from hyperattn_cli.shared.console import print_report
from hyperattn_cli.shared.models import mechanism_configs

from . import tiny

ROOT = Path(__file__).parents[2]
OURS = {
    name
    for name, m in MECHANISMS.items()
    if m.config.__module__.startswith("hf_hyperattn.mechanisms.")
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subcommands")
    tiny.save(folder / "model")
    model = ha.patch_model(AutoModelForCausalLM.from_pretrained(folder / "model"), ha.ConeConfig())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name and "gate" in name:
                parameter.fill_(0.5)
    model.save_pretrained(folder / "patched")
    tiny.tokenizer().save_pretrained(folder / "patched")
    words = " ".join(f"the {n} foxes see {n * n % 7} hens and {n % 5} geese." for n in range(400))
    (folder / "text.txt").write_text(words)
    return folder


def report(*words, capsys) -> dict:
    """What a command line prints with --json."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_shipped_list_is_the_registry():
    assert set(read_mechanisms()) == OURS
    for name, about in read_mechanisms().items():
        mechanism = MECHANISMS[name]
        of_fields = {
            f.name: f.default if f.default_factory is MISSING else f.default_factory()
            for f in fields(mechanism.config)
        }
        defaults = json.loads(json.dumps(of_fields, default=lambda rule: rule.to_dict()))
        assert (about["stage"], about["paper"]) == (mechanism.stage, mechanism.paper)
        assert (about["config"], about["defaults"]) == (mechanism.config.__name__, defaults)
        assert about["names"] == list(mechanism.names)
        assert ("convert" in about["how"]) == (name in CONVERSIONS)
    assert set(CONVERTED) == set(CONVERSIONS)


def test_the_shipped_list_says_what_the_readme_says():
    """Every number with a point or a comma that the list prints stands in the README too."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, about in read_mechanisms().items():
        assert set(re.findall(r"\d+[.,]\d+", about["use_to"])) <= set(
            re.findall(r"\d+[.,]\d+", readme)
        ), name
        assert (
            about["group"] in GROUPS
            and about["summary"]
            and about["title"]
            and about["at_start"]
            and about["time"]
        )


def test_every_patch_can_be_named():
    assert {c.mechanism for name in patch_names() for c in mechanism_configs(name)} == OURS - {
        "hat"
    }
    assert mechanism_configs("cone_penumbral+hype") == [
        ha.ConeConfig(variant="penumbral"),
        ha.HypeConfig(),
    ]


def test_light_commands_import_nothing():
    for name in LIGHT:
        tree = ast.parse((ROOT / "hyperattn_cli" / "commands" / f"{name}.py").read_text())
        modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {
            alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
        }
        assert {m.partition(".")[0] for m in modules} <= sys.stdlib_module_names | {"hyperattn_cli"}
    code = "import sys, hyperattn_cli as c\nfor words in (['list'], ['list', 'cone', '--json'], ['completion', 'bash'])"
    code += ":\n"
    code += "    assert c.main(words) == 0\nassert not {'torch', 'transformers', 'hf_hyperattn'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_report_is_json_whatever_a_file_is_called(capfdbinary):
    """Bytes that are no text are in `sys.argv` as surrogates, which no stream takes."""
    report = {"text": b"caf\xe9.txt".decode("utf-8", "surrogateescape"), "row": "é"}
    print_report(argparse.Namespace(json=True), report, print)
    assert json.loads(capfdbinary.readouterr().out.decode("ascii")) == report


def test_list(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in OURS)
    assert main(["list", "cone_penumbral"]) == 0
    assert 'variant="umbral"' in capsys.readouterr().out
    assert report("list", "hsa", capsys=capsys)["hsa"]["config"] == "HsaConfig"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_an_example_that_parses(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    out = capsys.readouterr().out
    lines = [
        line.strip()
        for line in out.splitlines()
        if line.startswith("  hyperattn ") or '"$(hyperattn' in line
    ]
    assert lines and "--json" in out and "--traceback" in out
    for line in lines:
        words = line.partition(" > ")[0].replace('eval "$(', "").replace(')"', "").split()
        assert build_parser().parse_args(words[1:]).command == name


def test_every_command_has_its_part_of_the_page():
    page = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    assert {line[3:] for line in page.splitlines() if line.startswith("## ")} == {
        *COMMANDS,
        "What holds for all",
        "A score or rule of your own",
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*COMMANDS, "cone_penumbral"))
    assert report("completion", shell, capsys=capsys)["script"] == script
    program = shutil.which(shell)
    if program:
        check = subprocess.run([program, "-n"], input=script, text=True, capture_output=True)
        assert check.returncode == 0, check.stderr


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize(
    "words, expected",
    [
        (["ev"], "eval"),
        (["eval", "--len"], "--length"),
        (["eval", "--mechanism", "hyp"], "hyperbolic hype"),
        (["bench", "--dtype", "bf"], "bfloat16"),
        (["convert", "--to", "h"], "hat"),
        (["autoload", "st"], "status"),
    ],
)
def test_bash_completes(words, expected, capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(["hyperattn", *words])
    script += (
        f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; _hyperattn; echo "${{COMPREPLY[*]}}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr


def test_eval_of_a_patched_model(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    line = ("eval", "patched", "--text", "text.txt", "--length", "50", "--tokens", "120")
    rows = report(*line, capsys=capsys)
    ids = torch.tensor(tiny.tokenizer()((place / "text.txt").read_text())["input_ids"][:120])
    for name, model in (("original", "model"), ("patched", "patched")):
        total, count = 0.0, 0
        for piece in ids.split(50):
            with torch.no_grad():
                logits = AutoModelForCausalLM.from_pretrained(model)(piece[None]).logits[0, :-1]
            total, count = (
                total + F.cross_entropy(logits, piece[1:], reduction="sum").item(),
                count + len(piece) - 1,
            )
        assert math.isclose(rows["rows"][name]["loss"], total / count, rel_tol=1e-5)
        assert len(rows["rows"][name]["windows"]) == 2  # whole ones
    assert (
        rows["difference"]
        == rows["rows"]["patched"]["loss"] - rows["rows"]["original"]["loss"]
        != 0
    )
    assert main([*line]) == 0
    assert "Perplexity changes by " in capsys.readouterr().out


def test_eval_of_a_stock_model(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    line = ("eval", "model", "--text", "text.txt", "--length", "50", "--tokens", "100")
    assert report(*line, capsys=capsys)["difference"] is None
    fresh = report(*line, "--mechanism", "cone+hype", capsys=capsys)
    assert abs(fresh["difference"]) < 1e-6 and fresh["standard_error"] < 1e-6
    assert (
        abs(report(*line, "--mechanism", "cone", "--mode", "replace", capsys=capsys)["difference"])
        > 1e-3
    )


@pytest.fixture
def adapter(place, tmp_path):
    """A trained adapter that carries its patch, on the unpatched model."""
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    torch.manual_seed(0)
    config = ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], r=2)
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith(("gamma", "radius")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_describe_and_eval_of_an_adapter(place, adapter, monkeypatch, capsys):
    monkeypatch.chdir(place)
    found = report("describe", str(adapter), capsys=capsys)
    assert found["patched"] == len(found["hosts"]) and found["hosts"][0]["mechanisms"] == ["cone"]
    assert main(["describe", str(adapter)]) == 0
    assert re.search(
        r"^adapter: .*adapter on .*model, [\d,]+ parameters$", capsys.readouterr().out, re.M
    )
    line = ("eval", str(adapter), "--text", "text.txt", "--length", "60", "--tokens", "60")
    rows = report(*line, capsys=capsys)["rows"]
    ids = torch.tensor(tiny.tokenizer()((place / "text.txt").read_text())["input_ids"][:60])
    base = AutoModelForCausalLM.from_pretrained("model")
    models = {"base model": base, "with adapter": None}
    for name in models:
        model = base if name == "base model" else PeftModel.from_pretrained(base, adapter)
        with torch.no_grad():
            logits = model.eval()(input_ids=ids[None]).logits[0, :-1]
        assert math.isclose(
            rows[name]["loss"], F.cross_entropy(logits, ids[1:]).item(), rel_tol=1e-5
        )
    assert abs(rows["base model"]["loss"] - rows["with adapter"]["loss"]) > 1e-3
    assert main([*line, "--mechanism", "cone"]) == 2
    assert "an adapter, which has its own patch; leave out --mechanism" in capsys.readouterr().err


def test_describe_says_where_heads_have_nothing_of_their_own(place, capsys):
    for name, has in (("model", False), ("patched", True)):
        assert main(["describe", str(place / name), "--heads"]) == 0
        assert (
            "--heads shows nothing, because no head has parameters" in capsys.readouterr().out
        ) != has


def test_bench(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    line = ("bench", "patched", "--length", "40", "--generate", "4", "--repeats", "1")
    measured = report(*line, capsys=capsys)
    assert measured["logit_difference"] > 1e-2 and set(measured["rows"]) == {
        "original",
        "patched",
    }
    for row in measured["rows"].values():
        assert (
            row["prefill_seconds"] > 0
            and row["peak_memory"] > 2**20
            and 1 <= len(row["tokens"]) <= 4
        )
    assert main(["bench", "model", "--mechanism", "cone", *line[2:]]) == 0
    assert "greedy tokens are the same" in capsys.readouterr().out
    real = bench.measure_generation
    monkeypatch.setattr(
        bench, "measure_generation", lambda model, ids, new: real(model, ids, 1)
    )  # it stops at once
    rows = report(*line, capsys=capsys)["rows"]
    assert [row["seconds_a_new_token"] for row in rows.values()] == [None, None]
    assert main([*line]) == 0
    assert "one token came, and none after it" in capsys.readouterr().out


def test_hyperbolicity_of_points_and_of_a_model(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.save("points.npy", points.numpy())
    np.savetxt("points.csv", points.numpy(), delimiter=",", fmt="%.17g")
    few = ("--size", "12", "--draws", "2")
    row = report("hyperbolicity", "points.npy", *few, capsys=capsys)["rows"]["points.npy"]
    shuffle = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert row["largest"] == hyperbolicity(points[shuffle], size=12, draws=2).largest
    assert report("hyperbolicity", "points.csv", *few, capsys=capsys)["rows"]["points.csv"] == row
    words = ("--text", "text.txt", "--tokens", "60", *few)
    rows = report("hyperbolicity", "model", *words, capsys=capsys)["rows"]
    assert list(rows) == ["word vectors", "layer 1", "layer 2"]
    assert (rows["word vectors"]["points"], rows["layer 2"]["points"]) == (260, 60)
    assert main(["hyperbolicity", "points.npy", *few]) == 0
    assert "Samples of 12 points" in capsys.readouterr().out
    assert main(["hyperbolicity", "points.npy", "--size", "99", "--draws", "2"]) == 0
    out = capsys.readouterr().out
    assert "Samples of 40 points" in out
    assert "\n40 points: one sample of all, in place of 2 of 99\n" in out
    measured = report("hyperbolicity", "points.npy", "--size", "99", "--draws", "2", capsys=capsys)
    row = measured["rows"]["points.npy"]
    assert (row["size"], row["draws"], measured["asked"]) == (40, 1, {"size": 99, "draws": 2})


def test_a_tree_is_below_its_control(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    depth = 6  # every node of a binary tree has its ancestors' branches as coordinates: distances are nearly a tree's
    nodes = [f"{n:b}"[1:] for n in range(1, 2**depth)]
    table = {prefix: i for i, prefix in enumerate(nodes)}
    points = np.zeros((len(nodes), len(nodes)))
    for i, node in enumerate(nodes):
        points[i, [table[node[:k]] for k in range(len(node) + 1)]] = 1
    np.save("tree.npy", points)
    row = report("hyperbolicity", "tree.npy", "--size", "30", "--draws", "2", capsys=capsys)[
        "rows"
    ]["tree.npy"]
    assert row["below_control"] and row["mean"] < row["control"]["mean"]


def test_convert(place, tmp_path, capsys):
    size = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
    encoder = BertModel(BertConfig(vocab_size=260, max_position_embeddings=64, **size)).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    tiny.tokenizer().save_pretrained(tmp_path / "encoder")
    line = ("convert", str(tmp_path / "encoder"))
    settings = ("--to", "hat", "--set", "segment_length=16", "--set", "max_length=64")
    done = report(*line, "--output", str(tmp_path / "hat"), *settings, capsys=capsys)
    assert done["class"] == "HatModel" and done["tokenizer"]
    model = AutoModel.from_pretrained(tmp_path / "hat")
    assert (
        sum(p.numel() for p in model.parameters())
        == done["parameters"]["after"]
        > done["parameters"]["before"]
    )
    assert model.config.segment_length == 16
    assert (
        main(
            [
                *line,
                "--output",
                str(tmp_path / "shared"),
                "--to",
                "collaborative",
                "--set",
                "rank=32",
            ]
        )
        == 0
    )
    assert "It loads with from_pretrained after `import hf_hyperattn`" in capsys.readouterr().out
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        shared = AutoModel.from_pretrained(tmp_path / "shared").eval()(ids).last_hidden_state
        assert (
            shared - encoder(ids).last_hidden_state
        ).abs().max() < 0.2  # at full rank, by a decomposition
    assert (tmp_path / "shared" / "README.md").is_file()


def test_a_tokenizer_is_none_or_whole(tmp_path, capsys):
    size = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    BertModel(BertConfig(vocab_size=260, **size)).save_pretrained(tmp_path / "encoder")
    line = [
        "convert",
        str(tmp_path / "encoder"),
        "--output",
        str(tmp_path / "out"),
        "--to",
        "collaborative",
        "--set",
        "rank=8",
    ]
    shared = ["inject", str(tmp_path / "encoder"), "--mechanism", "collaborative", "--rank", "8"]
    said = f"no tokenizer: {tmp_path / 'encoder'} has none\n"
    assert main(line) == main(shared) == 0 and capsys.readouterr().out.count(said) == 2
    assert not report(*line, "--force", capsys=capsys)["tokenizer"]
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()
    tiny.tokenizer().save_pretrained(tmp_path / "encoder")
    (tmp_path / "encoder" / "tokenizer.json").write_text("{")
    for wrong in ([*line, "--force"], shared):
        assert (
            main(wrong) == 2 and "not a model that Transformers can load" in capsys.readouterr().err
        )


def arguments(place, *words, texts=()):
    files = map(str, texts or [place / "text.txt"])
    line = ["compare", str(place / "model"), "--text", *files, "--length", "16", *words]
    args = build_parser().parse_args(line)
    args.argv = line
    compare.check_options(args)
    return args


def test_runs_start_alike_and_have_as_many_parameters(place):
    args = arguments(place, "--mechanisms", "cone,head_fusion", "--rank", "4", "--steps", "2")
    trial, _ = compare.prepare_trial(args)
    for recipe in args.mechanisms[1:]:
        survey_recipe(trial, recipe)
    models = {recipe: build_trainable(trial, recipe, 0) for recipe in args.mechanisms}
    sizes = {
        r: sum(p.numel() for p in m.parameters() if p.requires_grad) for r, m in models.items()
    }
    unit = max(size for _, size in trial.targets)
    assert all(abs(size - sizes[NONE]) <= unit / 2 for size in sizes.values()), sizes
    assert choose_ranks(trial, NONE) == {name: 4 for name, _ in trial.targets}
    first = [{n: p for n, p in m.named_parameters() if "lora_A" in n} for m in models.values()]
    name = next(iter(first[0]))
    assert all(torch.equal(first[0][name], other[name]) for other in first[1:])
    ids = trial.train[:16][None]
    with torch.no_grad():
        logits = [m.eval()(ids).logits for m in models.values()]
    assert all((other - logits[0]).abs().max() < 1e-4 for other in logits)


def test_texts_are_cut_in_two(place):
    trial, request = compare.prepare_trial(
        arguments(place, "--mechanisms", "cone", "--held-out", "3", "--steps", "2")
    )
    ids = tiny.tokenizer()((place / "text.txt").read_text())["input_ids"]
    cut = len(ids) - len(ids) // 5
    assert trial.train.tolist() == ids[:cut] and trial.held_out.tolist() == ids[cut : cut + 48]
    assert (request["trained_on"], request["read"], request["mechanisms"]) == (
        cut,
        48,
        ["none", "cone"],
    )


def test_every_text_is_read(place, tmp_path):
    names = [f"{i}.txt" for i in range(5)]
    for name in names:
        (tmp_path / name).write_text((place / "text.txt").read_text()[:4000] + name)
    line = ("--mechanisms", "cone", "--held-out", "7", "--steps", "2")
    trial, request = compare.prepare_trial(
        arguments(place, *line, texts=[tmp_path / name for name in names])
    )
    assert request["read"] == len(trial.held_out) == 7 * 16
    ends = [tiny.tokenizer()((tmp_path / name).read_text())["input_ids"] for name in names]
    starts = [ids[len(ids) - len(ids) // 5 :][:16] for ids in ends]
    assert [trial.held_out[16 * i :][:16].tolist() for i in (0, 2, 4, 5, 6)] == starts


def test_runs_of_another_model_or_budget_are_not_taken_up(place, tmp_path):
    words = ("--mechanisms", "cone", "--out", str(tmp_path / "out"))
    args = arguments(place, *words, "--budget", "20s")
    _, request = compare.prepare_trial(args)
    state = compare.open_state(args, request)
    compare.save_state(state | {"steps": 7})
    assert compare.open_state(arguments(place, *words), request)["steps"] == 7
    with pytest.raises(ValueError, match="budget differ"):
        compare.open_state(arguments(place, *words, "--budget", "2h"), request)
    shutil.copytree(place / "model", tmp_path / "model")
    args.model = str(tmp_path / "model")
    assert compare.prepare_trial(args)[1]["weights"] == request["weights"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.model.norm.weight.data.mul_(1.01)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="weights differ"):
        compare.open_state(args, compare.prepare_trial(args)[1])


def test_a_card_of_ones_own_stays_in_any_encoding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "make_card", lambda report: compare.SIGN + " new")
    args, mine = argparse.Namespace(out=str(tmp_path)), "Größe".encode("latin-1")
    (tmp_path / "README.md").write_bytes(mine)
    compare.write_results(args, {"rows": {}})
    assert (tmp_path / "README.md").read_bytes() == mine and "kept" in capsys.readouterr().err
    (tmp_path / "README.md").write_text(f"{compare.SIGN} old")
    compare.write_results(args, {"rows": {}})
    assert (tmp_path / "README.md").read_text().endswith("new")


COMPARE = [
    "compare",
    "model",
    "--text",
    "text.txt",
    "--mechanisms",
    "cone,none",
    "--steps",
    "2",
    "--length",
    "16",
]
COMPARE += ["--held-out", "2", "--rank", "2", "--layers", "last-1"]


def test_compare_writes_its_verdict(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    out = tmp_path / "out"
    measured = report(*COMPARE, "--out", str(out), capsys=capsys)
    row = measured["rows"]["cone"]
    assert row["against_none"] == vars(paired(row["losses"], measured["rows"]["none"]["losses"]))
    assert (
        row["verdict"] in ("better", "worse", "undecided")
        and measured["seeds"] == len(row["losses"]) == 3
    )
    assert measured["windows_read"] == 2 and not any(
        said.startswith("Only") for said in compare.describe_result(measured)
    )
    fewer = compare.describe_result(measured | {"held_out": 3})
    assert (
        "Only 2 of 3 held-out windows were read, because the last fifth of a text holds fewer than its share."
        in fewer
    )
    card = (out / "README.md").read_text()
    assert "| cone |" in card and "paired t test" in card and str(tmp_path) not in card
    (fact,) = json.loads((out / "facts-cone.json").read_text())["results"]
    assert math.isfinite(Result(**fact).value) and str(tmp_path) not in fact["command"]
    (out / "README.md").write_text("mine")
    assert main([*COMPARE, "--out", str(out)]) == 0
    assert (
        out / "README.md"
    ).read_text() == "mine" and "minus none (95 %)" in capsys.readouterr().out
    assert main([*COMPARE, "--seeds", "4", "--out", str(out)]) == 2
    assert "of another comparison (seeds differ)" in capsys.readouterr().err


@pytest.mark.slow
def test_compare_goes_on_where_it_was_interrupted(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    out = tmp_path / "out"
    whole = report(*COMPARE, capsys=capsys)
    train, count = compare.train_run, []

    def stopped(*parts):
        if len(count) == 3:
            raise KeyboardInterrupt
        count.append(parts[1:3])
        return train(*parts)

    monkeypatch.setattr(compare, "train_run", stopped)
    assert main([*COMPARE, "--out", str(out)]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    state = json.loads((out / compare.STATE).read_text())
    assert len(state["runs"]) == 3 and [p.name for p in out.iterdir()] == [compare.STATE]
    monkeypatch.setattr(compare, "train_run", train)
    resumed = report(*COMPARE, "--out", str(out), capsys=capsys)
    assert resumed["rows"]["cone"]["losses"] == pytest.approx(
        whole["rows"]["cone"]["losses"], abs=1e-5
    )


@pytest.mark.slow
def test_compare_within_a_budget(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    line = [
        "compare",
        "model",
        "--text",
        "text.txt",
        "--mechanisms",
        "cone+hype",
        "--length",
        "16",
        "--rank",
        "2",
    ]
    measured = report(*line, "--budget", "20s", capsys=capsys)
    assert measured["steps"] >= compare.LEAST_STEPS and measured["seconds"] < 60
    assert measured["rows"]["none"]["loss"] < measured["stock_loss"]
    monkeypatch.setattr(compare, "SPARE", 1e-9)
    assert main([*line, "--budget", "20s"]) == 2
    assert "leaves 0 steps a run; allowed: 10 or more" in capsys.readouterr().err


def test_the_verdict():
    assert (
        compare.decide_verdict(-0.1, 0.01) == "better"
        and compare.decide_verdict(0.1, 0.01) == "worse"
    )
    assert (
        compare.decide_verdict(-9, 0.05)
        == compare.decide_verdict(0, 1.0)
        == compare.decide_verdict(0, math.nan)
        == "undecided"
    )


def test_a_mechanism_that_adds_more_than_lora_has(place):
    args = arguments(place, "--mechanisms", "cone", "--rank", "1", "--steps", "2")
    trial = Trial(
        args, torch.zeros(0), torch.zeros(0), [], 16, [("a", 100), ("b", 100)], {"cone": 120}
    )
    with pytest.raises(ValueError, match="adds 120 parameters, more than LoRA of rank 1"):
        choose_ranks(trial, "cone")
