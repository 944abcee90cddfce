"""Every block of Python in README.md and docs/ runs alone, as written.

It runs in a folder in which the Hub's models are tiny random ones of the same names, which `from_pretrained` prefers
to the Hub's; what a page publishes is saved into such a folder. No code of a page is changed. Blocks of
CONTRIBUTING.md and of docs/your_own_score.md are files of one package and have tests of their own
(tests/test_contributing.py, test_your_own_score.py).
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaForCausalLM
from transformers.utils.hub import PushToHubMixin

import hf_hyperattn as ha
from tests.cli import tiny

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").glob("**/*.md")} - {ROOT / "docs" / "your_own_score.md"})]
BLOCKS = [
    (f"{page.relative_to(ROOT)}:{text[: block.start()].count(chr(10)) + 2}", block[1])
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
]
#: Packages that `make test` does not install, by a word of the blocks that need them.
EXTRAS = {
    "onnx": ("onnxscript", "onnxruntime"),
    "from trl ": ("trl",),
    "from sentence_transformers ": ("sentence_transformers",),
}
#: The first Transformers that a block was run with, by a word of it.
SINCE = {'"backend": "fp8"': "5.23"}
MARKS = {**dict.fromkeys(EXTRAS, pytest.mark.extras), 'device="cuda"': pytest.mark.gpu}
#: Blocks that read what another block wrote: words of both.
AFTER = {'torch.export.load("model.pt2")': 'torch.export.save(program, "model.pt2")'}


def checkpoints(folder: Path) -> None:
    """What pages take as given: two models of the Hub, and what their readers saved or published before."""
    for name in ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        tiny.save(folder / name, num_hidden_layers=3, max_position_embeddings=640)
    encoder = folder / "sentence-transformers/all-MiniLM-L6-v2"
    heads = dict(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=160, hidden_size=192)
    BertModel(BertConfig(vocab_size=260, intermediate_size=48, **heads)).save_pretrained(encoder)
    tokens = tiny.tokenizer()
    tokens.add_special_tokens({"pad_token": "<s>", "cls_token": "<s>", "sep_token": "</s>"})
    tokens.save_pretrained(encoder)

    stock = folder / "HuggingFaceTB/SmolLM2-135M"
    patched = ha.patch_model(AutoModelForCausalLM.from_pretrained(stock), ha.ConeConfig(), layers="last-third")
    for name in ("smollm2-cone", "your-name/SmolLM2-135M-cone", "smollm2-cone-export"):
        patched.save_pretrained(folder / name)
    from peft import get_peft_model

    instruct = "HuggingFaceTB/SmolLM2-135M-Instruct"  # an adapter remembers this name of its base
    for name in ("the/adapter", "your-name/SmolLM2-135M-cone-lora"):
        base = LlamaForCausalLM.from_pretrained(folder / instruct)
        base.config._name_or_path = base.name_or_path = instruct
        config = ha.HyperLoraConfig(mechanisms=[ha.ConeConfig()], layers="last-third", r=8, task_type="CAUSAL_LM")
        get_peft_model(base, config).save_pretrained(folder / name)
        tiny.tokenizer().save_pretrained(folder / name)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    checkpoints(folder)
    return folder


@pytest.mark.parametrize(
    "code",
    [pytest.param(code, id=at, marks=[m for word, m in MARKS.items() if word in code]) for at, code in BLOCKS],
)
def test_block(code, given, tmp_path, monkeypatch):
    shutil.copytree(given, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    publish = lambda self, repo_id, **settings: self.save_pretrained(repo_id)
    for cls in (PushToHubMixin, ha.HyperAttnConfig):
        monkeypatch.setattr(cls, "push_to_hub", publish)
    for package in (p for word, packages in EXTRAS.items() if word in code for p in packages):
        pytest.importorskip(package)
    for word, version in SINCE.items():
        if word in code and Version(transformers.__version__) < Version(version):
            pytest.skip(f"needs Transformers {version}")
    first = [other for word, earlier in AFTER.items() if word in code for _, other in BLOCKS if earlier in other]
    for source in [*first, code]:
        torch.manual_seed(0)
        exec(compile(source, "a page's block", "exec"), {"__name__": "__main__"})
