"""`hyperattn demo`: one row a kind of attention, on one model and one text."""

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

from ..analysis import (
    PeakMemory,
    max_logit_difference,
    measure_generation,
    next_token_logits,
    perplexity,
)
from ..engines import native
from ..engines.cpu import library
from ..folders import check_replaceable
from ..integration.checkpoint_files import errors_as, load_config
from . import smollm2
from .console import ProgressBar, output, progress, table
from .inputs import (
    count_threads,
    default_text,
    encode,
    positions_of,
    prefix_of,
    quiet,
    read_text,
    read_tokenizer,
    window_of,
    write_checkpoint,
)

HEADER = (
    "attention",
    "perplexity",
    "prefill tok/s",
    "generate tok/s",
    "peak memory",
    "max |Δ logit|",
)
ADVICE = """\
"cone, patched in": the cone score is added behind gates that start at 0. The output is unchanged until
training moves the gates. Train it in a clone of the repository:
    make recipe NAME=smollm2/cone
"cone, replaced": every layer computes the cone formula, with weights that were trained for dot products.
Without training this loses the model's quality, as its perplexity and its text show. Use
attn_implementation="cone" for models that were trained with it.
"hsa": distant keys are read as means of their windows, without training. "injected" uses settings that were
found for each head at 2,048 or 8,192 tokens. Find them for your texts:
    hyperattn inject {model} --mechanism hsa --text FILE --output DIR"""
HUB_ID = f"HuggingFaceTB/{smollm2.NAME}"
STOCK, PATCHED, REPLACED = "stock (sdpa)", "cone, patched in", "cone, replaced"
INJECTED, TIED = "hsa, injected", "hsa, defaults"
CHARACTERS = 64  # of the text are read for a token; texts have about 4
COMPARED = 128  # tokens over which logits are compared with the stock model's
WARM_UP = 256  # tokens, enough for the engines that longer texts take
GENERATED_STEP = 16  # progress-bar steps of a generated token; a token read is one


@dataclass
class Demo:
    """A model, a text and how much of it: the same for every row."""

    path: str
    name: str
    device: torch.device
    tokenizer: Any
    ids: list[int]
    prefix: list[int]
    text: str
    window: int
    prompt: list[int]
    new_tokens: int

    def title(self) -> str:
        """What is measured, in two lines."""
        threads = f", {count_threads()}" if self.device.type == "cpu" else ""
        return (
            f"{self.name}, float32 on {self.device}{threads}\n"
            f"Text: {self.text}, {len(self.ids):,} tokens, context {min(self.window, len(self.ids)):,}"
        )

    def load(self, attention: str) -> Any:
        """The model with one attention implementation, float32, ready to be measured."""
        with errors_as(f"--model {self.path}: cannot load it with {attention!r}"):
            model: Any = AutoModelForCausalLM.from_pretrained(
                self.path, attn_implementation=attention, dtype=torch.float32
            )
        return model.to(self.device).eval()

    def logits(self, model: Any) -> torch.Tensor:
        """Of the first tokens, to compare with the stock model's."""
        return next_token_logits(model, self.prefix + self.ids[: min(COMPARED, self.window)])


@dataclass
class Row:
    """What was measured of one kind of attention: cells of the table, and the text that it generates."""

    cells: tuple[str, ...]
    text: str


def run(args: argparse.Namespace) -> None:
    """Measure and print, and save where --output says so; raises ValueError or OSError for bad input."""
    if args.output is not None:
        check_replaceable(Path(args.output), args.force, args.model or "")
    elif args.force:
        raise ValueError("--force says nothing without --output; leave it out")
    demo = prepare(args)
    if not args.json:
        print(demo.title(), flush=True)
    with progress(4 * (len(demo.ids) + GENERATED_STEP * demo.new_tokens)) as bar:
        rows = measure(demo, bar)
    engine = cone_engine() if demo.device.type == "cpu" else f"the engine for {demo.device}"
    if args.output is not None:
        save(demo, args.output, hub_cards.hub_id_or_none(args.model) if args.model else HUB_ID)
    cells = [dict(zip(HEADER, row.cells)) | {"text": row.text} for row in rows]
    report = {
        "measured": demo.title(),
        "prompt": args.prompt,
        "rows": cells,
        "cone attention": engine,
    }
    output(args, report, lambda _: show(args, demo, rows, engine))


def show(args: argparse.Namespace, demo: Demo, rows: list[Row], engine: str) -> None:
    """The table, the texts that go on, advice, the engine, and what was saved."""
    print()
    table(HEADER, [row.cells for row in rows])
    print(f'\n"{args.prompt}" goes on, greedily:')
    width = max(len(row.cells[0]) for row in rows)
    for row in rows:
        print(f"  {row.cells[0].ljust(width)}  {row.text!r}")
    print(f"\n{ADVICE.format(model=shlex.quote(demo.path))}\n\ncone attention ran on {engine}")
    if args.output is not None:
        print(
            f"saved, with cone patched in: {args.output}; load it after `import hf_hyperattn`, or train it further"
        )


def cone_engine() -> str:
    """What computed cone attention on the CPU in this process."""
    loaded = [table for (score, _, _), table in library.TABLES.items() if "umbral" in score]
    if not loaded:
        return "plain torch; `hyperattn doctor` says whether compiled kernels are there"
    carried = native.load_prebuilt()
    if carried is not None and loaded[0].library is carried.library:
        return f"the fused engine, cpu: kernels of the wheel, for {carried.level}"
    return "the fused engine, cpu: kernels compiled on this machine"


def save(demo: Demo, folder: str, base: str | None) -> None:
    """Write the model with cone attention patched in, its tokenizer and its card."""
    with errors_as(f"--model {demo.path}: cannot load it"):
        model: Any = AutoModelForCausalLM.from_pretrained(demo.path, dtype="auto")
    hf_hyperattn.patch_model(model, hf_hyperattn.ConeConfig())
    write_checkpoint(folder, model.save_pretrained, demo.tokenizer, base_model=base)


def prepare(args: argparse.Namespace) -> Demo:
    """Find model and text and check them; nothing slow is done before all of the input is known to be good."""
    if not args.prompt.strip():
        raise ValueError("--prompt is empty; allowed: any text")
    quiet()
    device = device_of(args.device)
    tokens = args.tokens or tokens_of(args.length or 1024)
    text, text_name = (
        default_text() if args.text is None else read_text(args.text, CHARACTERS * tokens)
    )
    path = name = args.model
    if path is None:
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
    with (
        errors_as(f"--model {path}: not a causal LM that cone attention can serve"),
        torch.device("meta"),
    ):
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="cone")
    prefix = prefix_of(tokenizer)
    window = window_of(config, args.length, 1024, len(prefix))
    ids = encode(tokenizer, text, args.tokens or tokens_of(window), text_name)
    prompt = prefix + tokenizer(args.prompt, add_special_tokens=False)["input_ids"]
    positions = positions_of(config)
    if positions is not None and len(prompt) + args.generate > positions:
        raise ValueError(
            f"--generate {args.generate} and {len(prompt)} tokens of --prompt exceed what the model "
            f"reads; allowed: {positions} tokens together"
        )
    return Demo(
        path, name, device, tokenizer, ids, prefix, text_name, window, prompt, args.generate
    )


def tokens_of(window: int) -> int:
    """Tokens to measure on without --tokens: two windows, but one where a window takes long."""
    return 2 * window if window <= 2048 else window


def device_of(name: str) -> torch.device:
    """The device of --device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device {name}: not usable here ({error}); allowed: cpu, cuda, ..."
        ) from error
    return device


def measure(demo: Demo, bar: ProgressBar) -> list[Row]:
    """All rows. The stock model is measured, then patched in place in two ways and measured again, then let go."""
    bar.describe("loading")
    model = demo.load("sdpa")
    bar.describe(STOCK)
    reference = demo.logits(model)
    rows = [measure_row(demo, STOCK, model, bar)]
    label, config = tying(demo, model)
    bar.describe(label)
    hf_hyperattn.patch_model(model, config, mode="blend" if label == INJECTED else "replace")
    hsa = measure_row(demo, label, model, bar, reference)
    hf_hyperattn.unpatch_model(model)
    bar.describe(PATCHED)
    hf_hyperattn.patch_model(model, hf_hyperattn.ConeConfig())
    rows.append(measure_row(demo, PATCHED, model, bar, reference))
    del model
    gc.collect()
    bar.describe("loading")
    model = demo.load("cone")
    bar.describe(REPLACED)
    return [*rows, measure_row(demo, REPLACED, model, bar, reference), hsa]


def tying(demo: Demo, model: Any) -> tuple[str, Any]:
    """What the hsa row is called, and its config: what was found for SmolLM2 at this length, else the defaults.

    At 2,048 tokens `hyperattn inject` found it; at 8,192 it is the point "chosen 0.2" of benchmarks/hsa_frontier.py.
    """
    length = 2048 if demo.window <= 4096 else 8192
    text = (Path(__file__).parent / f"smollm2_hsa_{length}.json").read_text(encoding="utf-8")
    config = hf_hyperattn.HyperAttnConfig.from_dict(json.loads(text))
    if demo.name == smollm2.NAME and set(config.hosts or ()) <= {
        name for name, _ in model.named_modules()
    }:
        return INJECTED, config
    return TIED, hf_hyperattn.HsaConfig()


def measure_row(
    demo: Demo, label: str, model: Any, bar: ProgressBar, reference: torch.Tensor | None = None
) -> Row:
    """Measure a model; `reference` are the stock model's logits."""
    # what is set up on first use, as kernels that are compiled, is no part of the speed
    perplexity(model, demo.ids[:WARM_UP], WARM_UP, prefix=demo.prefix)
    measure_generation(model, demo.prompt, 2)
    step = lambda: bar.advance(GENERATED_STEP)
    with PeakMemory(demo.device) as memory:
        quality = perplexity(
            model, demo.ids, demo.window, prefix=demo.prefix, on_window=bar.advance
        )
        generation = measure_generation(model, demo.prompt, demo.new_tokens, on_token=step)
    difference = (
        "" if reference is None else f"{max_logit_difference(demo.logits(model), reference):.1e}"
    )
    value = f"{quality.value:,.2f}" if quality.value < 1e6 else f"{quality.value:.1e}"
    speeds = f"{quality.tokens_per_second:,.0f}", f"{generation.tokens_per_second:,.1f}"
    cells = (label, value, *speeds, f"{memory.peak / 2**20:,.0f} MiB", difference)
    return Row(cells, demo.tokenizer.decode(list(generation.ids), skip_special_tokens=True))
