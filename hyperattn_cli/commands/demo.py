"""`hyperattn demo`: measure one model on one text with several kinds of attention.

The first part has one row per kind: original, cone patched in, cone instead of the dot product. The
second part reads a long text with sparse attention; see `demo_long`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_hyperattn
import hub_cards
from hf_hyperattn.analysis import (
    max_logit_difference,
    measure_generation,
    next_token_logits,
    perplexity,
)
from hf_hyperattn.engines import native
from hf_hyperattn.engines.cpu import library
from hf_hyperattn.integration.loading.checkpoint_files import errors_as, load_config
from hf_hyperattn.utils.folders import check_replaceable

from ..shared import smollm2
from ..shared.console import ProgressBar, print_table, show_progress
from ..shared.inputs import (
    count_threads,
    default_text,
    encode_text,
    positions_of,
    prefix_of,
    read_text,
    read_tokenizer,
    silence_transformers,
    window_of,
    write_checkpoint,
)
from ..shared.models import device_of
from . import demo_long

HEADER = ("attention", "perplexity", "largest logit change")
ABOUT_CONES = """\
Patched in: the cone score is added behind gates that start at 0. The output is unchanged until training
moves the gates. Compare it with a control on a text of yours:
    hyperattn compare {model} --text FILE --mechanisms cone,none
Replaced: every layer computes the cone formula, with weights that were trained for dot products. Without
training, this loses the model's quality. It is for models that are trained with it."""
ABOUT_SPARSE = """\
Sparse: nearly all of the 270 attention heads read only a window, some pages or single keys of the text.
The rule of each head was chosen by measurement, without training. "Time" is the CPU time to read the
text (on a GPU: seconds), "ratio" compares it with the original's. Both models took turns after every
layer. Facts are found if the model completes them at the end of the text. Make one for your texts:
    hyperattn inject {model} --mechanism sparse --text FILE --output DIR"""
HUB_ID = f"HuggingFaceTB/{smollm2.NAME}"
ORIGINAL, PATCHED, REPLACED = "original", "cone, patched in", "cone, replaced"
CHARACTERS = 64  # characters to read per token; texts have about 4
COMPARED = 128  # tokens over which logits are compared with the original model's
GENERATED_STEP = 16  # progress-bar steps per generated token; a prompt token is one step


@dataclass
class Demo:
    """The model, the text and the amount of text: the same for every row."""

    path: str
    name: str
    device: torch.device
    tokenizer: Any
    ids: list[int]
    prefix: list[int]
    long_ids: list[int]
    text: str
    window: int
    prompt: list[int]
    new_tokens: int

    def format_title(self) -> str:
        """Return two lines that say what is measured."""
        threads = f", {count_threads()}" if self.device.type == "cpu" else ""
        return (
            f"{self.name}, float32 on {self.device}{threads}\n"
            f"Part 1: {self.text}, {len(self.ids):,} tokens, context {min(self.window, len(self.ids)):,}"
        )

    def load_model(self, attention: str) -> Any:
        """Load the model in float32 with one attention implementation."""
        with errors_as(f"--model {self.path}: cannot load it with {attention!r}"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.path, attn_implementation=attention, dtype=torch.float32
            )
        return model.to(self.device).eval()

    def compute_logits(self, model: Any) -> torch.Tensor:
        """Compute logits of the first tokens, to compare with the original model's."""
        return next_token_logits(model, self.prefix + self.ids[: min(COMPARED, self.window)])


@dataclass
class Row:
    """Measurements of one kind of attention: table cells and generated text."""

    cells: tuple[str, ...]
    text: str


def run(args: argparse.Namespace) -> None:
    """Measure, print and save; raise ValueError or OSError for bad input."""
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model or "")
    elif args.force:
        raise ValueError("--force says nothing without --output; leave it out")
    demo = prepare_demo(args)
    if not args.json:
        # Show the setting before the measurements, which take minutes.
        print(demo.format_title(), flush=True)
    # Three rows, each with a pass over the text and a generation.
    with show_progress(3 * (len(demo.ids) + GENERATED_STEP * demo.new_tokens)) as bar:
        rows, reason = measure_rows(demo, bar)
    engine = (
        describe_cone_engine() if demo.device.type == "cpu" else f"the engine for {demo.device}"
    )
    if args.output is not None:
        save_patched(
            demo, args.output, hub_cards.hub_id_or_none(args.model) if args.model else HUB_ID
        )
    if not args.json:
        show_rows(args, demo, rows, engine)
        print(
            f"\nPart 2: sparse attention on {demo_long.LENGTH:,} tokens with three hidden facts",
            flush=True,
        )
    long_rows = [] if reason else measure_sparse(demo)
    if args.json:
        cells = [dict(zip(HEADER, row.cells)) | {"text": row.text} for row in rows]
        report = {
            "measured": demo.format_title(),
            "prompt": args.prompt,
            "rows": cells,
            "cone attention": engine,
            "long text": long_rows,
            "left out": reason,
        }
        print(json.dumps(report, indent=2))
    else:
        show_long_rows(demo, long_rows, reason)


def show_rows(args: argparse.Namespace, demo: Demo, rows: list[Row], engine: str) -> None:
    """Print the first table, the generated texts, advice, the engine and the saved folder."""
    print()
    print_table(HEADER, [row.cells for row in rows])
    print(f'\n"{args.prompt}" is continued with:')
    width = max(len(row.cells[0]) for row in rows)
    for row in rows:
        print(f"  {row.cells[0].ljust(width)}  {row.text!r}")
    print(f"\n{ABOUT_CONES.format(model=shlex.quote(demo.path))}\nCone attention ran on {engine}.")
    if args.output is not None:
        print(
            f"Saved, with cone patched in: {args.output}. Load it after `import hf_hyperattn`, or train it further."
        )


def show_long_rows(demo: Demo, rows: list[dict[str, Any]], reason: str | None) -> None:
    """Print the second table, or why there is none."""
    if reason:
        print(f"Left out. {reason}")
        return
    print()
    print_table(demo_long.HEADER, demo_long.format_rows(rows))
    print(f"\n{ABOUT_SPARSE.format(model=shlex.quote(demo.path))}")


def measure_sparse(demo: Demo) -> list[dict[str, Any]]:
    """Measure the original and the sparse model on the long text."""
    model, sparse = demo.load_model("sdpa"), demo.load_model("sdpa")
    layers = 2 * model.config.num_hidden_layers
    with show_progress(layers) as bar:
        bar.describe("original and sparse, in turns")
        return demo_long.measure_long_text(
            model, sparse, demo.tokenizer, demo.long_ids, lambda: bar.advance(1)
        )


def describe_cone_engine() -> str:
    """Say which engine computed cone attention on the CPU in this process."""
    # An engine keeps a table of every kernel that it loaded, so its entry proves that it ran.
    loaded = [table for (score, _, _), table in library.TABLES.items() if "umbral" in score]
    if not loaded:
        return "plain torch; `hyperattn doctor` says whether compiled kernels are there"
    carried = native.load_prebuilt()
    if carried is not None and loaded[0].library is carried.library:
        return f"the fused engine, cpu: kernels from the wheel, for {carried.level}"
    return "the fused engine, cpu: kernels compiled on this machine"


def save_patched(demo: Demo, folder: str, base: str | None) -> None:
    """Write the model with cone attention patched in, its tokenizer and its card."""
    with errors_as(f"--model {demo.path}: cannot load it"):
        model: Any = AutoModelForCausalLM.from_pretrained(demo.path, dtype="auto")
    hf_hyperattn.patch_model(model, hf_hyperattn.ConeConfig())
    write_checkpoint(folder, model.save_pretrained, demo.tokenizer, base_model=base)


def prepare_demo(args: argparse.Namespace) -> Demo:
    """Find and check the model and the text.

    Everything that can fail early is checked here, before anything slow begins.

    Raises:
        ValueError: Bad input.
    """
    if not args.prompt.strip():
        raise ValueError("--prompt is empty; allowed: any text")
    silence_transformers()
    device = device_of(args.device)
    # The text is read before the model, so its length is only an upper bound here.
    tokens = max(args.tokens or default_tokens(args.length or 1024), demo_long.LENGTH)
    if args.text is None:
        text, text_name = default_text()
    else:
        text, text_name = read_text(args.text, CHARACTERS * tokens)
    path = name = args.model
    if path is None:
        # Find the weights first, so that a missing package is reported before the conversion
        # begins.
        if smollm2.cached_smollm2() is None:
            smollm2.find_gguf()
            print(
                f"Converting {smollm2.NAME} into {smollm2.cache_directory()} (once)",
                file=sys.stderr,
            )
        path, name = str(smollm2.smollm2()), smollm2.NAME
    config = load_config(path, f"--model {path}")
    if Path(path).expanduser().is_dir():
        path = str(Path(path).expanduser())
        name = name if args.model is None else Path(path).resolve().name
    tokenizer = read_tokenizer(path, f"--model {path}")
    # On the meta device, the check needs neither time nor memory for weights.
    with (
        errors_as(f"--model {path}: not a causal LM that cone attention can serve"),
        torch.device("meta"),
    ):
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="cone")
    prefix = prefix_of(tokenizer)
    window = window_of(config, args.length, 1024, len(prefix))
    ids = encode_text(tokenizer, text, args.tokens or default_tokens(window), text_name)
    long_ids = encode_text(tokenizer, text, demo_long.LENGTH, text_name)
    prompt = prefix + tokenizer(args.prompt, add_special_tokens=False)["input_ids"]
    # Prompt and new tokens share the positions of the model.
    positions = positions_of(config)
    if positions is not None and len(prompt) + args.generate > positions:
        raise ValueError(
            f"--generate {args.generate} and {len(prompt)} tokens of --prompt exceed what the model "
            f"reads; allowed: {positions} tokens together"
        )
    return Demo(
        path=path,
        name=name,
        device=device,
        tokenizer=tokenizer,
        ids=ids,
        long_ids=long_ids,
        prefix=prefix,
        text=text_name,
        window=window,
        prompt=prompt,
        new_tokens=args.generate,
    )


def default_tokens(window: int) -> int:
    """Return the tokens to measure on without --tokens: two windows, or one long one."""
    return 2 * window if window <= 2048 else window


def measure_rows(demo: Demo, bar: ProgressBar) -> tuple[list[Row], str | None]:
    """Measure all kinds of attention on the short text.

    The original model is measured first and then patched in place, so that only one model is in
    memory at a time.

    Returns:
        The rows, and why the long text cannot be read, or None.
    """
    bar.describe("loading")
    model = demo.load_model("sdpa")
    reason = demo_long.find_reason_against(model, demo.name, smollm2.NAME, len(demo.long_ids))
    bar.describe(ORIGINAL)
    reference = demo.compute_logits(model)
    rows = [measure_row(demo, ORIGINAL, model, bar)]
    bar.describe(PATCHED)
    hf_hyperattn.patch_model(model, hf_hyperattn.ConeConfig())
    rows.append(measure_row(demo, PATCHED, model, bar, reference))
    # Free the memory of this model before the next one is loaded.
    del model
    gc.collect()
    bar.describe("loading")
    model = demo.load_model("cone")
    bar.describe(REPLACED)
    return [*rows, measure_row(demo, REPLACED, model, bar, reference)], reason


def measure_row(
    demo: Demo, label: str, model: Any, bar: ProgressBar, reference: torch.Tensor | None = None
) -> Row:
    """Measure one kind of attention.

    Args:
        demo: The model and the text.
        label: Name of the row.
        model: The model to measure.
        bar: Progress of the work.
        reference: Logits of the original model; None for the original model itself.
    """
    quality = perplexity(model, demo.ids, demo.window, prefix=demo.prefix, on_window=bar.advance)
    generation = measure_generation(
        model, demo.prompt, demo.new_tokens, on_token=lambda: bar.advance(GENERATED_STEP)
    )
    difference = ""
    if reference is not None:
        change = max_logit_difference(demo.compute_logits(model), reference)
        difference = f"{change:.2g}"
    # An untrained replacement can have a perplexity of many digits.
    value = f"{quality.value:,.2f}" if quality.value < 1e6 else f"{quality.value:.1e}"
    text = demo.tokenizer.decode(list(generation.ids), skip_special_tokens=True)
    return Row(cells=(label, value, difference), text=text)
