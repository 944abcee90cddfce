"""A kernel repository, as `hyperattn export --kernel` writes it, from which Transformers loads "org/repo:cone"."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers.integrations import hub_kernels

from hyperattn_cli import main
from tests.integration.models import bert, llama, text_inputs

NAMES = ("cone", "cone_penumbral", "hsa", "hyperbolic", "hype")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel") / "repo"
    assert main(["export", "all", str(folder), "--kernel"]) == 0
    return folder


def load(folder: Path, name: str = "a_kernel"):
    """Import a build as the `kernels` package does: its `__init__.py`, under a name that nothing else has."""
    place = folder / "build" / "torch-cpu"
    spec = importlib.util.spec_from_file_location(
        name, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(monkeypatch):
    """A hub of kernels: "org/repo" is what it is told to be. It stands for the package, which Transformers asks for in
    a version that few have; how that one is called is Transformers' own.
    """
    kernels = {}
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda repo, **options: kernels[repo])
    return kernels


def test_the_layout(repository):
    folders = {path.name for path in (repository / "build").iterdir()}
    assert folders == {"torch-cpu", "torch-cuda"}
    for folder in folders:
        metadata = json.loads((repository / "build" / folder / "metadata.json").read_text())
        assert metadata["backend"] == {"type": folder.removeprefix("torch-")}
        assert metadata["python-depends"] == [] and re.fullmatch(r"\w+", metadata["id"])
    code = [path.read_text() for path in (repository / "build" / "torch-cpu").glob("*.py")]
    assert not any(
        re.search(r"^\s*(import|from) (hf_hyperattn|model_patches|hub_cards)", text, re.M)
        for text in code
    )
    assert all(f"`{name}`" in (repository / "README.md").read_text() for name in NAMES)


def test_it_runs_what_the_package_runs_by_name(repository, hub):
    hub["org/repo"] = load(repository)
    inputs = text_inputs()
    for make in (llama, bert):
        for name in NAMES:
            model, other = make(), make()
            with torch.no_grad():
                for parameter in other.parameters():  # at the default 0.02 all attention is even
                    parameter.mul_(4 if parameter.dim() > 1 else 1)
            model.load_state_dict(other.state_dict())
            model.set_attn_implementation(name)
            other.set_attn_implementation(f"org/repo:{name}", allow_all_kernels=True)
            with torch.no_grad():
                out, again = model(**inputs)[0], other(**inputs)[0]
            visible = inputs["attention_mask"].bool()
            assert (out - again)[visible].abs().max() <= 1e-5, name
            if name == "hsa":
                continue  # texts of this length are open to the last token
            other.set_attn_implementation("sdpa")
            with torch.no_grad():
                assert (other(**inputs)[0] - again)[visible].abs().max() > 1e-3, name


def test_the_name_may_be_left_out_where_there_is_one(repository, hub, tmp_path):
    assert main(["export", "cone", str(tmp_path / "one"), "--kernel"]) == 0
    hub["org/one"], hub["org/repo"] = load(tmp_path / "one", "one_kernel"), load(repository)
    inputs = text_inputs()
    with torch.no_grad():
        out = {}
        for name in ("cone", "org/one", "org/one:cone"):
            torch.manual_seed(0)
            out[name] = llama(attn_implementation="eager")
            out[name].set_attn_implementation(name)
            out[name] = out[name](**inputs).logits[1]
        assert (out["cone"] - out["org/one"]).abs().max() <= 1e-6 and torch.equal(
            out["org/one"], out["org/one:cone"]
        )
        for wrong in ("org/repo", "org/repo:mkl"):
            model = llama()
            model.set_attn_implementation(wrong)
            with pytest.raises(
                ValueError, match=r"org/repo has no attention '(mkl)?'; allowed: org/repo:\{cone, "
            ):
                model(**inputs)


@pytest.mark.parametrize(
    "names, said", [("mkl", "no attention is called 'mkl'"), ("cone,", "''"), ("", "''")]
)
def test_names_that_are_none_are_refused(names, said, tmp_path, capsys):
    assert main(["export", names, str(tmp_path / "out"), "--kernel"]) == 2
    err = capsys.readouterr().err
    assert said in err and "allowed: all, cone, " in err and not (tmp_path / "out").exists()


WITHOUT = """
import sys
sys.modules.update(hf_hyperattn=None, model_patches=None, hub_cards=None)  # none of them can be imported
import torch, transformers
from transformers.integrations import hub_kernels
from importlib.util import module_from_spec, spec_from_file_location
place, model, out = sys.argv[1:]
spec = spec_from_file_location("a_kernel", place + "/__init__.py", submodule_search_locations=[place])
kernel = sys.modules["a_kernel"] = module_from_spec(spec)
spec.loader.exec_module(kernel)
hub_kernels.is_kernels_available, hub_kernels.get_kernel = (lambda: True), (lambda repo, **options: kernel)
model = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="org/repo:cone")
torch.save(model(torch.arange(5, 25)[None]).logits.detach(), out)
"""


@pytest.mark.slow
def test_it_needs_nothing_of_ours(repository, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    place = repository / "build" / "torch-cpu"
    line = [
        sys.executable,
        "-c",
        WITHOUT,
        str(place),
        str(tmp_path / "model"),
        str(tmp_path / "out.pt"),
    ]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="cone")
    with torch.no_grad():
        expected = model(torch.arange(5, 25)[None]).logits
    assert (torch.load(tmp_path / "out.pt") - expected).abs().max() <= 1e-6
