"""`hyperattn export --remote-code`: a patched checkpoint for machines without this package."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import hf_hyperattn as ha
from hf_hyperattn.address import install
from hf_hyperattn.integration.export.copy_sources import flat_copies
from hf_hyperattn.integration.export.repositories import export_remote_code
from hf_hyperattn.registry import MECHANISMS
from hyperattn_cli import main
from tests.integration.models import FAMILIES, difference, llama, perturb, run, text_inputs
from tests.integration.patching import toy_rooms

CONE = ha.ConeConfig(gamma=0.5)
COPIED = ("llama", "gpt2", "bert", "clip", "llava", "t5", "bart")
ROUTED = ("falcon",)
SLOW = ("clip", "llava", "bart")  # `make test-more` does them


def saved(directory: Path, family: str = "llama", **options):
    """A patched model that has learned something, saved; returns it with its inputs."""
    make, inputs = FAMILIES[family]
    model, inputs = ha.patch_model(make(), ha.HyperAttnConfig([CONE], **options)), inputs()
    perturb(model)
    model.save_pretrained(directory)
    return model, inputs


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Of a family: what a process without the package made of its export, and the model that was exported.

    A process answers for many families, since importing Transformers is most of its time.
    """
    known: dict = {}

    def of(family):
        if family not in known:
            root = tmp_path_factory.mktemp("exports")
            known.update(
                answers_of(root, [f for f in COPIED + ROUTED if (f in SLOW) == (family in SLOW)])
            )
        return known[family]

    return of


def answers_of(root: Path, families) -> dict:
    models = {}
    for family in families:
        own = (
            {"transformer.h.1.attn": [ha.ConeConfig(variant="penumbral")]}
            if family == "gpt2"
            else None
        )
        model, inputs = models[family] = saved(root / family / "source", family, overrides=own)
        export_remote_code(root / family / "source", root / family / "export")
        with torch.no_grad():
            expected = [t for t in model(**inputs).to_tuple() if isinstance(t, torch.Tensor)]
        torch.save((inputs, expected), root / family / "io.pt")
    script = Path(__file__).with_name("remote.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, str(script), *(str(root / family) for family in models)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=environment, timeout=250
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return {family: (answers[str(root / family)], *models[family]) for family in models}


def of_families(*families):
    return pytest.mark.parametrize(
        "family", [pytest.param(f, marks=[pytest.mark.slow] if f in SLOW else []) for f in families]
    )


@of_families(*COPIED)
def test_without_the_package_the_logits_are_the_same(family, elsewhere):
    answer, model, inputs = elsewhere(family)
    assert answer["error"] is None
    assert answer["same"] and answer["saved again"] and answer["remote"]
    assert answer["class"] == type(model).__name__ and answer["beneath"] <= 1e-4
    assert "lacks 1 of the" in answer["lacking"] and "hyper.cone.gate" in answer["lacking"]
    if answer["generated"] is not None:
        expected = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert answer["generated"] == expected[0].tolist()


@of_families(*ROUTED)
def test_where_code_cannot_be_copied_the_package_is_named(family, elsewhere):
    answer = elsewhere(family)[0]
    assert (
        "ImportError" in answer["error"] and f"install hf_hyperattn: {install()}" in answer["error"]
    )


@of_families(*COPIED, *ROUTED)
def test_without_trust_the_load_fails_and_names_us(family, elsewhere):
    assert "hf_hyperattn" in elsewhere(family)[0]["untrusted"]


def test_with_the_package_an_export_is_a_checkpoint_as_any_other(tmp_path):
    model, inputs = saved(tmp_path / "source")
    export_remote_code(tmp_path / "source", tmp_path / "export")
    expected = run(model, inputs)
    plain = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert type(plain) is hf.LlamaForCausalLM
    trusted = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert type(trusted).__module__.startswith("transformers_modules.")
    for again in (plain, trusted):
        assert difference(expected, run(again, inputs)) == 0
        assert ha.describe(again)["patched"] == 4
        ha.unpatch_model(again)
    assert difference(run(ha.unpatch_model(model), inputs), run(trusted, inputs)) == 0


def load_the_copies(directory: Path, monkeypatch):
    """The model as it loads where the package is not installed, but in this process."""
    with monkeypatch.context() as patch:
        patch.setitem(
            sys.modules, "hf_hyperattn", None
        )  # `import hf_hyperattn` now raises ImportError
        patch.setattr(hf.PreTrainedModel, "post_init", hf.PreTrainedModel.post_init.__wrapped__)
        return hf.AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)


def test_the_copies_next_to_the_package_in_one_process(tmp_path, monkeypatch):
    """Both serve their own models."""
    model, inputs = saved(tmp_path / "source")
    expected = run(model, inputs)
    export_remote_code(tmp_path / "source", tmp_path / "copies")
    copied = load_the_copies(tmp_path / "copies", monkeypatch)
    hyper = copied.model.layers[0].self_attn.hyper
    assert type(hyper).__module__.startswith("transformers_modules.")
    assert difference(expected, run(copied, inputs)) == 0
    assert difference(expected, run(model, inputs)) == 0
    assert copied.config.hyperattn == model.config.hyperattn
    assert copied.config._attn_implementation.startswith("hf_hyperattn_")


def test_what_is_in_an_export(tmp_path):
    saved(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    export_remote_code(tmp_path / "source", tmp_path / "export")
    before, after = ({p.name: p for p in (tmp_path / d).iterdir()} for d in ("source", "export"))
    for name in before.keys() - {"config.json"}:
        assert before[name].read_bytes() == after[name].read_bytes()
    old, new = (json.loads(files["config.json"].read_text()) for files in (before, after))
    assert new == old | {"auto_map": new["auto_map"]}
    assert new["auto_map"]["AutoModelForCausalLM"] == "modeling_hyperattn.LlamaForCausalLM"
    assert new["auto_map"]["AutoModel"] == "modeling_hyperattn.LlamaModel"
    manifest = json.loads(after.pop("hyperattn_manifest.json").read_text())
    assert manifest["sha256"] == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in after.items()
    }
    for name in after.keys() - before.keys():
        assert re.fullmatch(r"(modeling_hyperattn|hyperattn_\w+)\.py", name)
        text = after[name].read_text()
        assert (
            "hyperattn export" in text.splitlines()[0]
            and "Apache License, Version 2.0" in text.splitlines()[1]
        )
        compile(text, name, "exec")
        assert_imports_resolve(text, after.keys())


def assert_imports_resolve(text: str, files) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and f"{node.module}.py" in files, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module.split(".")[0] not in ("hf_hyperattn", "model_patches", "hub_cards")


def test_an_export_is_exported_again_the_same(tmp_path):
    saved(tmp_path / "source")
    export_remote_code(tmp_path / "source", tmp_path / "1")
    export_remote_code(tmp_path / "1", tmp_path / "2")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "12")
    assert one == two


def test_a_mechanism_of_another_package_is_imported_from_there(tmp_path):
    known = set(MECHANISMS)
    toy_rooms.register_toys()
    try:
        model = ha.patch_model(llama(), toy_rooms.ToyCosineConfig())
        model.save_pretrained(tmp_path / "source")
        assert export_remote_code(tmp_path / "source", tmp_path / "export").packages == [
            "hf_hyperattn",
            "tests.integration.patching.toy_rooms",
        ]
    finally:
        for name in set(MECHANISMS) - known:
            del MECHANISMS[name]
    text = (tmp_path / "export" / "modeling_hyperattn.py").read_text()
    assert (
        "\n    import hf_hyperattn" in text
        and "\n    import tests.integration.patching.toy_rooms" in text
    )
    assert not list((tmp_path / "export").glob("hyperattn_*.py"))


# what is refused, and what is left then


def test_what_is_there_is_kept_unless_forced(tmp_path):
    saved(tmp_path / "source")
    (tmp_path / "export").mkdir()
    export_remote_code(tmp_path / "source", tmp_path / "export")  # an empty directory is taken
    (tmp_path / "export" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="export is not empty; allowed: .* or --force"):
        export_remote_code(tmp_path / "source", tmp_path / "export")
    assert (tmp_path / "export" / "mine.txt").read_text() == "keep"
    export_remote_code(tmp_path / "source", tmp_path / "export", force=True)
    assert not (tmp_path / "export" / "mine.txt").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "source"]


def test_force_replaces_a_checkpoint_and_nothing_else(tmp_path):
    source = tmp_path / "home" / "source"
    saved(source)
    (tmp_path / "home" / "config.json").write_text("{}")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    for target, message in (
        (source, "source is or holds .*source, which would be lost; allowed: an absent"),
        (source.parent, "home is or holds .*source, which would be lost"),
        (
            tmp_path / "other",
            "other holds no checkpoint .no config.json. but other files; allowed: an absent",
        ),
    ):
        before = sorted(target.rglob("*"))
        with pytest.raises(ValueError, match=message):
            export_remote_code(source, target, force=True)
        assert sorted(target.rglob("*")) == before


@pytest.mark.parametrize("there", [True, False])
def test_an_export_that_fails_leaves_what_was_there(there, tmp_path, monkeypatch):
    saved(tmp_path / "source")
    if there:
        export_remote_code(tmp_path / "source", tmp_path / "export")
    before = {p.name: p.read_bytes() for p in (tmp_path / "export").glob("*")}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        export_remote_code(tmp_path / "source", tmp_path / "export", force=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "export").glob("*")} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "source"][not there :]


def spoil(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def link(directory: Path, name: str, to: str | Path) -> None:
    (directory / name).symlink_to(to)


def moved(directory: Path, name: str) -> None:
    """The file outside of the checkpoint, and a link to it in its place."""
    outside = directory.parent.parent / f"{directory.parent.name}-outside.json"
    link(directory, name, (directory / name).rename(outside))


SOURCES = {
    "a model that is not patched": (lambda d: spoil(d, hyperattn=None), "holds no patched model"),
    "parameters used by name": (
        lambda d: spoil(d, hyperattn=ha.HyperAttnConfig([CONE]).to_dict()),
        "holds no patched model",
    ),
    "an adapter": (
        lambda d: (d / "adapter_config.json").write_text("{}"),
        "holds an adapter; merge it",
    ),
    "remote code of its own": (
        lambda d: spoil(d, auto_map={"AutoModel": "mine.Model"}),
        "remote code of its own",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "a folder without config.json"),
    "a hostile record": (
        lambda d: spoil(d, hyperattn={"format": 99}),
        "format 99, this hf_hyperattn reads",
    ),
    "hosts that are not there": (
        lambda d: spoil(d, hyperattn=ha.HyperAttnConfig([CONE], hosts=["nowhere"]).to_dict()),
        "names the host 'nowhere'",
    ),
    "an unknown class": (
        lambda d: spoil(d, architectures=["os.system"]),
        "names the class 'os.system', which none",
    ),
    "an auto_map that is no object": (
        lambda d: spoil(d, auto_map=["x"]),
        "auto_map is .*allowed: an object",
    ),
    "a class that is no list": (
        lambda d: spoil(d, architectures={"x": 1}),
        "architectures is .*a list of str",
    ),
    "a million layers": (
        lambda d: spoil(d, num_hidden_layers=10**6),
        "num_hidden_layers is 1000000; allowed",
    ),
    "weights cut short": (
        lambda d: cut(d / "model.safetensors"),
        "model.safetensors is damaged: .*whole safe",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "holds no weights; allowed: model.safetensors",
    ),
    "pickled weights": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "holds no weights; allowed: model.safetensors",
    ),
    "a shard that is not there": (
        lambda d: (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-2.safetensors"}}'
        ),
        "names 'model-2.safetensors', which is not there",
    ),
    "an index of lists": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["x"]}}'),
        r"model.safetensors.index.json has weight_map=\{'a': \['x'\]\}; allowed: an object of tensors",
    ),
    "an index that leads out of it": (
        lambda d: (d / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
        "names '../x.safetensors', which is not there",
    ),
    "a link out of it": (
        lambda d: link(d, "tokenizer.json", __file__),
        "tokenizer.json is a link out of the",
    ),
    "a config that is a link out of it": (
        lambda d: moved(d, "config.json"),
        "config.json is a link out of the",
    ),
    "a folder for a file": (lambda d: (d / "vocab.json").mkdir(), "vocab.json is no regular file"),
    "a pipe for a file": (lambda d: os.mkfifo(d / "merges.txt"), "merges.txt is no regular file"),
    "settings that are no JSON": (
        lambda d: (d / "tokenizer_config.json").write_text("{"),
        "cannot read .*tok",
    ),
    "no class": (lambda d: spoil(d, architectures=None), "names the class None"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_cannot_be_exported(case, tmp_path, capsys):
    saved(tmp_path / "source")
    change, message = SOURCES[case]
    change(tmp_path / "source")
    assert (
        main(["export", "--remote-code", str(tmp_path / "source"), str(tmp_path / "export")]) == 2
    )
    error = capsys.readouterr().err
    assert (
        re.search(message, error)
        and error.count("\n") == 1
        and error.startswith("hyperattn export: error: ")
    )
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_source_that_does_not_exist(name, tmp_path, capsys):
    assert main(["export", "--remote-code", name, str(tmp_path / "export")]) == 2
    assert (
        f"{name}: no such folder; allowed: the folder of a saved model or a Hub id"
        in capsys.readouterr().err
    )


def test_the_command(tmp_path, capsys):
    _, _ = saved(tmp_path / "source")
    out = tmp_path / "export"
    assert main(["export", "--remote-code", str(tmp_path / "source"), str(out)]) == 0
    printed = capsys.readouterr().out
    assert (
        f'from_pretrained("{out}", trust_remote_code=True)' in printed
        and "nothing of ours" in printed
    )
    saved(tmp_path / "routed", "falcon")
    assert main(["export", "--remote-code", str(tmp_path / "routed"), str(out), "--force"]) == 0
    assert f"cannot be copied (hf_hyperattn): {install()}" in capsys.readouterr().out
    for more in ([], ["--remote-code", "--kernel"]):
        assert main(["export", str(tmp_path / "source"), str(out), *more]) == 2
        assert "allowed: one of --remote-code and --kernel" in capsys.readouterr().err


def test_long_inputs_run_in_the_copied_blockwise_engine(tmp_path, monkeypatch):
    model, _ = saved(tmp_path / "source")
    export_remote_code(tmp_path / "source", tmp_path / "copies")
    copied = load_the_copies(tmp_path / "copies", monkeypatch)
    inputs = {k: v.repeat(1, 20) for k, v in text_inputs().items()}
    # the compiled tiles, which the copies do not bring, round otherwise
    assert difference(run(model, inputs), run(copied, inputs)) < 1e-5
    gradients = []
    for one in (model, copied):
        one(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({n: p.grad for n, p in one.named_parameters() if ".hyper." in n})
    assert difference(*gradients) < 1e-5


# what goes along, and what does not

EVIL = "raise SystemExit('code of others has run')\n"


def test_no_code_of_others_goes_along(tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "export"
    saved(source)
    (source / "custom_generate").mkdir()
    (source / "additional_chat_templates").mkdir()
    for name in (
        "tokenization_mine.py",
        "custom_generate/generate.py",
        "hyperattn_evil.py",
        "training_args.bin",
    ):
        (source / name).write_text(EVIL)
    (source / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    (source / "secret").symlink_to(tmp_path)
    named = {
        "auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", None]},
        "tokenizer_class": "Mine",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    deep = {
        "image_processor": {"auto_map": {"AutoImageProcessor": "tokenization_mine.Mine"}, "size": 3}
    }
    (source / "processor_config.json").write_text(json.dumps(deep))
    spoil(source, custom_pipelines={"x": {"impl": "tokenization_mine.Mine"}})
    generation = source / "generation_config.json"
    generation.write_text(
        json.dumps(json.loads(generation.read_text()) | {"custom_generate": "some/where"})
    )
    assert main(["export", "--remote-code", str(source), str(out)]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("left out, as ")]
    for name in (
        "custom_generate",
        "secret",
        "tokenization_mine.py",
        "training_args.bin",
        "config.json: custom_pipelines",
        "generation_config.json: custom_generate",
        "processor_config.json: auto_map",
        "tokenizer_config.json: auto_map",
    ):
        assert repr(name) in line
    files = {path.relative_to(out).as_posix(): path for path in out.rglob("*") if path.is_file()}
    assert not any(EVIL in path.read_text(errors="replace") for path in files.values())
    assert not any(path.is_symlink() for path in out.rglob("*"))
    for name, path in files.items():
        if path.suffix == ".json":
            content = path.read_text()
            assert "tokenization_mine" not in content and "custom_generate" not in content, name
    assert json.loads(files["processor_config.json"].read_text()) == {
        "image_processor": {"size": 3}
    }
    assert "additional_chat_templates/tool.jinja" in files
    assert set(json.loads(files["hyperattn_manifest.json"].read_text())["sha256"]) == set(files) - {
        "hyperattn_manifest.json"
    }


def test_links_within_the_hubs_cache_are_followed(tmp_path):
    """A snapshot there holds links to the blobs of the same repository, and to no other."""
    saved(tmp_path / "plain")
    repository = tmp_path / "models--me--mine"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "plain").iterdir():
        shutil.copy(path, repository / "blobs" / f"of-{path.name}")
        link(snapshot, path.name, Path("..", "..", "blobs", f"of-{path.name}"))
    for source, target in ((tmp_path / "plain", tmp_path / "1"), (snapshot, tmp_path / "2")):
        export_remote_code(source, target)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in "12")
    assert one == two
    other = tmp_path / "models--me--other" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_text("{}")
    link(snapshot, "vocab.json", other / "secret")
    with pytest.raises(ValueError, match="vocab.json is a link out of the checkpoint"):
        export_remote_code(snapshot, tmp_path / "3")
    assert not (tmp_path / "3").exists()


def test_functions_are_imported_from_the_copies_of_their_modules():
    files = flat_copies(["hf_hyperattn.mechanisms.hyperbolic.reference"], "")
    assert (
        "from .hyperattn_engines_cpu import norms\n"
        in files["hyperattn_mechanisms_hyperbolic_reference.py"]
    )
    assert "from .hyperattn_engines_cpu_kernels import norms" in files["hyperattn_engines_cpu.py"]
