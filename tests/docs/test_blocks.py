"""The blocks of every page of README.md and docs/ run as a reader runs them: in order, in one folder, as written.

The folder holds the Hub's models of the pages, as tiny random models under the same names; `from_pretrained` prefers a
folder to the Hub. Nothing else is there at the start: whatever a block loads, an earlier block of its page has saved.
`push_to_hub` saves into the folder, and `hyperattn inject` takes every result for faster. Each block is a new Python
session, so that a reader can start at any of them. Commands of `bash` and `sh` blocks run in between if they need
neither the Hub nor minutes (`LOCAL_COMMANDS`).

CONTRIBUTING.md and docs/your_own_score.md hold the files of one package and have tests of their own
(tests/test_contributing.py, test_your_own_score.py).
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, BertConfig, BertModel
from transformers.utils.hub import PushToHubMixin

import hf_hyperattn as ha
from hf_hyperattn import cli
from hyperattn_cli.commands import inject
from tests.cli import tiny
from tests.oracles.marks import NO_NATIVE_ADAPTERS, has_native_adapters

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted({*(ROOT / "docs").glob("**/*.md")} - {ROOT / "docs" / "your_own_score.md"}),
]
#: Packages that `make test` does not install, by a word of the blocks that need them.
EXTRAS = {
    "onnx": ("onnxscript", "onnxruntime"),
    "from trl ": ("trl",),
    "from sentence_transformers ": ("sentence_transformers",),
}
#: The first Transformers that a block was run with, by a word of it.
SINCE = {'"backend": "fp8"': "5.23"}
#: The marker of a block that `make test` cannot run, by a word of it.
MARKERS = {**dict.fromkeys(EXTRAS, "extras"), 'device="cuda"': "gpu"}
#: Pages that train several models.
SLOW = ("docs/tutorials/trainer.md",)
#: Commands that read and write local folders only, and take seconds.
LOCAL_COMMANDS = re.compile(
    r"hyperattn (recover|export --remote-code|card|(inject|look) HuggingFaceTB|push .*--dry-run)"
)


class Block(NamedTuple):
    page: str
    line: int
    language: str
    source: str

    @property
    def marker(self) -> str | None:
        """The marker of the tests that may run this block; None for every test."""
        return next((marker for word, marker in MARKERS.items() if word in self.source), None)

    def missing(self) -> str | None:
        """The reason why this environment cannot run the block; None if it can."""
        for word, version in SINCE.items():
            if word in self.source and Version(transformers.__version__) < Version(version):
                return f"needs Transformers {version}"
        return None


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page.relative_to(ROOT).as_posix(),
            line=text[: block.start()].count("\n") + 2,
            language=block[1],
            source=block[2],
        )
        for block in re.finditer(r"^```(python|bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def list_cases() -> list:
    """One case a page, and one more for each marker that some of its blocks need."""
    cases = []
    for page in PAGES:
        blocks = read_blocks(page)
        for marker in sorted({b.marker or "" for b in blocks if b.language == "python"}):
            chosen = [b for b in blocks if b.marker in (None, marker)]
            name = chosen[0].page + (f"-{marker}" if marker else "")
            marks = [getattr(pytest.mark, marker)] if marker else []
            if chosen[0].page in SLOW:
                marks.append(pytest.mark.slow)
            cases.append(pytest.param(chosen, id=name, marks=marks))
    return cases


def save_hub_models(folder: Path) -> None:
    """Save tiny models under the names of the Hub's models that pages begin with."""
    for name in ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        tiny.save(folder / name, num_hidden_layers=3, max_position_embeddings=640)
        weaken_attention(folder / name)
    encoder = folder / "sentence-transformers/all-MiniLM-L6-v2"
    heads = dict(
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=160, hidden_size=192
    )
    BertModel(BertConfig(vocab_size=260, intermediate_size=48, **heads)).save_pretrained(encoder)
    tokens = tiny.tokenizer()
    tokens.add_special_tokens({"pad_token": "<s>", "cls_token": "<s>", "sep_token": "</s>"})
    tokens.save_pretrained(encoder)


def weaken_attention(folder: Path) -> None:
    """Scale what attention adds: `inject` finds rules within its budget then, which random models hardly have."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.01
    model.save_pretrained(folder)


def run_python(block: Block) -> None:
    torch.manual_seed(0)
    # Empty lines before it give a traceback the line numbers of the page.
    code = compile("\n" * (block.line - 1) + block.source, str(ROOT / block.page), "exec")
    exec(code, {"__name__": "__main__"})


def read_commands(block: Block) -> list[str]:
    return block.source.replace("\\\n", " ").splitlines()


def run_commands(block: Block) -> None:
    for line in read_commands(block):
        if LOCAL_COMMANDS.match(line):
            code = cli.main(shlex.split(line, comments=True)[1:])
            assert not code, f"{block.page}:{block.line}: {line}"


def test_every_command_of_the_tutorials_runs():
    blocks = [b for page in PAGES if page.parent.name == "tutorials" for b in read_blocks(page)]
    lines = [line for b in blocks if b.language != "python" for line in read_commands(b)]
    assert lines and all(
        LOCAL_COMMANDS.match(line) or line.startswith("hyperattn push ") for line in lines
    )


@pytest.mark.parametrize("blocks", list_cases())
def test_page(blocks, tmp_path, monkeypatch):
    for package in (
        p for b in blocks for word, ps in EXTRAS.items() if word in b.source for p in ps
    ):
        pytest.importorskip(package)
    if any(".add_adapter(" in block.source for block in blocks) and not has_native_adapters():
        pytest.skip(NO_NATIVE_ADAPTERS)
    save_hub_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    for cls in (PushToHubMixin, ha.HyperAttnConfig):
        monkeypatch.setattr(
            cls, "push_to_hub", lambda self, repo_id, **settings: self.save_pretrained(repo_id)
        )
    # Timings of tiny models on a busy machine say nothing, and must not decide whether a checkpoint is written.
    monkeypatch.setattr(inject, "is_faster", lambda seconds: True)
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path / "cache"))
    skipped = []
    for block in blocks:
        if block.missing():
            skipped.append(f"line {block.line} {block.missing()}")
        elif block.language == "python":
            run_python(block)
        else:
            run_commands(block)
    if skipped:
        pytest.skip("; ".join(skipped) + "; the other blocks ran")
