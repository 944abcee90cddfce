"""Roads through PEFT: each method trained, saved, loaded, switched, disabled, merged."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import peft
import torch

import hf_hyperattn as ha

from .cases import Case, inputs_of, logits
from .road import road
from .tools import moved_under_adapter

GROUP = "PEFT"
TARGETS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_proj"], "bert": ["query", "value"]}
FEED = {"llama": ["down_proj"], "gpt2": ["mlp.c_proj"], "bert": ["output.dense"]}
NORMS = {"llama": ["input_layernorm"], "gpt2": ["ln_1"], "bert": ["LayerNorm"]}
EMBEDDINGS = {"llama": "embed_tokens", "gpt2": "wte", "bert": "word_embeddings"}


def on(config, **options):
    """A config for the linear layers of a case."""
    return lambda case: config(target_modules=TARGETS[case.family], **options)


def prompt(config, **options):
    task = lambda case: "CAUSAL_LM" if case.causal else "TOKEN_CLS"
    return lambda case: config(task_type=task(case), num_virtual_tokens=3, **options)


METHODS = {
    "LoRA": on(peft.LoraConfig, r=4, lora_alpha=8, init_lora_weights="gaussian"),
    "LoRA with DoRA": on(peft.LoraConfig, r=4, use_dora=True),
    "LoRA on all linear layers": lambda case: peft.LoraConfig(r=4, target_modules="all-linear"),
    "IA3": lambda case: peft.IA3Config(
        target_modules=TARGETS[case.family] + FEED[case.family],
        feedforward_modules=FEED[case.family],
    ),
    "AdaLoRA": on(peft.AdaLoraConfig, init_r=4, target_r=2, total_step=10),
    "VeRA": on(peft.VeraConfig, r=4),
    "LoHa": on(peft.LoHaConfig, r=4),
    "LoKr": on(peft.LoKrConfig, r=4),
    "OFT": on(peft.OFTConfig, oft_block_size=8),
    "BOFT": on(peft.BOFTConfig, boft_block_size=8),
    "HRA": on(peft.HRAConfig, r=4),
    "FourierFT": on(peft.FourierFTConfig, n_frequency=20),
    "RandLoRA": on(peft.RandLoraConfig, r=4),
    "MiSS": on(peft.MissConfig, r=4),
    "RoAd": on(peft.RoadConfig, group_size=8),
    "C3A": on(peft.C3AConfig, block_size=8),
    "SHiRA": on(peft.ShiraConfig, r=4),
    "LN tuning": lambda case: peft.LNTuningConfig(
        target_modules=["attention_norm"] if case.mechanism == "hat" else NORMS[case.family]
    ),
    "trainable tokens": lambda case: peft.TrainableTokensConfig(
        token_indices=inputs_of()["input_ids"][1, :3].tolist(),
        target_modules=[EMBEDDINGS[case.family]],
    ),
    "prompt tuning": prompt(peft.PromptTuningConfig),
    "prefix tuning": prompt(peft.PrefixTuningConfig),
    "P-tuning": prompt(peft.PromptEncoderConfig, encoder_hidden_size=16),
}


def adapted(case: Case, method, model=None, steps: int = 3, name: str = "default"):
    """A model with an adapter that has learned something."""
    torch.manual_seed(3)
    model = peft.get_peft_model(
        model if model is not None else case.model(), method(case), adapter_name=name
    )
    learn(model, steps)
    return model


def learn(model, steps: int = 3, rate: float = 0.03) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    model.eval()  # no dropout
    for step in range(steps):
        optimizer.zero_grad()
        model(**inputs_of(), labels=inputs_of()["input_ids"]).loss.backward()
        optimizer.step()
        if hasattr(model.base_model, "update_and_allocate"):
            model.base_model.update_and_allocate(step)


def changed(found, before) -> bool:
    return found.shape != before.shape or (found - before).abs().max().item() > 1e-4


def train(method, case, folder):
    """From where training starts: what was added is trained too, or it is said that it is not."""
    model = peft.get_peft_model(case.fresh(), method(case))
    start = logits(model)
    learn(model)
    yield changed(logits(model), start), True
    yield not case.parametric or case.mechanism == "hat" or moved_under_adapter(case, model), True


def save_and_load(method, case, folder):
    model = adapted(case, method)
    model.save_pretrained(folder)
    yield logits(peft.PeftModel.from_pretrained(case.model(), folder)), logits(model)


def switch(method, case, folder):
    """A second adapter on the same model, to it and back."""
    model = adapted(case, method)
    first = logits(model)
    model.add_adapter("second", method(case))
    model.set_adapter("second")
    learn(model, 2)
    second = logits(model)
    yield changed(second, first), True
    model.set_adapter("default")
    yield logits(model), first
    model.set_adapter("second")
    yield logits(model), second
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(case.model(), folder / "second")
    yield logits(again), second


def disable(method, case, folder):
    model = adapted(case, method)
    found = logits(model)
    with model.disable_adapter():
        yield logits(model), case.logits
    yield logits(model), found


def merge(method, case, folder):
    model = adapted(case, method)
    found = logits(model)
    merged = model.merge_and_unload()
    yield logits(merged), found
    merged.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder)), logits(merged)


#: Each kind of method once, for every case; the others, which differ in arithmetic alone, for three.
KINDS = ("LoRA", "IA3", "LN tuning", "prompt tuning")
FEW = ("cone (patch)", "trilinear (patch)", "hsa (name)")


def cases_of(label: str):
    return None if label in KINDS else lambda case: case.label in FEW


STEPS = {
    "train": train,
    "save, load": save_and_load,
    "switch": switch,
    "disable": disable,
    "merge": merge,
}
for label, method in METHODS.items():
    for step, function in STEPS.items():
        fast = (label, step) in {("LoRA", "save, load"), ("IA3", "merge")}
        options = {"tolerance": 1e-4} if step == "merge" else {}  # weights are put together anew
        road(f"{label}: {step}", GROUP, fast=fast, applies=cases_of(label), **options)(
            partial(function, method)
        )


LORA = METHODS["LoRA"]
patched = lambda case: case.how == "patch"


def with_hyper(method):
    """The same method, told to train and save what was added whole."""

    def make(case):
        config = method(case)
        config.modules_to_save = ["hyper"]
        return config

    return make


for label in [
    m
    for m in METHODS
    if not m.startswith(("prompt", "prefix", "P-", "trainable", "LoRA with", "LoRA on"))
]:
    for step in ("save, load", "disable", "merge"):
        options = {"tolerance": 1e-4} if step == "merge" else {}
        applies = lambda case, every=label == "LoRA": patched(case) and (every or case.label in FEW)
        road(f"{label} and hyper: {step}", GROUP, applies=applies, control=False, **options)(
            partial(STEPS[step], with_hyper(METHODS[label]))
        )


def ours(case):
    return ha.lora_config(case.fresh(), r=4)


for step, function in STEPS.items():
    road(
        f"ha.lora_config: {step}",
        GROUP,
        applies=patched,
        control=False,
        fast=step == "save, load",
        tolerance=1e-4,
    )(partial(function, ours))


@road("LoRA: unload", GROUP)
def unload(case, folder):
    yield logits(adapted(case, LORA).unload()), case.logits


@road("ha.lora_config: unload", GROUP, applies=patched, control=False)
def unload_ours(case, folder):
    yield logits(adapted(case, ours).unload()), case.logits


@road("LoRA: delete", GROUP)
def delete(case, folder):
    model = adapted(case, LORA)
    model.add_adapter("second", LORA(case))
    model.set_adapter("second")
    second = logits(model)
    model.delete_adapter("default")
    yield logits(model), second


@road("LoRA: load on the stock model", GROUP, control=False, fast=True)
def on_stock(case, folder):
    model = adapted(case, LORA)
    model.save_pretrained(folder)
    yield logits(peft.PeftModel.from_pretrained(case.stock(), folder)), logits(model)


@road("ha.lora_config: load on the stock model", GROUP, control=False, applies=patched, fast=True)
def ours_on_stock(case, folder):
    model = adapted(case, ours)
    model.save_pretrained(folder)
    yield logits(peft.PeftModel.from_pretrained(case.stock(), folder)), logits(model)


@road(
    "LoRA: AutoPeftModel, AutoModel of the adapter's folder",
    GROUP,
    applies=lambda case: case.mechanism != "hat",  # converted in memory it has no folder
)
def by_auto_class(case, folder):
    """The adapter names the base by its folder; patched in memory, that is the stock model's."""
    model = adapted(case, LORA)
    model.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder)), logits(model)


@road("ha.lora_config: AutoModel of the adapter's folder", GROUP, control=False, applies=patched)
def ours_by_auto_class(case, folder):
    """The base that the adapter names is stock."""
    stock = case.stock()
    model = adapted(
        case, lambda case: ha.HyperLoraConfig(hyperattn=ours(case).hyperattn, r=4), stock
    )
    model.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder)), logits(model)


@road("LoRA: AutoModel of the adapter's folder, saved base", GROUP)
def by_auto_class_saved(case, folder):
    base = case.auto.from_pretrained(case.folder())
    yield logits(base), case.logits
    model = adapted(case, LORA, base)
    model.save_pretrained(folder)
    yield logits(case.auto.from_pretrained(folder)), logits(model)


@road("LoRA: Transformers' own add_adapter, save, load_adapter", GROUP, native_adapters=True)
def native(case, folder):
    model = case.model()
    model.add_adapter(LORA(case), "first")
    learn(model)
    found = logits(model)
    model.save_pretrained(folder)
    other = case.model()
    other.load_adapter(str(folder), "first")
    yield logits(other), found


@road("LoRA: disable_adapters, enable_adapters", GROUP, native_adapters=True)
def native_switch(case, folder):
    model = case.model()
    model.add_adapter(LORA(case), "first")
    learn(model)
    found = logits(model)
    model.disable_adapters()
    yield logits(model), case.logits
    model.enable_adapters()
    yield logits(model), found


@road(
    "ha.lora_config: disable_adapters, enable_adapters",
    GROUP,
    applies=patched,
    control=False,
    fast=True,
    native_adapters=True,
)
def native_switch_ours(case, folder):
    model = case.model()
    model.add_adapter(ours(case), "first")
    learn(model)
    found = logits(model)
    model.disable_adapters()
    yield logits(model), case.logits
    model.enable_adapters()
    yield logits(model), found


@road(
    "ha.lora_config: Transformers' own add_adapter, save, load_adapter",
    GROUP,
    applies=patched,
    control=False,
    native_adapters=True,
)
def native_ours(case, folder):
    model = case.model()
    model.add_adapter(ours(case), "first")
    learn(model)
    model.save_pretrained(folder)
    other = case.model()
    other.load_adapter(str(folder), "first")
    yield logits(other), logits(model)


def mixed(case: Case, method):
    model = adapted(case, method, name="a")
    model.add_adapter("b", method(case))
    model.set_adapter("b")
    learn(model, 2)
    rows = []
    for name in ("a", "b"):
        model.set_adapter(name)
        rows.append(model.eval()(**inputs_of()).logits)
    with torch.no_grad():
        found = model(**inputs_of(), adapter_names=["a", "b"]).logits
    mask = inputs_of()["attention_mask"].bool()
    for row in (0, 1):
        yield found[row][mask[row]], rows[row][row][mask[row]]


@road("LoRA: a batch of two adapters", GROUP)
def mixed_batch(case, folder):
    yield from mixed(case, LORA)


@road("ha.lora_config: a batch of two adapters", GROUP, applies=patched, control=False)
def mixed_batch_ours(case, folder):
    yield from mixed(case, ours)


@road("LoRA: add_weighted_adapter", GROUP)
def weighted(case, folder):
    model = adapted(case, LORA, name="a")
    found = logits(model)
    model.add_weighted_adapter(["a", "a"], [0.5, 0.5], "mean", combination_type="cat")
    model.set_adapter("mean")
    yield logits(model), found


def hotswapped(case, folder, method):
    from peft.utils.hotswap import hotswap_adapter

    model = adapted(case, method)
    found = logits(model)
    model.save_pretrained(folder)
    other = adapted(case, method, steps=1)
    hotswap_adapter(other, str(folder), "default")
    yield logits(other), found


@road("LoRA: hotswap_adapter", GROUP)
def hotswap(case, folder):
    yield from hotswapped(case, folder, LORA)


@road("ha.lora_config: hotswap_adapter", GROUP, applies=patched, control=False)
def hotswap_ours(case, folder):
    yield from hotswapped(case, folder, ours)


@road("patched under an active adapter", GROUP, applies=patched, control=False, fast=True)
def patched_late(case, folder: Path):
    from .cases import LAYERS

    model = adapted(case, LORA, case.stock())
    ha.patch_model(model, case.config, layers=LAYERS)
    learn(model)
    found = logits(model)
    model.save_pretrained(folder)
    yield logits(peft.PeftModel.from_pretrained(case.fresh(), folder)), found


@road("unpatch_model under an adapter", GROUP, applies=patched, control=False)
def unpatched_under(case, folder):
    """The adapter stays loadable on the stock model, which it now belongs to."""
    model = adapted(case, LORA)
    ha.unpatch_model(model)
    found = logits(model)
    model.save_pretrained(folder)
    yield logits(peft.PeftModel.from_pretrained(case.stock(), folder)), found
