"""The model of a recipe: loaded, patched, made ready to train, saved, and loaded again from what was saved."""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import set_seed

import hf_hyperattn as ha
from hf_hyperattn.utils.files import write_atomically
from hyperattn_cli.shared.smollm2 import NAME, smollm2

from .groups import Model, Peft
from .settings import Settings

#: Models that packages hold: their names on the Hub.
PACKAGED = {"smollm2": NAME, "minilm": "sentence-transformers/all-MiniLM-L6-v2"}
#: What loads a model for each task, and how an error calls it.
AUTO = {
    "text-generation": (AutoModelForCausalLM, "a causal LM"),
    "text-classification": (AutoModelForSequenceClassification, "a classifier of texts"),
    "image-classification": (AutoModelForImageClassification, "a classifier of images"),
    "translation": (AutoModelForSeq2SeqLM, "an encoder with a decoder"),
}


def locate(model: Model) -> str:
    """Where the model is: a folder, or an id on the Hub. The packaged one is converted first where need be."""
    if model.name == "smollm2":
        return str(smollm2())
    if model.name == "minilm":
        from experiments.hsa_texts import minilm_folder

        return str(minilm_folder())
    path = Path(model.name).expanduser()
    return str(path) if path.is_dir() else model.name


def id_on_hub(settings: Settings) -> str | None:
    """The id of the base model on the Hub, as far as the recipe tells it."""
    name = settings.model.name
    local = name in PACKAGED or settings.model.config or Path(name).expanduser().exists()
    return settings.hub.base_model or (None if local else name)


def shown_name(model: Model) -> str:
    """What to call the model where it is written down: never a path."""
    if model.config:
        return f"{model.config.get('model_type')}, untrained"
    if model.name in PACKAGED:
        return PACKAGED[model.name]
    path = Path(model.name).expanduser()
    return path.resolve().name if path.exists() else model.name


def load_processor(cls, model: Model):
    """The tokenizer or image processor that was published with the model, by its Auto class."""
    return from_pretrained(cls, model)


def load_base(settings: Settings, classes: int | None = None) -> nn.Module:
    """The model as it was published, or untrained, in evaluation mode; what has to be drawn is drawn from the seed.

    Args:
        classes: that a classifier tells apart; one with another head gets a new one.
    """
    model, (cls, _) = settings.model, AUTO[settings.model.task]
    options = dict(dtype=getattr(torch, model.dtype), attn_implementation=model.attention)
    sizes = {} if classes is None else {"num_labels": classes}
    set_seed(settings.trainer.seed)
    if model.config is None:
        return from_pretrained(
            cls, model, **options, **sizes, **({"ignore_mismatched_sizes": True} if sizes else {})
        )
    try:
        return cls.from_config(AutoConfig.for_model(**model.config, **sizes), **options).eval()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"model.config={model.config!r}: {' '.join(str(error).split())[:300]}"
        ) from error


def check_length(model: nn.Module, length: int) -> None:
    """Raise if rows are longer than the model has positions for."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ValueError(
            f"data.length={length} is not allowed; allowed: up to {positions}, what the model reads"
        )


def from_pretrained(cls, model: Model, **options):
    """Load through an Auto class; what goes wrong is said in one line."""
    where = locate(model)
    try:
        return cls.from_pretrained(where, revision=model.revision, **options)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"model.name={model.name!r}: cannot be loaded as {AUTO[model.task][1]}: {reason}"
        ) from error


def make_trainable(model: nn.Module, settings: Settings) -> nn.Module:
    """Patch a loaded model and choose what is trained. Adapters are drawn from torch's generator."""
    ha.patch_model(model, settings.mechanisms.config)
    peft = settings.peft
    if peft.method == "lora":
        model = get_peft_model(model, adapter_config(model, peft))
    elif peft.method == "added":
        ha.freeze_base(model)
    elif not peft.added:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".hyper." not in name)
    if settings.trainer.checkpointing:
        model.enable_input_require_grads()
    return model


def adapter_config(model: nn.Module, peft: Peft):
    """The PEFT config by the recipe; the added parameters train beside LoRA unless `peft.added` is false."""
    targets = None if peft.targets is None else list(peft.targets)
    options = dict(lora_alpha=peft.alpha, lora_dropout=peft.dropout, target_modules=targets)
    config = ha.lora_config(model, peft.r, **options)
    if not peft.added:
        options["target_modules"] = sorted(config.target_modules)
        return LoraConfig(r=peft.r, task_type=config.task_type, **options)
    return config


def gathered(model: nn.Module) -> AbstractContextManager:
    """All weights of a model that DeepSpeed's ZeRO-3 has shared out while it was loaded."""
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()))


def count(model: nn.Module) -> dict[str, int]:
    """Parameters: all, added by the patch, trained. Counted before anything is sharded."""
    parameters = list(model.named_parameters())
    original = [(n, p) for n, p in parameters if ".lora_" not in n]
    return {
        "all": sum(p.numel() for _, p in original),
        "added": sum(p.numel() for n, p in original if ".hyper." in n),
        "trained": sum(p.numel() for _, p in parameters if p.requires_grad),
    }


def finish(draft: Path, target: Path, base_model: str | None) -> None:
    """Give a saved folder its final name: it is there whole, or not at all.

    Paths of this machine are taken out; an adapter names its base by the id on the Hub, if it has one.
    """
    described = draft / "adapter_config.json"
    if described.is_file():
        config = json.loads(described.read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = base_model
        write_atomically(described, json.dumps(config, indent=2, sort_keys=True) + "\n")
    (draft / "training_args.bin").unlink(
        missing_ok=True
    )  # a pickle, with paths of this machine in it
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def load_again(settings: Settings, folder: Path, classes: int | None = None) -> nn.Module:
    """The trained model from what was saved, in a process or years later."""
    if settings.peft.method != "lora":
        dtype = getattr(torch, settings.model.dtype)
        return AUTO[settings.model.task][0].from_pretrained(folder, dtype=dtype).eval()
    base = load_base(settings, classes)
    ha.patch_model(base, ha.HyperAttnConfig.from_pretrained(folder))
    return PeftModel.from_pretrained(base, folder).eval()


def base_of(model: nn.Module) -> nn.Module:
    """The Transformers model inside PEFT's."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def gates(model: nn.Module) -> dict:
    """Where the gates stand: the lowest, the highest, and the mean size."""
    found = [
        p.detach().float().flatten()
        for n, p in model.named_parameters()
        if n.endswith(".gate") and ".base_layer." not in n
    ]
    if not found:
        return {}
    values = torch.cat(found)
    return {
        "lowest": values.min().item(),
        "highest": values.max().item(),
        "mean_size": values.abs().mean().item(),
    }
