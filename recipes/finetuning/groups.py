"""The six groups of a recipe's settings, each field with its default, its help and what it may hold."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from hf_hyperattn import HyperAttnConfig
from hf_hyperattn.config import MechanismConfig
from hf_hyperattn.config.fields import check_field, option

LISTS = (tuple,)
#: What a model can be trained for, as the Hub calls it, with the sources of data for it.
TASKS = {
    "text-generation": ("python", "file", "hub"),
    "text-classification": ("reviews", "hub"),
    "image-classification": ("fashion-mnist", "hub"),
    "translation": ("libreoffice-help", "hub"),
}
SOURCES = tuple(dict.fromkeys(source for sources in TASKS.values() for source in sources))


class Group:
    """Base of the groups: every field is checked against its rule."""

    def __post_init__(self):
        for f in fields(self):
            check_field(type(self).__name__.lower(), f.name, getattr(self, f.name), f.metadata)


@dataclass(frozen=True)
class Model(Group):
    """Which model is patched."""

    name: str = option(
        "smollm2", "'smollm2' or 'minilm' (from packages), a folder, or an id on the Hub"
    )
    task: str = option("text-generation", "what it is trained for", choices=tuple(TASKS))
    config: dict | None = option(
        None,
        "model_type and sizes of a model that is trained from scratch, instead of a name",
        types=(dict,),
    )
    revision: str | None = option(None, "branch, tag or commit on the Hub", types=(str,))
    dtype: str = option("float32", "of the weights", choices=("float32", "bfloat16", "float16"))
    attention: str = option(
        "sdpa", "implementation before the patch; hosts that are not patched keep it"
    )


@dataclass(frozen=True)
class Mechanisms(Group):
    """What is done to it, as in `hf_hyperattn.patch_model`."""

    use: tuple = option((), "list of mechanisms, each with its name and its options", types=LISTS)
    layers: Any = option(
        None, "list of numbers, or a name such as last-third; null: all", types=(str, tuple, int)
    )
    heads: Any = option(None, "list of query heads, or a name; null: all", types=(str, tuple, int))
    mode: str = option("blend", "blend starts as the original model", choices=("blend", "replace"))
    include_cross_attention: bool = option(False, "patch cross-attention too")

    @cached_property
    def config(self) -> HyperAttnConfig:
        """All of it as one config."""
        if not self.use:
            raise ValueError("mechanisms.use is empty; allowed: a list such as [{mechanism: cone}]")
        try:
            rest = {
                n: getattr(self, n) for n in ("layers", "heads", "mode", "include_cross_attention")
            }
            return HyperAttnConfig([MechanismConfig.from_dict(m) for m in self.use], **rest)
        except ValueError as error:
            raise ValueError(f"mechanisms: {error}") from error


@dataclass(frozen=True)
class Peft(Group):
    """What is trained."""

    method: str = option(
        "lora",
        "lora: adapters and what was added; added: that alone; full: everything",
        choices=("lora", "added", "full"),
    )
    added: bool = option(
        True, "train what the patch added; false keeps it at zero, which is the control run"
    )
    r: int = option(8, "rank of LoRA matrices", least=1)
    alpha: float = option(16.0, "their scale times r", above=0)
    dropout: float = option(0.0, "before them, below 1", least=0)
    targets: tuple | None = option(
        None,
        "names of the layers they go to; null: the linear layers in patched hosts",
        types=LISTS,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.dropout >= 1:
            raise ValueError(
                f"peft.dropout={self.dropout!r} is not allowed; allowed: numbers from 0, below 1"
            )
        if self.method == "added" and not self.added:
            raise ValueError(
                "peft.method='added' with peft.added=false trains nothing; set one of them otherwise"
            )


@dataclass(frozen=True)
class Data(Group):
    """What is trained on and, beside it, what is held out."""

    source: str = option(
        "python",
        "of text: python (the source of its library), file, hub; of classes: reviews, fashion-mnist, hub; of "
        "translations: libreoffice-help, hub",
        choices=SOURCES,
    )
    name: str | None = option(
        None, "path of the file, or id or folder of the data set", types=(str,)
    )
    subset: str | None = option(None, "hub: the data set's configuration", types=(str,))
    revision: str | None = option(None, "hub: branch, tag or commit", types=(str,))
    split: str = option("train", "hub: what is trained on")
    held_out_split: str | None = option(
        None, "hub: what is held out; null: a tenth at most", types=(str,)
    )
    column: str = option("text", "hub: where the text or the image is")
    label: str = option("label", "hub: where the number of the class, or the translation, is")
    length: int = option(512, "tokens a row, or at most", least=8)
    held_out_tokens: int = option(
        8192, "text-generation: tokens that perplexity is measured on", least=32
    )
    train_rows: int = option(10000, "other tasks: rows that are trained on, at most", least=1)
    held_out_rows: int = option(500, "other tasks: rows that are measured, at most", least=1)

    def __post_init__(self):
        super().__post_init__()
        named = self.source in ("file", "hub")
        if named != (self.name is not None):
            wanted = "data.name, a path or an id" if named else "no data.name"
            raise ValueError(
                f"data.source={self.source!r} with data.name={self.name!r}; allowed: {wanted}"
            )


@dataclass(frozen=True)
class Trainer(Group):
    """How it is trained, and where everything is written."""

    output: str | None = option(
        None,
        "folder for checkpoints, adapter and results; null: outputs/FOLDER/NAME of the recipe",
        types=(str,),
    )
    steps: int = option(100, "optimizer steps", least=1)
    batch_size: int = option(1, "rows a step and process", least=1)
    accumulate: int = option(1, "passes a step", least=1)
    learning_rate: float = option(2e-4, "of weights and LoRA matrices", least=0)
    added_learning_rate: float = option(1e-2, "of gates and geometry", least=0)
    weight_decay: float = option(0.0, "of weights; gates and geometry are never decayed", least=0)
    warmup_steps: int = option(0, "steps until the rates are reached", least=0)
    schedule: str = option(
        "cosine", "of the rates", choices=("constant_with_warmup", "linear", "cosine")
    )
    max_grad_norm: float = option(1.0, "gradients are cut to it; 0: never", least=0)
    precision: str = option("float32", "of the arithmetic", choices=("float32", "bf16", "fp16"))
    checkpointing: bool = option(False, "recompute activations, which saves memory")
    save_every: int = option(50, "steps between checkpoints", least=1)
    held_out_every: int = option(
        0, "steps between losses on the held-out text; 0: only at both ends", least=0
    )
    log_every: int = option(5, "steps between points of the loss curve", least=1)
    merged: bool = option(False, "also save the patched model with LoRA merged into it")
    seed: int = option(0, "of everything random", least=0)


@dataclass(frozen=True)
class Hub(Group):
    """Where it is published."""

    push: bool = option(False, "upload the adapter (or the model) with its card")
    id: str | None = option(None, "owner/name", types=(str,))
    private: bool = option(True, "whether the repository is private")
    base_model: str | None = option(None, "id of the model on the Hub, for the card", types=(str,))
    license: str | None = option(None, "of what is published, such as apache-2.0", types=(str,))

    def __post_init__(self):
        super().__post_init__()
        if self.push and not self.id:
            raise ValueError("hub.push=true needs hub.id, 'owner/name'")
