"""The `hyperattn` command: its options, and what becomes of errors: one line on stderr and exit code 2.

Stands outside the package, so that help is there without torch. What a sub-command does is `run(args) -> int | None` of
the module of its name in `hf_hyperattn.cli`; those in `LIGHT` are run without importing the package.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

#: Characters of an error, and the largest count that an option may name.
LONGEST, MOST = 1000, 10**9
MECHANISMS = ("hsa", "sparse", "collaborative")  # that can be injected
CONVERSIONS = ("collaborative", "hat")  # changes of architecture
LIGHT = ("completion", "list")  # their modules import the standard library alone
WITHOUT_MODELS = ("autoload", "completion", "recover")  # these read no model, and so need no scores
SHELLS = ("bash", "zsh", "fish")
DTYPES = ("float32", "bfloat16", "float16")
ABOUT = """\
Hierarchy-aware attention for Transformers models.

Examples:
  hyperattn list                               mechanisms, and when to use each
  hyperattn compare MODEL --text book.txt --mechanisms cone,none --budget 20min
  hyperattn inject MODEL --mechanism hsa --text book.txt --output DIR
  hyperattn COMMAND --help                     options and examples of a command"""
UNITS = {"s": 1, "min": 60, "h": 3600}
#: What argparse says, and what is said in its place.
WORDS = (
    (
        r"argument (\S+): invalid int value: (.*)",
        r"\1 \2 is no whole number; allowed: digits, such as \1 1024",
    ),
    (r"argument (\S+): invalid float value: (.*)", r"\1 \2 is no number; allowed: such as \1 0.02"),
    (r"argument (\S+): expected one argument", r"\1 needs a value; allowed: \1 VALUE"),
    (r"argument (\S+): expected at least one argument", r"\1 needs a value; allowed: \1 VALUE ..."),
    (
        r"argument (\S+): ignored explicit argument (.*)",
        r"\1 takes no value, and got \2; allowed: \1 by itself",
    ),
    (r"the following arguments are required: (.*)", r"\1 is missing; add it"),
    (r"argument ([^ :]+): (.*)", r"\1: \2"),
)


class Parser(argparse.ArgumentParser):
    """argparse, with errors of a single line that say what to write instead; no option is taken twice."""

    words: Sequence[str] = ()
    given: set[argparse.Action] = set()

    def error(self, message: str):
        message = " ".join(message.split())
        if message.startswith("the following arguments are required"):
            self._check_options(
                [word for word in self.words if not self._is_option(word.partition("=")[0])]
            )
        for pattern, words in WORDS:
            if re.fullmatch(pattern, message):
                message = re.sub(pattern, words, message)
                break
        message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        if len(message) > LONGEST:
            message = f"{message[: LONGEST - 3]}..."
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, but what is not known is an error of the sub-command that got it."""
        self.words, self.given = sys.argv[1:] if args is None else list(args), set()
        known, unknown = super().parse_known_args(args, namespace)
        self._check_options(unknown)
        if unknown:
            self.error(
                f"{unknown[0]!r} is one argument too many; leave it out, or quote what holds spaces"
            )
        return known, unknown

    def _is_option(self, word: str) -> bool:
        return any(option.startswith(word) for option in self._option_string_actions)

    def _check_options(self, unknown: Sequence[str]) -> None:
        """An error where one of these words looks like an option; options of this parser are not among them."""
        for word in (
            word.partition("=")[0] for word in unknown if word.startswith("-") and len(word) > 1
        ):
            self.error(
                f"no option {word!r}; leave it out{nearest(word, self._option_string_actions)}"
            )

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """As argparse's, of whose options the last one would win in silence."""
        if (
            action in self.given
            and action.option_strings
            and not isinstance(action, argparse._AppendAction)
        ):
            behind = ", with all files behind it" if action.nargs == "+" else ""
            self.error(f"{action.option_strings[-1]} is given twice; allowed: once{behind}")
        self.given.add(action)
        return super()._get_values(action, arg_strings)  # type: ignore[misc]

    def _check_value(self, action: argparse.Action, value: Any):
        if action.choices is not None and value not in action.choices:
            what = f"no {(action.metavar or action.dest or 'value')}".lower()
            self.error(
                f"{what} {value!r}; allowed: {', '.join(action.choices)}{nearest(value, action.choices)}"
            )


def nearest(word: str, words: Iterable[str]) -> str:
    """What is added to an error where a word is nearly one of these; nothing where it is not."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


@functools.cache
def package_folder() -> Path:
    """Where `hf_hyperattn` is, which is not imported for it.

    Raises:
        ValueError: it is not there.
    """
    spec = importlib.util.find_spec("hf_hyperattn")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the package hf_hyperattn is not where Python looks; install it with pip")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def mechanisms() -> dict[str, dict[str, Any]]:
    """What `hyperattn list` shows, by mechanism; a test holds it equal to the registry."""
    return json.loads((package_folder() / "cli" / "mechanisms.json").read_text(encoding="utf-8"))


#: What `hyperattn list` shows of mechanisms that --import brought, by name.
IMPORTED: dict[str, dict[str, Any]] = {}


def all_mechanisms() -> dict[str, dict[str, Any]]:
    """Mechanisms of the package, and those that --import brought."""
    return mechanisms() | IMPORTED


def patches() -> list[str]:
    """Names that --mechanism takes: of mechanisms that patch, and of attn_implementation=."""
    known = all_mechanisms()
    names = [name for name, about in known.items() if "patch_model" in about["how"]]
    return list(dict.fromkeys([*names, *(n for about in known.values() for n in about["names"])]))


def recipe(text: str) -> str:
    """The type of --mechanism: names joined by "+", each one known."""
    for name in text.split("+"):
        if name not in patches():
            raise argparse.ArgumentTypeError(
                f"no mechanism {name!r}; allowed: {', '.join(patches())}; several with +{nearest(name, patches())}"
            )
    return text


def recipes(text: str) -> list[str]:
    """The type of --mechanisms: recipes and "none", between commas, each one once and one other than none."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name != "none":
            recipe(name)
    if len(set(names)) < len(names) or set(names) == {"none"}:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no comparison; allowed: names once each, such as cone,hype,none"
        )
    return names


def duration(text: str) -> float:
    """The type of times, in seconds: 90s, 20min, 1.5h."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)(s|min|h)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; allowed: such as 90s, 20min or 1.5h"
        )
    return float(match[1]) * UNITS[match[2]]


def setting(text: str) -> tuple[str, Any]:
    """The type of --set: NAME=VALUE, whose value is JSON, or else a word."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no setting; allowed: NAME=VALUE, such as rank=96"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _autoload(add: Callable) -> None:
    """register the names in programs that cannot be edited: on, off, status

    Let HF_HYPERATTN_AUTOLOAD=1 register the names in programs that cannot be edited.

    `on` writes one file, hf_hyperattn_autoload.pth, into the site-packages of this Python; Python reads it when it
    starts. With HF_HYPERATTN_AUTOLOAD=1 the names are then registered as soon as Transformers is loaded, without an
    import of this package; otherwise nothing happens. `off` removes the file, `status` says what holds now.

    Examples:
      hyperattn autoload on
      HF_HYPERATTN_AUTOLOAD=1 python program.py
    """
    add(
        "action",
        choices=("on", "off", "status"),
        help="what to do (default: status)",
        nargs="?",
        default="status",
    )


def _bench(add: Callable) -> None:
    """measure time and memory of a model's own attention and of what is patched in

    Measure reading a text of --length tokens and generating after it: time, memory, and whether both agree.

    A model that is saved patched is measured as it is and unpatched; one with its own attention needs --mechanism. The
    tokens are random. Times are the least of --repeats; memory on a CPU is the largest of the whole process. Logits are
    compared on up to 128 tokens, greedy tokens one by one.

    Examples:
      hyperattn bench out --length 2048
      hyperattn bench HuggingFaceTB/SmolLM2-135M --mechanism cone+hype --length 1024 --json
    """
    _model(add)
    add(
        "--length", type=int, default=1024, metavar="N", help="tokens that are read (default: 1024)"
    )
    add("--generate", type=int, default=32, metavar="N", help="new tokens, 2 or more (default: 32)")
    add(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="times that each is measured (default: 3)",
    )


def _card(add: Callable) -> None:
    """print or write the card of a saved model, adapter or config

    Print the card (README.md) of what save_pretrained wrote: a patched model, an adapter, or a HyperAttnConfig.

    What the folder does not say (licence, base model, measured numbers) comes from a JSON file with fields of
    hub_cards.Facts. Exit code 1: with --write, a README.md that a person wrote or edited was kept.

    Examples:
      hyperattn card out
      hyperattn card out --facts facts.json --write
    """
    add("model", metavar="MODEL_DIR", help="folder of a saved model, adapter or config")
    add(
        "--facts",
        metavar="FILE",
        help="JSON file with more facts: base_model, license, results, ...",
    )
    add("--write", action="store_true", help="write it to README.md beside the weights")


def _compare(add: Callable) -> None:
    """train mechanisms beside their control, at equal parameters, and say what differs

    Train LoRA, and LoRA with each mechanism, in the same way and at equal numbers of trainable parameters, on the first
    four fifths of the texts; read the rest; say with its uncertainty what a mechanism adds to LoRA alone ("none").

    A mechanism's run of a seed starts from the same LoRA matrices and reads the same tokens as the control's. What a
    mechanism adds is taken off LoRA's ranks. The steps of a run are as many as --budget allows after a few that are
    timed, or --steps. The verdict is a paired t test over the seeds, corrected for the number of mechanisms (Holm):
    better, worse or undecided, with the difference that so many seeds would have shown.

    With --out every finished run is kept; the same command goes on where it was interrupted.

    Examples:
      hyperattn compare HuggingFaceTB/SmolLM2-135M --text book.txt --mechanisms cone,hyperbolic,none --budget 20min
      hyperattn compare MODEL --text a.txt b.txt --mechanisms cone+hype,none --seeds 5 --steps 200 --out cmp
    """
    add("model", metavar="MODEL", help="directory or Hub id of a causal LM with its own attention")
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 texts to train on and to read",
    )
    add(
        "--mechanisms",
        type=recipes,
        required=True,
        metavar="NAMES",
        help="mechanisms between commas; + puts two into one model; none, the control, is always there",
    )
    add(
        "--budget",
        type=duration,
        metavar="TIME",
        help="of all runs together, such as 20min (default: 20min)",
    )
    add("--steps", type=int, metavar="N", help="steps of every run, in place of --budget")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each, at least 3 (default: 3)")
    add(
        "--length", type=int, metavar="N", help="tokens a step (default: 512, or the model's limit)"
    )
    add(
        "--held-out",
        type=int,
        default=16,
        metavar="N",
        help="windows of --length that are read (default: 16)",
    )
    add(
        "--layers",
        default="last-third",
        metavar="WHICH",
        help="layers that are trained: all, first-half, last-third, ... (default: last-third)",
    )
    add("--rank", type=int, default=8, metavar="R", help="of LoRA in the control (default: 8)")
    add(
        "--rate", type=float, default=1e-3, metavar="X", help="LoRA's learning rate (default: 1e-3)"
    )
    add(
        "--added-rate",
        type=float,
        default=1e-2,
        metavar="X",
        help="learning rate of what mechanisms add (default: 1e-2)",
    )
    add(
        "--device", default="auto", help="torch device (default: cuda where there is one, else cpu)"
    )
    add(
        "--out",
        metavar="DIR",
        help="keeps runs, and gets the card (README.md) and facts for `hyperattn card`",
    )


def _completion(add: Callable) -> None:
    """print what makes a shell complete this command

    Print a script for a shell, after which Tab completes commands, options and what they allow.

    Examples:
      eval "$(hyperattn completion bash)"
      hyperattn completion zsh > ~/.zfunc/_hyperattn
      hyperattn completion fish > ~/.config/fish/completions/hyperattn.fish
    """
    add("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _convert(add: Callable) -> None:
    """turn a checkpoint into one of another architecture, such as hat

    Replace parts of a model, write the result with its tokenizer and card, and say how many parameters it has.

    hat makes an encoder of the BERT kind read long texts in segments; collaborative gives all heads --set rank=R shared
    dimensions of queries and keys. `hyperattn list NAME` shows what --set takes. The result only approximates the old
    model; `hyperattn inject --mechanism collaborative` also measures by how much.

    Examples:
      hyperattn convert ENCODER long --to hat --set segment_length=128 --set layout=I1
      hyperattn convert ENCODER shared --to collaborative --set rank=192
    """
    add("model", metavar="OLD", help="directory or Hub id of a model with its own attention")
    add("out", metavar="NEW", help="directory to write, absent or empty")
    add("--to", choices=CONVERSIONS, required=True, help=", ".join(CONVERSIONS))
    add(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; may be repeated",
    )
    add("--force", action="store_true", help="replace the checkpoint in NEW, and all else there")


def _demo(add: Callable) -> None:
    """measure a real model with stock, patched and replaced attention

    Measure a real model with its own attention, with cone attention patched in and in its place, and with tied keys.

    Without --model: SmolLM2-135M-Instruct from the package index, converted once into a cache folder
    ($HF_HYPERATTN_CACHE, else hf_hyperattn in the user's cache).

    Examples:
      hyperattn demo --output smollm2-cone
      hyperattn demo --model HuggingFaceTB/SmolLM2-135M --text book.txt --length 2048
    """
    add("--model", metavar="HUB_ID_OR_DIR", help="any causal LM (default: SmolLM2-135M-Instruct)")
    add(
        "--text",
        metavar="FILE",
        help="UTF-8 text to measure on (default: argparse.py of this Python)",
    )
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens a window (default: 1024, or the model's limit)",
    )
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the text (default: two windows, one above 2048)",
    )
    add("--generate", type=int, default=32, metavar="N", help="new tokens (default: 32)")
    add("--prompt", default="The capital of France is", help="text to continue")
    add(
        "--device", default="auto", help="torch device (default: cuda where there is one, else cpu)"
    )
    add(
        "--output",
        metavar="DIR",
        help="save the model there, with cone attention patched in (default: not saved)",
    )
    add("--force", action="store_true", help="replace the checkpoint in DIR, and all else there")


def _describe(add: Callable) -> None:
    """show a model's attention layers and what is patched

    Show the attention layers of a model, what is patched, and where its gates stand.

    Of a model that is not patched only config.json is read.

    Examples:
      hyperattn describe HuggingFaceTB/SmolLM2-135M
      hyperattn describe out --json
    """
    add("model", metavar="MODEL", help="directory or Hub id of a model")
    add("--heads", action="store_true", help="also the values of every head")


def _doctor(add: Callable) -> None:
    """show versions, engines, what is compiled and what is missing

    Show versions, which engines run here, what is compiled or came with the package, and what is missing.

    One score is computed by the compiled engine and checked; where nothing is compiled yet, that is done now.

    Examples:
      hyperattn doctor
      hyperattn doctor --json
    """


def _eval(add: Callable) -> None:
    """measure how well a model predicts a text, patched and unpatched

    Measure the perplexity of a causal LM on a text, in windows of --length tokens.

    A model that is saved patched is read as it is and unpatched; one with its own attention also with --mechanism. The
    difference comes with its standard error over windows.

    Examples:
      hyperattn eval out --text book.txt
      hyperattn eval HuggingFaceTB/SmolLM2-135M --text book.txt --mechanism hsa --mode replace --json
    """
    _model(add)
    add("--text", required=True, metavar="FILE", help="UTF-8 text to read")
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens a window (default: 1024, or the model's limit)",
    )
    add("--tokens", type=int, metavar="N", help="tokens of the text (default: eight windows)")


def _export(add: Callable) -> None:
    """write a patched checkpoint, or attention by name, that runs without this package

    Write a patched checkpoint, or mechanisms by name, for machines without this package.

    The copy in OUT holds the checkpoint, modeling_hyperattn.py, and the modules that patching needs; it loads with
    trust_remote_code=True and computes the same. Only known files are copied, no code but ours, and no link is
    followed out of the checkpoint; hyperattn_manifest.json holds their SHA-256. What cannot be copied (the routing of
    some families) is imported from this package, and the command says so.

    --kernel writes what the Hub's `kernels` package loads for attn_implementation="OWNER/REPO:cone"; MODEL is then what
    it is to run: names such as cone,hype or "all".

    Examples:
      hyperattn export out export --remote-code
      hyperattn export cone,hype kernel --kernel
    """
    add(
        "model",
        metavar="MODEL",
        help="directory or Hub id of a saved patched model; names with --kernel",
    )
    add("out", metavar="OUT", help="directory to write, absent or empty")
    add("--remote-code", action="store_true", help="as code for trust_remote_code=True")
    add("--kernel", action="store_true", help="as a kernel repository of the Hub, by name")
    add("--force", action="store_true", help="replace the checkpoint in OUT, and all else there")


def _heal(add: Callable) -> None:
    """let an injected model learn back, from itself with its own attention, what it lost

    Distil the untouched model into its injected self: a few hundred steps, KL to its logits.

    What the patch added learns (block biases, gates, whatever it holds), and with --lora R LoRA's matrices beside it;
    all else is frozen. The teacher is the same weights with their own attention, so that there is no second copy. The
    last --length tokens of each text are held out; where they gain nothing, nothing is written and the exit code is 1.

    Without --lora the healed checkpoint is written, with it an adapter for MODEL or for what MODEL was made from. The
    work is kept beside DIR every --save-every steps; --resume goes on from there, to the same bits.

    Examples:
      hyperattn heal injected --text bible.txt source.txt --steps 300 --lora 8 --output healed
    """
    add("model", metavar="MODEL", help="directory or Hub id of a patched causal LM")
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 texts, of the kinds the model is to serve",
    )
    add("--output", required=True, metavar="DIR", help="where to write the adapter or checkpoint")
    add(
        "--lora",
        type=int,
        metavar="R",
        help="rank of LoRA's matrices beside what the patch can learn",
    )
    add("--adapter", action="store_true", help="write an adapter of a few KB, also without --lora")
    add("--steps", type=int, default=300, metavar="N", help="windows to learn from (default: 300)")
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens a window (default: what the patch was chosen for)",
    )
    add("--lr", type=float, metavar="X", help="learning rate of LoRA's matrices (default: 3e-4)")
    add(
        "--patch-lr",
        type=float,
        metavar="X",
        help="learning rate of the patch's parameters (default: 1e-2)",
    )
    add("--seed", type=int, default=0, help="of the windows and of LoRA's start (default: 0)")
    add(
        "--bf16",
        action="store_true",
        help="learn with products in bfloat16: faster where a CPU or GPU has them",
    )
    add(
        "--save-every",
        type=int,
        default=25,
        metavar="N",
        help="steps between two saves of the work (default: 25)",
    )
    add("--resume", action="store_true", help="go on from what an interrupted run kept beside DIR")
    add(
        "--force",
        action="store_true",
        help="replace what is in DIR; without --resume also an interrupted run's work",
    )
    add(
        "--device", default="auto", help="torch device (default: cuda where there is one, else cpu)"
    )


def _hyperbolicity(add: Callable) -> None:
    """say how far a model's word vectors, its hidden states, or points in a file are from a tree

    Measure Gromov's delta of points, relative to their diameter: 0 for a tree, 1 at most.

    Points are a model's input embeddings, with --text also the hidden states after every layer; or the rows of a file
    (.npy, .csv, or .safetensors with one matrix). Beside each stands its control: the same numbers with every
    coordinate shuffled. What is not below its control is no tree. Compare at equal --size: delta grows with it.

    Examples:
      hyperattn hyperbolicity HuggingFaceTB/SmolLM2-135M --text book.txt
      hyperattn hyperbolicity points.npy --size 60 --json
    """
    add(
        "source",
        metavar="MODEL|FILE",
        help="directory or Hub id of a model, or a file of points, one a row",
    )
    add("--text", metavar="FILE", help="UTF-8 text: hidden states of its tokens, after every layer")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the text (default: 512, or the model's limit)",
    )
    add(
        "--points",
        type=int,
        default=2000,
        metavar="N",
        help="rows that are drawn of those there are (default: 2000)",
    )
    add("--size", type=int, default=60, metavar="N", help="points of a sample (default: 60)")
    add("--draws", type=int, default=10, metavar="N", help="samples (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")


def options_under(add: Callable, title: str) -> Callable:
    """Return a function that adds options under a heading of the help.

    Args:
        add: `add_argument` of the command's parser.
        title: The heading.
    """
    parser: argparse.ArgumentParser = add.__self__  # type: ignore[attr-defined]
    return parser.add_argument_group(title).add_argument


def _inject(add: Callable) -> None:
    """make a pretrained model's attention cheaper without training, within a loss budget

    Make a pretrained model's attention cheaper without training.

    For every attention head (encoders: every layer), inject measures how much the
    loss rises under cheaper rules, chooses the cheapest combination within your
    budget, and verifies it on text that was not used before. With --output it
    writes the patched checkpoint and a model card.

    Each text is split into three parts: measure, choose, verify. Causal models are
    also tested on retrieval: copying, needles, variables, few-shot examples.
    A task that the original model cannot do is reported and does not decide.
    If verification exceeds a budget, the next safer combination is tried. If none
    passes, nothing is written and the exit code is 1.

    Examples:
      hyperattn inject MODEL --mechanism sparse --text book.txt code.txt --output small
      hyperattn inject MODEL --mechanism sparse --text book.txt --pairs 0.3 --output small
      hyperattn inject ENCODER --mechanism hsa --text docs.txt --length 512 --output small
      hyperattn inject ENCODER --mechanism collaborative --rank 192 --output small
    """
    required = options_under(add, "required")
    required("model", metavar="MODEL", help="folder or Hub id of a causal LM or a text encoder")
    required(
        "--mechanism",
        required=True,
        metavar="NAME",
        help="sparse: windows, pages, single keys (causal models); hsa: distant keys as block means (both); "
        "collaborative: shared query/key dimensions; needs --rank",
    )
    required(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 texts like those the model will read, each at least 3 x --length tokens (encoders: 24 x); not for "
        "collaborative",
    )
    saving = options_under(add, "how much to save")
    saving(
        "--budget",
        type=float,
        metavar="X",
        help="largest rise in perplexity (encoders: 1 - cosine); 0.02 means 2 %% (default: 0.02)",
    )
    saving(
        "--retrieval-budget",
        type=float,
        metavar="X",
        help="largest rise in the perplexity of any retrieval task (default: 0.05 for sparse; hsa reports it only)",
    )
    saving(
        "--pairs",
        type=float,
        metavar="SHARE",
        help="compute this share of the attention logits, whatever the loss; with --cost, this share of that cost",
    )
    saving(
        "--cost",
        choices=("pairs", "bytes", "time"),
        help="what to minimise (causal models): pairs = attention logits, bytes = evicting KV cache, time = measured "
        "here (default: pairs)",
    )
    saving("--rank", type=int, metavar="R", help="collaborative: number of shared dimensions")
    measurement = options_under(add, "measurement")
    measurement(
        "--length",
        type=int,
        metavar="N",
        help="tokens per part; choose the length you will use (default: 2048, encoders 128; at most the model's limit)",
    )
    measurement(
        "--rows",
        type=int,
        metavar="N",
        help="queries sampled per text, causal models (default: 384, at least 1,024 over all texts)",
    )
    measurement("--seed", type=int, metavar="N", help="random seed (default: 0)")
    measurement(
        "--resume",
        action="store_true",
        help="reuse measurements of an earlier run on the same model and texts",
    )
    measurement("--compare", action="store_true", help="also verify other choices at the same cost")
    measurement(
        "--device-map",
        metavar="MAP",
        help='spread the model over devices: auto, or a JSON file {"module": device}',
    )
    output = options_under(add, "output")
    output("--output", metavar="DIR", help="write the checkpoint here (default: report only)")
    output(
        "--force",
        action="store_true",
        help="replace the checkpoint in DIR and everything else there",
    )
    output(
        "--allow-slower",
        action="store_true",
        help="sparse: write the model even if it is not faster here",
    )


def _list(add: Callable) -> None:
    """list mechanisms: what each is for, how to apply it, its time and settings

    List the mechanisms of this package, or show one with its settings and their defaults.

    Examples:
      hyperattn list
      hyperattn list cone
      hyperattn list --json
    """
    add("mechanism", nargs="?", metavar="MECHANISM", help="show this one alone, with its settings")


def _look(add: Callable) -> None:
    """write a page that shows what a model's attention does on a text

    Write one HTML page, and JSON beside it, that shows what attention does on a text and what a patch changed.

    Attention of every head, own and patched, entropy, attention to the first token, how tree-like the hidden states
    are; and of what the model is patched with: gates, cones, the Poincaré disk, blocks that HSA opens. The page needs
    no network. It ends in what to try next.

    Examples:
      hyperattn look out --text text.txt --out seen --layers last-4
    """
    add(
        "model",
        metavar="MODEL",
        help="directory or Hub id of a decoder or an encoder, patched or not",
    )
    add("--text", metavar="FILE", required=True, help="UTF-8 text to look at")
    add("--out", metavar="DIR", required=True, help="where to write look.html and look.json")
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens of the text (default: 256, or the model's limit)",
    )
    add(
        "--layers",
        metavar="LAYERS",
        help="layers in detail: 0,5,9 or last-4 (default: three, of the patched ones)",
    )
    add(
        "--query",
        type=int,
        metavar="N",
        help="one more token whose attention is shown in detail, by its position",
    )


def _push(add: Callable) -> None:
    """upload a saved model, adapter or config that reloads exactly

    Upload what save_pretrained wrote to the Hub, in one commit, with its card.

    First it is loaded from its folder, saved again, and every tensor compared bit by bit; an adapter is loaded on the
    base that it names. Only known files go along (weights as safetensors, configs, tokenizer, card, what `hyperattn
    export` wrote); weights in the repository that are not part of it are deleted there. A README.md that a person
    wrote stays, here and there.

    Examples:
      hyperattn push out your-name/SmolLM2-135M-cone --private --dry-run
    """
    add("model", metavar="MODEL_DIR", help="folder of a saved model, adapter or config")
    add("repo", metavar="REPO", help="repository on the Hub, made where there is none: owner/name")
    add("--private", action="store_true", help="make the repository private")
    add(
        "--dry-run",
        action="store_true",
        help="check, and say what would be uploaded; no network, nothing written",
    )
    add(
        "--facts",
        metavar="FILE",
        help="JSON file with facts for the card: base_model, license, results, ...",
    )


def _recover(add: Callable) -> None:
    """bring interrupted saves into a folder to their end

    Bring interrupted saves into a folder to their end, and remove what they left.

    Exit code 0: the folder is whole, also where there was nothing to do. 2: a process is saving there now, or what is
    left cannot be put in its place; the message says what to do.

    Examples:
      hyperattn recover out
    """
    add("folder", metavar="DIR", help="the folder that was saved into")


def _model(add: Callable) -> None:
    """Arguments of commands that measure a causal LM."""
    add("model", metavar="MODEL", help="directory or Hub id of a causal LM")
    add(
        "--mechanism",
        type=recipe,
        metavar="NAME",
        help="what to patch into a model that is not; several with +",
    )
    add(
        "--mode",
        choices=("blend", "replace"),
        default="blend",
        help="of --mechanism: behind gates at 0, or in place of the dot product (default: blend)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help=f"of weights: {', '.join(DTYPES)} (default: {DTYPES[0]})",
    )
    add(
        "--device", default="auto", help="torch device (default: cuda where there is one, else cpu)"
    )


#: Sub-commands: their options, the first line of whose docstring is their line of help, the rest their description.
_ALL = (
    _autoload,
    _bench,
    _card,
    _compare,
    _completion,
    _convert,
    _demo,
    _describe,
    _doctor,
    _eval,
    _export,
    _heal,
    _hyperbolicity,
    _inject,
    _list,
    _look,
    _push,
    _recover,
)
COMMANDS = {f.__name__[1:]: f for f in _ALL}
#: The least value of every option that counts something.
LEAST = {
    "bench": {"length": 2, "generate": 2, "repeats": 1},
    "compare": {"steps": 2, "seeds": 3, "length": 16, "held_out": 1, "rank": 1},
    "demo": {"length": 2, "tokens": 32, "generate": 1},
    "heal": {"lora": 1, "steps": 1, "length": 32, "save_every": 1},
    "eval": {"length": 2, "tokens": 32},
    "hyperbolicity": {"tokens": 32, "points": 8, "size": 4, "draws": 1, "seed": 0},
    "inject": {"length": 64, "rows": 16, "rank": 1},
    "look": {"length": 32, "query": 0},
}
_SHARE = ("above 0 and below 1", lambda value: 0 < value < 1)
_UP_TO_1 = ("above 0, up to 1", lambda value: 0 < value <= 1)
#: What other numbers may be, in words and as a test.
RANGES: dict[str, dict[str, tuple[str, Callable[[float], bool]]]] = {
    "compare": {
        "rate": _SHARE,
        "added_rate": _SHARE,
        "seeds": ("3 to 100", lambda value: value <= 100),
    },
    "heal": {
        "lr": _UP_TO_1,
        "patch_lr": _UP_TO_1,
        "seed": ("0 to 2**31 - 1", lambda value: 0 <= value < 2**31),
    },
    "inject": {
        "budget": (f"{_SHARE[0]}, such as 0.02", _SHARE[1]),
        "pairs": _UP_TO_1,
        "retrieval_budget": ("above 0, up to 1000", lambda value: 0 < value <= 1000),
        "seed": ("0 to 2**63 - 1", lambda value: 0 <= value < 2**63),
    },
}


def build_parser() -> argparse.ArgumentParser:
    """The parser with every sub-command of `COMMANDS`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="hyperattn", description=ABOUT, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"hyperattn {_version()}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True
    )
    for name, add_options in COMMANDS.items():
        line, _, description = (add_options.__doc__ or "").partition("\n\n")
        description = "\n".join(part.removeprefix("    ") for part in description.splitlines())
        command = commands.add_parser(
            name, help=line, description=description.rstrip(), formatter_class=form
        )
        command.add_argument(
            "--traceback", action="store_true", help="show the whole traceback of an error"
        )
        command.add_argument(
            "--json", action="store_true", help="print JSON on stdout in place of text"
        )
        if name not in WITHOUT_MODELS:
            command.add_argument(
                "--import",
                dest="imports",
                action="append",
                default=[],
                metavar="MODULE",
                help="a module or .py file with scores or rules of your own, imported first; repeat it for several",
            )
        add_options(command.add_argument)
    return parser


def module_of(command: str) -> ModuleType | Any:
    """The module whose `run` is the sub-command; those in `LIGHT` come from their file, without the package."""
    if command not in LIGHT:
        return importlib.import_module(f"hf_hyperattn.cli.{command}")
    spec: Any = importlib.util.spec_from_file_location(
        f"hyperattn_{command}", package_folder() / "cli" / f"{command}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for an error of input, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(
            stream, "reconfigure"
        ):  # a terminal that lacks a character gets its code, not an error
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        build_parser().print_help()
        return 0
    IMPORTED.clear()
    try:  # before the words are read: they may name a mechanism that comes with a module
        import_modules(named_imports(words))
    except ValueError as error:
        if "--traceback" in words:
            raise
        print(f"hyperattn {words[0]}: error: {one_line(error)}", file=sys.stderr)
        return 2
    args = build_parser().parse_args(words)
    args.argv = words
    try:
        check_counts(args)
        return module_of(args.command).run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`hyperattn ... | head`); nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.traceback:
            raise
        print(f"hyperattn {args.command}: error: {one_line(error)}", file=sys.stderr)
        return 2


def named_imports(words: Sequence[str]) -> list[str]:
    """The values of --import, of a command that has it."""
    if words[0] not in COMMANDS or words[0] in WITHOUT_MODELS:
        return []
    after = [value for word, value in zip(words, words[1:]) if word == "--import"]
    return [*after, *(word.partition("=")[2] for word in words if word.startswith("--import="))]


def describe_mechanism(mechanism: Any) -> dict[str, Any]:
    """Return what `hyperattn list` shows of a mechanism that is not the package's; the keys are those of its file."""
    config = mechanism.config
    line = (config.__doc__ or "").strip().partition("\n")[0].rstrip(".") or "its module says"
    return {
        "group": "own",
        "summary": line,
        "title": line,
        "use_to": line,
        "at_start": ['mode="blend" (default): same output as the original model'],
        "time": "not measured",
        "stage": mechanism.stage,
        "how": ["patch_model"],
        "names": list(mechanism.names),
        "config": config.__name__,
        "defaults": {key: value for key, value in config().to_dict().items() if key != "mechanism"},
        "paper": mechanism.paper,
    }


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name, the current folder included, or from .py files: what they define is known afterwards.

    A file is imported under its own name, by which a checkpoint remembers where a score was defined.

    Raises:
        ValueError: a module is not there, or fails while it is imported.
    """
    names = list(names)
    if not names:
        return
    registry: Any = importlib.import_module("hf_hyperattn.registry")
    importlib.import_module("hf_hyperattn")
    for name in names:
        before = set(registry.MECHANISMS)
        folder, module = os.getcwd(), name
        if name.endswith(".py"):
            path = Path(name).resolve()
            if not path.is_file():
                raise ValueError(
                    f"--import {name}: no such file; allowed: a .py file, or a module's name"
                )
            folder, module = str(path.parent), path.stem
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", module):
            raise ValueError(
                f"--import {name}: no module's name; allowed: such as my_scores, or my_scores.py"
            )
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            imported = importlib.import_module(module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and module.startswith(f"{error.name}"):
                allowed = "a .py file, or a module that Python finds from this folder"
                raise ValueError(
                    f"--import {name}: no module of this name; allowed: {allowed}"
                ) from error
            raise ValueError(f"--import {name} failed: {type(error).__name__}: {error}") from error
        there = getattr(imported, "__file__", None)
        if name.endswith(".py") and (there is None or not os.path.samefile(there, path)):
            raise ValueError(
                f"--import {name}: Python knows another module {module!r} ({there or 'built in'}); rename the file"
            )
        for key, mechanism in registry.MECHANISMS.items():
            if key not in before or mechanism.config.__module__ == module:
                IMPORTED[key] = describe_mechanism(mechanism)


def check_counts(args: argparse.Namespace) -> None:
    """Raise ValueError where an option is below what `LEAST` says, larger than anything can be, or out of `RANGES`."""
    for option, least in LEAST.get(args.command, {}).items():
        value = getattr(args, option)
        if value is not None and not least <= value <= MOST:
            bound = f"{least} or more" if value < least else f"up to {MOST:,}"
            raise ValueError(
                f"--{option.replace('_', '-')} {value} is not allowed; allowed: {bound}"
            )
    for option, (allowed, fits) in RANGES.get(args.command, {}).items():
        value = getattr(args, option)
        if value is not None and not fits(value):
            shown = f"{value:g}" if isinstance(value, float) else value
            raise ValueError(
                f"--{option.replace('_', '-')} {shown} is not allowed; allowed: {allowed}"
            )


def one_line(error: BaseException) -> str:
    """What an exception says, as one printable line; with its type where that is none of those for bad input."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    if not text or not isinstance(error, (ValueError, OSError)):
        text = (
            f"{kind}: {text}; --traceback shows where"
            if text
            else f"{kind}; --traceback shows where"
        )
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _version() -> str:
    try:
        return version("hf-hyperattn")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
