"""Serving features by mechanism: `python -m tests.integration.attention.serving` writes the table of docs/deploying.md.

Every feature must give each request what `generate` gives it alone: the same tokens, with log-probabilities to 1e-5.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import CompileConfig, ContinuousBatchingConfig, DynamicCache, GenerationConfig

import hf_hyperattn as ha
from hf_hyperattn.rules import Pages, Window
from tests.integration.attention.test_continuous_batching import SERVED, page_size, steep

PAGE = Path(__file__).parents[3] / "docs" / "deploying.md"
BEGIN = "<!-- python -m tests.integration.attention.serving -->\n"
END = "<!-- end of the table -->\n"

#: For each new token of a request, the token and its log-probability.
Answer = tuple[list[int], Tensor]

NEW = 6
TOKENS = torch.randint(5, 90, (64,), generator=torch.Generator().manual_seed(3)).tolist()
#: Longer than a step of 16 tokens, as long, shorter; four begin alike.
PROMPTS = [
    TOKENS[:45],
    TOKENS[20:23],
    TOKENS[:40] + [7, 8, 9],
    TOKENS[30:46],
    TOKENS[:24],
    TOKENS[50:55],
    TOKENS[:45] + [11],
    TOKENS[10:43],
]
#: The prompts of one batch of `generate`, which begin alike.
FEW = [TOKENS[:21], TOKENS[:16] + TOKENS[40:43]]
SHARED = 14  # tokens

SMALL = dict(page=2, near=2, sinks=1, top=1, chunk=4)
#: Rows of the table: family, and mechanisms.
ROWS: dict[str, tuple[str, list]] = {
    "cone": ("llama", [ha.ConeConfig()]),
    "hyperbolic": ("llama", [ha.HyperbolicConfig()]),
    "hype": ("llama", [ha.HypeConfig()]),
    "hsa": ("llama", [SERVED["hsa"]]),
    'sparse: windows, `query="own"`': (
        "llama",
        [ha.SparseConfig([Pages(**SMALL, query="own"), Window(near=3, sinks=1)] * 2)],
    ),
    'sparse: `query="first"`, `"previous"`': ("llama", [SERVED["pages, previous"]]),
    'sparse: `query="chunk"`': ("llama", [ha.SparseConfig(Pages(**SMALL, query="chunk"))]),
    "head_fusion": ("llama", [ha.HeadFusionConfig()]),
    "talking_heads": ("llama", [ha.TalkingHeadsConfig()]),
    "mkl": ("llama", [ha.MklConfig()]),
    "mkl, conditional": ("llama", [ha.MklConfig(kind="conditional")]),
    "trilinear": ("llama", [ha.TrilinearConfig(windows=(8, 4))]),
    "collaborative": ("gpt2", [ha.CollaborativeConfig()]),
    "cone and hype": ("llama", [ha.ConeConfig(), ha.HypeConfig()]),
    "sparse and hype": ("llama", [SERVED["pages"], ha.HypeConfig()]),
}


def move(model):
    """Move all added parameters away from their start."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".hyper." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_model(row: str):
    """A patched model of a row, with its mechanisms at full strength."""
    family, mechanisms = ROWS[row]
    changes = {"num_hidden_layers": 2} if family == "llama" else {}
    with contextlib.redirect_stdout(io.StringIO()):
        return move(ha.patch_model(steep(family, **changes), *mechanisms, mode="replace"))


# Requests alone and together


def generate(model, prompts, new: int = NEW, mask=None, **how) -> list[Answer]:
    """The new tokens of one call of `generate`; prompts of different lengths are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    result = model.generate(
        ids,
        attention_mask=real,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )
    tokens = result.sequences[:, width:]
    logits = torch.stack(result.logits, 1).log_softmax(-1)
    chosen = logits.gather(2, tokens[..., None])[..., 0]
    return [(row.tolist(), numbers) for row, numbers in zip(tokens, chosen, strict=True)]


def generate_alone(model, prompts, **how) -> list[Answer]:
    """The new tokens of each prompt by itself."""
    return [generate(model, [prompt], **how)[0] for prompt in prompts]


def serve_batch(model, prompts, **changes) -> list[Answer]:
    """The new tokens of continuous batching, with little memory and steps of 16 tokens."""
    settings = {page_size(): 8, "num_blocks": 32, "max_batch_tokens": 16, **changes}
    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(return_logprobs=True, **settings),
        progress_bar=False,
    )
    assert not [r.error for r in found.values() if r.error]
    ordered = sorted(found.items(), key=lambda item: int(item[0].split("_")[-1]))
    return [(r.generated_tokens, torch.tensor(r.logprobs)) for _, r in ordered]


@contextlib.contextmanager
def open_manager(model):
    """A manager of continuous batching that runs until the end of the block."""
    small = ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=32, **{page_size(): 8}, return_logprobs=True
    )
    options = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(
        generation_config=options, continuous_batching_config=small
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)


def check_equal(found: list[Answer], expected: list[Answer]) -> None:
    """Check that tokens are equal, and log-probabilities to 1e-5."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, a), (_, b) in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Features


def pad_batch(model):
    check_equal(generate(model, FEW), generate_alone(model, FEW))


def use_static_cache(model):
    how = dict(cache_implementation="static", disable_compile=True)
    check_equal(generate(model, FEW, **how), generate_alone(model, FEW))


def compile_static_cache(model):
    """A compiled step, which is one graph; its operators run as they are."""
    torch._dynamo.reset()
    compiled = CompileConfig(backend="eager", fullgraph=True, dynamic=True, mode=None)
    compiled._compile_all_devices = True
    how = dict(cache_implementation="static", compile_config=compiled)
    check_equal(generate(model, FEW, **how), generate_alone(model, FEW))


def assist(model):
    """By a small model, and by the prompt's own tokens; both take tokens back."""
    expected = generate_alone(model, FEW[:1])
    family = "gpt2" if model.config.model_type == "gpt2" else "llama"
    check_equal(generate(model, FEW[:1], assistant_model=steep(family)), expected)
    check_equal(generate(model, FEW[:1], prompt_lookup_num_tokens=2), expected)


def reuse_prefix(model):
    """Copies of the cache of a prompt's beginning."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([FEW[0][:SHARED]]), past_key_values=cache)
    for prompt in FEW:
        found = generate(model, [prompt], past_key_values=copy.deepcopy(cache))
        check_equal(found, generate_alone(model, [prompt]))


def chunk_prompt(model):
    check_equal(
        generate_alone(model, FEW, prefill_chunk_size=6),
        generate_alone(model, FEW),
    )


def batch_continuously(model):
    """Prompts longer than a step, shared prefixes, and memory for two of the eight requests."""
    expected = generate_alone(model, PROMPTS)
    check_equal(serve_batch(model, PROMPTS), expected)
    check_equal(serve_batch(model, PROMPTS, num_blocks=8), expected)


#: Columns of the table.
FEATURES: dict[str, Callable] = {
    "padded batch": pad_batch,
    "static cache": use_static_cache,
    "static cache, compiled": compile_static_cache,
    "assisted decoding": assist,
    "prefix reuse": reuse_prefix,
    "chunked prefill": chunk_prompt,
    "continuous batching": batch_continuously,
}


# The table


class Messages(logging.Handler):
    """The warnings of this package."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(record.getMessage().removeprefix("hf_hyperattn: "))


def try_feature(row: str, feature: str) -> tuple[str, str]:
    """Return "equal", "warned" or "refused", and the message of the latter two."""
    model, messages = make_model(row), Messages()
    logging.getLogger("hf_hyperattn").addHandler(messages)
    try:
        FEATURES[feature](model)
    except AssertionError:
        # Another result is no fault if a warning says so.
        if not messages.texts:
            raise
        return "warned", messages.texts[-1]
    except Exception as error:
        # The compiler puts an error of ours into one of its own.
        said = re.search(r"(?:ValueError\(['\"])?([^\n]*; allowed: [^\n]*)", str(error))
        if said is None:
            raise
        return "refused", said[1].removesuffix('")').rpartition('ValueError("')[2]
    finally:
        logging.getLogger("hf_hyperattn").removeHandler(messages)
    return "equal", ""


def make_table() -> str:
    """Return the table and, below it, the messages of all refusals and warnings."""
    reasons: list[str] = []
    lines = [
        f"| mechanism | {' | '.join(FEATURES)} |",
        "| --- |" + " --- |" * len(FEATURES),
    ]
    for row in ROWS:
        cells = []
        for feature in FEATURES:
            outcome, reason = try_feature(row, feature)
            if reason and reason not in reasons:
                reasons.append(reason)
            cells.append(f"{outcome} [{reasons.index(reason) + 1}]" if reason else outcome)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    notes = [
        textwrap.fill(f"{i}. {reason}", 118, subsequent_indent="   ", break_on_hyphens=False)
        for i, reason in enumerate(reasons, 1)
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


def read_table() -> str:
    """Return the table that the page has."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table = make_table()
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1], encoding="utf-8")
    print(table)
