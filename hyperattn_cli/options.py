"""The options of every sub-command.

The docstring of an `add_*_options` function is what `--help` prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from .parser import Parser
from .values import parse_duration, parse_recipe, parse_recipes, parse_setting

#: Mechanisms that `hyperattn inject` can apply without training.
MECHANISMS = ("hsa", "sparse", "collaborative")
#: Mechanisms that `hyperattn convert` can apply; they change the architecture.
CONVERSIONS = ("collaborative", "hat")
#: Sub-commands that read no model and therefore have no --import.
WITHOUT_MODELS = ("autoload", "completion", "recover")
SHELLS = ("bash", "zsh", "fish")
DTYPES = ("float32", "bfloat16", "float16")
ABOUT = """\
Hierarchy-aware attention for Transformers models.

Examples:
  hyperattn list                               mechanisms, and when to use each
  hyperattn compare MODEL --text book.txt --mechanisms cone,none --budget 20min
  hyperattn inject MODEL --mechanism hsa --text book.txt --output DIR
  hyperattn COMMAND --help                     options and examples of a command"""


def add_autoload_options(add: Callable) -> None:
    """register the names in programs that cannot be edited: on, off, status

    Let HF_HYPERATTN_AUTOLOAD=1 register the names in programs that cannot be edited.

    `on` writes one file, hf_hyperattn_autoload.pth, into the site-packages of this Python;
    Python reads it when it starts. With HF_HYPERATTN_AUTOLOAD=1 the names are then registered
    as soon as Transformers is loaded, without an import of this package; otherwise nothing
    happens. `off` removes the file, `status` says what holds now.

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


def add_bench_options(add: Callable) -> None:
    """measure time and memory of a model, unpatched and patched

    Measure prefill of --length random tokens and generation after it: time, memory, and whether
    both models agree.

    A model that was saved patched is measured patched and unpatched; an unpatched model needs
    --mechanism. Times are the shortest of --repeats runs. On a CPU, memory is the peak of the
    whole process. Logits are compared on up to 128 tokens, greedy tokens one by one.

    Examples:
      hyperattn bench out --length 2048
      hyperattn bench HuggingFaceTB/SmolLM2-135M --mechanism cone+hype --length 1024 --json
    """
    add_causal_lm_options(add)
    add("--length", type=int, default=1024, metavar="N", help="prompt tokens (default: 1024)")
    add("--generate", type=int, default=32, metavar="N", help="new tokens, 2 or more (default: 32)")
    add(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="measurements of each model (default: 3)",
    )


def add_card_options(add: Callable) -> None:
    """print or write the card of a saved model, adapter or config

    Print the card (README.md) of what save_pretrained wrote: a patched model, an adapter, or a
    HyperAttnConfig.

    --facts adds facts that the folder does not hold (licence, base model, measured numbers): a
    JSON file with fields of hub_cards.Facts. With --write, exit code 1 means that a README.md
    written or edited by hand was kept.

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
    add("--write", action="store_true", help="write it to README.md in the folder of the weights")


def add_compare_options(add: Callable) -> None:
    """train mechanisms and a control with equally many parameters, and compare them

    Train LoRA ("none", the control) and LoRA with each mechanism on the first 80 % of the
    texts, then measure the loss on the rest. All runs have the same number of trainable
    parameters: LoRA gives up ranks for a mechanism.

    For each seed, all runs start from the same LoRA matrices and read the same tokens. A few
    steps are timed first to plan the number of steps that --budget allows; --steps sets it
    instead. The verdict of each mechanism (better, worse or undecided) is a paired t test over
    the seeds, with Holm's correction for the number of mechanisms. The report also gives the
    difference that this many seeds can detect.

    With --out every finished run is saved; the same command resumes an interrupted comparison.

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
        help="UTF-8 texts to train and evaluate on",
    )
    add(
        "--mechanisms",
        type=parse_recipes,
        required=True,
        metavar="NAMES",
        help="mechanisms, separated by commas; + joins two in one model; none, the control, is always included",
    )
    add(
        "--budget",
        type=parse_duration,
        metavar="TIME",
        help="total time of all runs (default: 20min)",
    )
    add("--steps", type=int, metavar="N", help="training steps per run, instead of --budget")
    add(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="runs per mechanism, at least 3 (default: 3)",
    )
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens per step (default: 512, or the model's limit)",
    )
    add(
        "--held-out",
        type=int,
        default=16,
        metavar="N",
        help="held-out windows of --length tokens (default: 16)",
    )
    add_compare_training_options(add)
    add(
        "--out",
        metavar="DIR",
        help="save finished runs, a card (README.md) and facts for `hyperattn card` here",
    )


def add_compare_training_options(add: Callable) -> None:
    """Add the options of `compare` that configure the training of every run."""
    add(
        "--layers",
        default="last-third",
        metavar="WHICH",
        help="layers to train: all, first-half, last-third, ... (default: last-third)",
    )
    add("--rank", type=int, default=8, metavar="R", help="LoRA rank of the control (default: 8)")
    add(
        "--rate", type=float, default=1e-3, metavar="X", help="LoRA's learning rate (default: 1e-3)"
    )
    add(
        "--added-rate",
        type=float,
        default=1e-2,
        metavar="X",
        help="learning rate of parameters that mechanisms add (default: 1e-2)",
    )
    add_device_option(add)


def add_completion_options(add: Callable) -> None:
    """print a script that lets a shell complete this command

    Print a script for a shell. After the shell runs it, Tab completes commands, options and
    their values.

    Examples:
      eval "$(hyperattn completion bash)"
      hyperattn completion zsh > ~/.zfunc/_hyperattn
      hyperattn completion fish > ~/.config/fish/completions/hyperattn.fish
    """
    add("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def add_convert_options(add: Callable) -> None:
    """turn a checkpoint into one of another architecture, such as hat

    Replace parts of a model, write the result with its tokenizer and card, and report the
    number of parameters.

    hat makes a BERT-like encoder read long texts in segments. collaborative gives all heads
    --set rank=R shared query and key dimensions. `hyperattn list NAME` shows the settings for
    --set. The result only approximates the old model; `hyperattn inject --mechanism
    collaborative` also measures the error.

    Examples:
      hyperattn convert ENCODER --to hat --set segment_length=128 --output long
      hyperattn convert ENCODER --to collaborative --set rank=192 --output shared
    """
    add("model", metavar="MODEL", help="directory or Hub id of a model with its own attention")
    add("--to", choices=CONVERSIONS, required=True, help=", ".join(CONVERSIONS))
    add(
        "--set",
        type=parse_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting; may be repeated",
    )
    add("--output", metavar="DIR", required=True, help="directory to write, absent or empty")
    add(
        "--force",
        action="store_true",
        help="replace the checkpoint in DIR and everything else there",
    )


def add_demo_options(add: Callable) -> None:
    """measure a real model with original, patched, replaced and sparse attention

    Measure a real model with its original attention, with cone attention patched in, and with
    cone attention instead. SmolLM2-135M-Instruct then also reads 8,192 tokens with sparse
    attention: perplexity, hidden numbers found, and CPU time compared with the original.

    Without --model, the model is SmolLM2-135M-Instruct from the package index. It is converted
    once into a cache folder ($HF_HYPERATTN_CACHE, else hf_hyperattn in the user's cache).

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
        help="tokens per window of the first part (default: 1024, or the model's limit)",
    )
    add(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens of the first part (default: two windows, or one if a window exceeds 2048)",
    )
    add("--generate", type=int, default=32, metavar="N", help="new tokens (default: 32)")
    add("--prompt", default="The capital of France is", help="text to continue")
    add_device_option(add)
    add(
        "--output",
        metavar="DIR",
        help="save the model with cone attention patched in here (default: not saved)",
    )
    add(
        "--force",
        action="store_true",
        help="replace the checkpoint in DIR and everything else there",
    )


def add_describe_options(add: Callable) -> None:
    """show a model's attention layers and patches

    Show the attention layers of a model, its patches and the values of their gates.

    For an unpatched model, only config.json is read. An adapter is loaded on its base model.

    Examples:
      hyperattn describe HuggingFaceTB/SmolLM2-135M
      hyperattn describe cone-adapter
    """
    add("model", metavar="MODEL", help="directory or Hub id of a model, or directory of an adapter")
    add("--heads", action="store_true", help="also the values of every head")


def add_doctor_options(add: Callable) -> None:
    """show versions, engines, compiled kernels and missing programs

    Show versions, the engines that run here, kernels that are compiled or came with the
    package, and missing programs.

    The compiled engine computes one score, which is checked. Its kernel is compiled now if
    necessary.

    Examples:
      hyperattn doctor
      hyperattn doctor --json
    """


def add_eval_options(add: Callable) -> None:
    """measure how well a model predicts a text, patched and unpatched

    Measure the perplexity of a causal LM on a text, in windows of --length tokens.

    A model that was saved patched is measured patched and unpatched. For an unpatched model,
    --mechanism adds a second measurement. An adapter is compared with its base model. The
    difference is reported with its standard error over windows.

    Examples:
      hyperattn eval out --text book.txt
      hyperattn eval HuggingFaceTB/SmolLM2-135M --text book.txt --mechanism hsa --mode replace --json
    """
    add_causal_lm_options(add)
    add("--text", required=True, metavar="FILE", help="UTF-8 text to read")
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens per window (default: 1024, or the model's limit)",
    )
    add("--tokens", type=int, metavar="N", help="tokens of the text (default: eight windows)")


def add_export_options(add: Callable) -> None:
    """write a patched checkpoint, or named mechanisms, to run without this package

    Write a patched checkpoint, or named mechanisms, for machines without this package.

    --remote-code copies the checkpoint to OUT, with modeling_hyperattn.py and the modules that
    patching needs. The copy loads with trust_remote_code=True and computes the same results.
    Only known files are copied, no code except ours, and no link out of the checkpoint is
    followed. hyperattn_manifest.json holds the SHA-256 of every file. Code that cannot be
    copied (the routing of some families) is imported from this package; the command reports it.

    --kernel writes a repository for the Hub's `kernels` package and
    attn_implementation="OWNER/REPO:cone". MODEL then lists the mechanisms: names such as
    cone,hype or "all".

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
    add("--remote-code", action="store_true", help="write code for trust_remote_code=True")
    add("--kernel", action="store_true", help="write a kernel repository for the Hub")
    add(
        "--force",
        action="store_true",
        help="replace the checkpoint in OUT and everything else there",
    )


def add_heal_options(add: Callable) -> None:
    """train an injected model to recover its loss, with the original model as teacher

    Distil the original model into its injected version: a few hundred steps that minimise the
    KL to its logits.

    The patch's parameters are trained (block biases, gates and others), and LoRA's matrices
    with --lora R; everything else is frozen. The teacher uses the same weights with the
    original attention, so memory holds one copy. The last --length tokens of each text are held
    out. If they do not improve, nothing is written and the exit code is 1.

    Without --lora the healed checkpoint is written; with it, an adapter for MODEL or for the
    model that MODEL was made from. The state is saved next to DIR every --save-every steps;
    --resume continues from it, bit by bit the same.

    Examples:
      hyperattn heal injected --text bible.txt source.txt --steps 300 --lora 8 --output healed
    """
    add("model", metavar="MODEL", help="directory or Hub id of a patched causal LM")
    add(
        "--text",
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 texts like those the model will read",
    )
    add("--output", required=True, metavar="DIR", help="write the adapter or checkpoint here")
    add(
        "--lora",
        type=int,
        metavar="R",
        help="also train LoRA matrices of this rank",
    )
    add("--adapter", action="store_true", help="write an adapter of a few KB, also without --lora")
    add(
        "--steps",
        type=int,
        default=300,
        metavar="N",
        help="training steps, one window each (default: 300)",
    )
    add(
        "--length",
        type=int,
        metavar="N",
        help="tokens per window (default: the length that the patch was tuned for)",
    )
    add("--lr", type=float, metavar="X", help="learning rate of LoRA's matrices (default: 3e-4)")
    add(
        "--patch-lr",
        type=float,
        metavar="X",
        help="learning rate of the patch's parameters (default: 1e-2)",
    )
    add("--seed", type=int, default=0, help="random seed of the windows and of LoRA (default: 0)")
    add(
        "--bf16",
        action="store_true",
        help="multiply in bfloat16: faster on CPUs and GPUs that support it",
    )
    add(
        "--save-every",
        type=int,
        default=25,
        metavar="N",
        help="steps between two saves of the state (default: 25)",
    )
    add("--resume", action="store_true", help="continue an interrupted run from its saved state")
    add(
        "--force",
        action="store_true",
        help="replace the contents of DIR; without --resume also the state of an interrupted run",
    )
    add_device_option(add)


def add_hyperbolicity_options(add: Callable) -> None:
    """measure how tree-like word vectors, hidden states or points in a file are

    Measure Gromov's delta of points, relative to their diameter: 0 for a tree, 1 at most.

    Points are a model's input embeddings (with --text also the hidden states after every layer)
    or the rows of a file (.npy, .csv, or .safetensors with one matrix). The control holds the
    same numbers with every coordinate shuffled. Points that are not below their control are not
    tree-like. Compare at equal --size: delta grows with it.

    Examples:
      hyperattn hyperbolicity HuggingFaceTB/SmolLM2-135M --text book.txt
      hyperattn hyperbolicity points.npy --size 60 --json
    """
    add(
        "source",
        metavar="MODEL|FILE",
        help="directory or Hub id of a model, or a file of points, one per row",
    )
    add("--text", metavar="FILE", help="UTF-8 text whose hidden states are measured too")
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
        help="points drawn from all rows (default: 2000)",
    )
    add("--size", type=int, default=60, metavar="N", help="points per sample (default: 60)")
    add("--draws", type=int, default=10, metavar="N", help="number of samples (default: 10)")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")


def add_group(add: Callable, title: str) -> Callable:
    """Return a function that adds options under a heading of the help.

    Args:
        add: `add_argument` of the command's parser.
        title: The heading.
    """
    parser: argparse.ArgumentParser = add.__self__  # type: ignore[attr-defined]
    return parser.add_argument_group(title).add_argument


def add_inject_options(add: Callable) -> None:
    """make a pretrained model's attention cheaper without training, within a loss budget

    Make a pretrained model's attention cheaper without training.

    For every attention head (encoders: every layer), inject measures how much the
    loss rises under cheaper rules, chooses the cheapest combination within your
    budget, and verifies it on text that was not used before. With --output it
    writes the patched checkpoint and a model card.

    Each text is split into three parts: measure, choose, verify. Causal models are
    also tested on retrieval: copying, needles, variables, few-shot examples.
    A task that the original model cannot do is reported and does not decide.
    If verification exceeds a budget, safer combinations follow. If none passes,
    nothing is written and the exit code is 1.

    Examples:
      hyperattn inject MODEL --text book.txt code.txt --output small
      hyperattn inject MODEL --text book.txt --pairs 0.3 --output small
      hyperattn inject ENCODER --text docs.txt --length 512 --output small
      hyperattn inject ENCODER --mechanism collaborative --rank 192 --output small
    """
    add_inject_required_options(add)
    add_inject_saving_options(add)
    add_inject_measurement_options(add)
    add_inject_output_options(add)


def add_inject_required_options(add: Callable) -> None:
    """Add the required options of `inject`."""
    required = add_group(add, "required")
    required("model", metavar="MODEL", help="folder or Hub id of a causal LM or a text encoder")
    required(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 texts like those the model will read, each at least 3 x --length tokens (encoders: 24 x); not for "
        "collaborative",
    )


def add_inject_saving_options(add: Callable) -> None:
    """Add the options of `inject` that say how much to save."""
    saving = add_group(add, "how much to save")
    saving(
        "--mechanism",
        metavar="NAME",
        help="sparse: windows, pages, single keys; hsa: distant keys as block means; collaborative: shared query/key "
        "dimensions, needs --rank (default: sparse for causal models, hsa for encoders)",
    )
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


def add_inject_measurement_options(add: Callable) -> None:
    """Add the options of `inject` that control its measurements."""
    measurement = add_group(add, "measurement")
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
        "--plan",
        action="store_true",
        help="print the time and memory that this run will take, from a short measurement, and stop",
    )
    add_device_option(measurement)
    measurement(
        "--dtype",
        choices=(*DTYPES, "auto"),
        help="dtype of the loaded weights; auto: the checkpoint's (default: float32). Measurements are float32",
    )
    measurement(
        "--device-map",
        metavar="MAP",
        help='spread the model over devices: auto, or a JSON file {"module": device}',
    )


def add_inject_output_options(add: Callable) -> None:
    """Add the options of `inject` that say where to write."""
    output = add_group(add, "output")
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


def add_list_options(add: Callable) -> None:
    """list mechanisms: what each is for, how to apply it, its time and settings

    List the mechanisms of this package, or show one with its settings and their defaults.

    Examples:
      hyperattn list
      hyperattn list cone
      hyperattn list --json
    """
    add("mechanism", nargs="?", metavar="MECHANISM", help="show only this one, with its settings")


def add_look_options(add: Callable) -> None:
    """write a page that shows a model's attention on a text

    Write an HTML page and a JSON file that show a model's attention on a text and the effect of
    a patch.

    The page shows every head's attention (original and patched), its entropy, attention to the
    first token and how tree-like the hidden states are. For patches it adds gates, cones, the
    Poincaré disk, the blocks that HSA opens or the rules of sparse heads. The page needs no network. It ends with
    suggestions for the next step.

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
        help="layers to show in detail: 0,5,9 or last-4 (default: three patched layers)",
    )
    add(
        "--query",
        type=int,
        metavar="N",
        help="position of one more query token to show in detail",
    )


def add_push_options(add: Callable) -> None:
    """upload a saved model, adapter or config that reloads exactly

    Upload a folder that save_pretrained wrote to the Hub, in one commit, with its card.

    First the folder is loaded, saved again, and every tensor compared bit by bit; an adapter is
    loaded on its base model. Only known files are uploaded (safetensors weights, configs,
    tokenizer, card, files of `hyperattn export`). Other weights in the repository are deleted.
    A README.md that a person wrote is kept, in the folder and on the Hub.

    Examples:
      hyperattn push out your-name/SmolLM2-135M-cone --private --dry-run
    """
    add("model", metavar="MODEL_DIR", help="folder of a saved model, adapter or config")
    add("repo", metavar="REPO", help="repository on the Hub: owner/name; created if necessary")
    add("--private", action="store_true", help="make the repository private")
    add(
        "--dry-run",
        action="store_true",
        help="check and list the files to upload; no network, nothing written",
    )
    add(
        "--facts",
        metavar="FILE",
        help="JSON file with facts for the card: base_model, license, results, ...",
    )


def add_recover_options(add: Callable) -> None:
    """finish interrupted saves into a folder

    Finish interrupted saves into a folder and remove their temporary files.

    Exit code 0: the folder is complete, also if there was nothing to do. 2: a process is saving
    there now, or a save cannot be finished automatically; the message says what to do.

    Examples:
      hyperattn recover out
    """
    add("folder", metavar="DIR", help="the folder that was saved into")


def add_device_option(add: Callable) -> None:
    """Add --device."""
    add("--device", default="auto", help="torch device (default: cuda if available, else cpu)")


def add_causal_lm_options(add: Callable) -> None:
    """Add the options of commands that measure a causal LM."""
    add("model", metavar="MODEL", help="directory or Hub id of a causal LM")
    add(
        "--mechanism",
        type=parse_recipe,
        metavar="NAME",
        help="mechanism to patch into an unpatched model; several with +",
    )
    add(
        "--mode",
        choices=("blend", "replace"),
        default="blend",
        help="blend adds --mechanism behind gates at 0; replace replaces the dot product (default: blend)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help=f"dtype of the weights: {', '.join(DTYPES)} (default: {DTYPES[0]})",
    )
    add_device_option(add)


#: Sub-commands with the functions that add their options. The first line of a function's docstring
#: is the command's line in `hyperattn --help`, the rest is the command's own description.
COMMANDS = {
    "autoload": add_autoload_options,
    "bench": add_bench_options,
    "card": add_card_options,
    "compare": add_compare_options,
    "completion": add_completion_options,
    "convert": add_convert_options,
    "demo": add_demo_options,
    "describe": add_describe_options,
    "doctor": add_doctor_options,
    "eval": add_eval_options,
    "export": add_export_options,
    "heal": add_heal_options,
    "hyperbolicity": add_hyperbolicity_options,
    "inject": add_inject_options,
    "list": add_list_options,
    "look": add_look_options,
    "push": add_push_options,
    "recover": add_recover_options,
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser with every sub-command of `COMMANDS`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="hyperattn", description=ABOUT, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"hyperattn {_read_version()}")
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
            "--json", action="store_true", help="print JSON on stdout instead of text"
        )
        if name not in WITHOUT_MODELS:
            command.add_argument(
                "--import",
                dest="imports",
                action="append",
                default=[],
                metavar="MODULE",
                help="module or .py file with your own scores or rules, imported first; may be repeated",
            )
        add_options(command.add_argument)
    return parser


def _read_version() -> str:
    try:
        return version("hf-hyperattn")
    except PackageNotFoundError:
        return "(not installed)"
