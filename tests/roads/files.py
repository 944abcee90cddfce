"""Roads through files: saving, loading, other classes, merging, what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import accelerate
import safetensors.torch
import torch
import transformers as hf

import hf_hyperattn as ha

from .cases import Case, copy_of, inputs_of, logits
from .road import road

GROUP = "Files"
patched = lambda case: case.how == "patch"
no_hat = lambda case: (
    case.mechanism != "hat"
)  # an architecture of its own, with any attention inside
recorded = lambda case: (
    case.parametric and case.family != "bert"
)  # HAT is an architecture, without a record
trained = lambda case: case.parametric


def loaded(case: Case, folder, **options):
    return case.auto.from_pretrained(folder, **options)


def rewrite(folder: Path, change) -> Path:
    """Change the state dict of a checkpoint: `change(state) -> state`."""
    file = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file, {"format": "pt"})
    return folder


def saved(case: Case, folder: Path) -> Path:
    """A checkpoint of the case that may be changed."""
    return copy_of(case.folder(), folder / "checkpoint")


def added_names(case: Case) -> set[str]:
    return set(case.added(case.model()))


@road("save and load", GROUP, fast=True)
def save_and_load(case, folder):
    case.model().save_pretrained(folder)
    yield logits(loaded(case, folder)), case.logits


@road("save, load, save, load", GROUP)
def twice(case, folder):
    loaded(case, case.folder()).save_pretrained(folder)
    yield logits(loaded(case, folder)), case.logits


@road("shards", GROUP, fast=True)
def shards(case, folder):
    case.model().save_pretrained(folder, max_shard_size="20KB")
    yield len(list(folder.glob("*.safetensors"))) > 1, True
    yield logits(loaded(case, folder)), case.logits


@road("save with a variant", GROUP)
def variant(case, folder):
    case.model().save_pretrained(folder, variant="other")
    yield logits(loaded(case, folder, variant="other")), case.logits


@road("save with a state dict", GROUP)
def given_state(case, folder):
    model = case.model()
    model.save_pretrained(folder, state_dict={n: t.clone() for n, t in model.state_dict().items()})
    yield logits(loaded(case, folder)), case.logits


@road("save with names left out", GROUP, applies=recorded, fast=True)
def filtered_save(case, folder):
    model, names = case.model(), added_names(case)
    model.save_pretrained(
        folder, state_dict={n: t for n, t in model.state_dict().items() if n not in names}
    )
    yield logits(loaded(case, folder)), case.logits


@road("load in bfloat16", GROUP, fast=True)
def dtype_at_load(case, folder):
    expected = case.model()
    for parameter in expected.parameters():
        parameter.data = parameter.data.bfloat16()
    yield logits(loaded(case, case.folder(), dtype=torch.bfloat16)), logits(expected)


@road("load with low_cpu_mem_usage and device_map", GROUP)
def device_map(case, folder):
    yield logits(loaded(case, case.folder(), device_map="cpu")), case.logits


@road("load, eager asked for", GROUP, applies=no_hat)
def eager_at_load(case, folder):
    yield logits(loaded(case, case.folder(), attn_implementation="eager")), case.logits


@road("load, sdpa asked for", GROUP, fast=True, applies=no_hat)
def sdpa_at_load(case, folder):
    yield logits(loaded(case, case.folder(), attn_implementation="sdpa")), case.logits


@road("load, another name of ours asked for", GROUP, control=False, applies=no_hat)
def name_at_load(case, folder):
    other = "hype" if case.mechanism != "hype" else "cone"
    yield logits(loaded(case, case.folder(), attn_implementation=other)), case.logits


def hidden(model) -> torch.Tensor:
    """Hidden states that leave the base model, without padding."""
    inputs = inputs_of()
    with torch.no_grad():
        found = model.base_model.eval()(**inputs).last_hidden_state
    return found[inputs["attention_mask"].bool()].float()


def other_class(case, auto):
    model = auto.from_pretrained(case.folder())
    return hidden(model), hidden(case.model())


@road("load as the bare model", GROUP)
def bare(case, folder):
    model = hf.AutoModel.from_pretrained(case.folder()).eval()
    yield hidden(model), hidden(case.model())


@road("load with a head for sequences", GROUP, fast=True)
def sequence_head(case, folder):
    yield other_class(case, hf.AutoModelForSequenceClassification)


@road("load with a head for tokens", GROUP)
def token_head(case, folder):
    yield other_class(case, hf.AutoModelForTokenClassification)


@road("load with a head for questions", GROUP)
def question_head(case, folder):
    yield other_class(case, hf.AutoModelForQuestionAnswering)


@road("from_config and load_state_dict", GROUP, fast=True)
def from_config(case, folder):
    model = case.auto.from_config(hf.AutoConfig.from_pretrained(case.folder()))
    model.load_state_dict(case.model().state_dict())
    yield logits(model), case.logits


@road("from_config is fresh", GROUP, applies=patched, control=False)
def fresh_config(case, folder):
    model = case.auto.from_config(hf.AutoConfig.from_pretrained(case.folder()))
    model.load_state_dict(case.stock().state_dict(), strict=False)
    yield logits(model), logits(case.stock())


@road("load_state_dict", GROUP)
def state_dict(case, folder):
    torch.save(case.model().state_dict(), folder / "state.pt")
    model = case.fresh()
    model.load_state_dict(torch.load(folder / "state.pt"))
    yield logits(model), case.logits


@road("stock class: load_state_dict", GROUP, applies=trained, control=False)
def into_stock(case, folder):
    model = case.stock()
    model.load_state_dict(case.model().state_dict())
    yield logits(model), case.logits


@road("safetensors.torch.save_model, load_model", GROUP)
def by_safetensors(case, folder):
    safetensors.torch.save_model(case.model(), str(folder / "model.safetensors"))
    model = case.fresh()
    safetensors.torch.load_model(model, str(folder / "model.safetensors"))
    yield logits(model), case.logits


@road("Accelerate: save_model, load_checkpoint_in_model", GROUP)
def by_accelerate(case, folder):
    accelerate.Accelerator(cpu=True).save_model(case.model(), str(folder))
    model = case.fresh()
    accelerate.load_checkpoint_in_model(model, str(folder))
    yield logits(model), case.logits


@road("record without its tensors", GROUP, applies=recorded, fast=True, control=False)
def no_tensors(case, folder):
    names = added_names(case)
    place = rewrite(saved(case, folder), lambda s: {n: t for n, t in s.items() if n not in names})
    yield logits(loaded(case, place)), case.logits


@road("record without one tensor", GROUP, applies=recorded, fast=True, control=False)
def one_missing(case, folder):
    first = min(added_names(case))
    place = rewrite(saved(case, folder), lambda s: {n: t for n, t in s.items() if n != first})
    yield logits(loaded(case, place)), case.logits


@road("tensors without their record", GROUP, applies=recorded, fast=True, control=False)
def no_record(case, folder):
    place = saved(case, folder)
    config = json.loads((place / "config.json").read_text())
    for key in [k for k in config if "hyperattn" in k or k == "attn_implementation"]:
        del config[key]
    (place / "config.json").write_text(json.dumps(config))
    yield logits(loaded(case, place)), case.logits


@road("record without its tensors, in fresh_patch", GROUP, applies=patched, control=False)
def fresh_patch(case, folder):
    names = added_names(case)
    place = rewrite(saved(case, folder), lambda s: {n: t for n, t in s.items() if n not in names})
    with ha.fresh_patch():
        model = loaded(case, place)
    model.load_state_dict(case.stock().state_dict(), strict=False)
    yield logits(model), logits(case.fresh())


def average(left: dict, right: dict) -> dict:
    """The mean over the names of the left."""
    return {n: (t + right[n]) / 2 if n in right else t for n, t in left.items()}


def sibling(case: Case) -> dict[str, torch.Tensor]:
    """The state dict of another model of the same kind."""
    generator, model = torch.Generator().manual_seed(9), case.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.state_dict()


@road("merge of two, by all names", GROUP, fast=True)
def merge_all(case, folder):
    other, expected = sibling(case), case.model()
    place = rewrite(saved(case, folder), lambda s: average(s, other))
    expected.load_state_dict(average(expected.state_dict(), other))
    yield logits(loaded(case, place)), logits(expected)


@road("merge of two, by the stock model's names (mergekit)", GROUP, fast=True, applies=no_hat)
def merge_known(case, folder):
    known, other, expected = case.stock().state_dict(), sibling(case), case.model()
    place = rewrite(
        saved(case, folder), lambda s: average({n: t for n, t in s.items() if n in known}, other)
    )
    expected.load_state_dict(average(expected.state_dict(), other))
    yield logits(loaded(case, place)), logits(expected)


@road("pipeline", GROUP)
def pipeline(case, folder):
    task = "text-generation" if case.causal else "fill-mask"
    pipe = hf.pipeline(task, model=str(case.folder()), device="cpu")
    yield logits(pipe.model), case.logits
    model = hf.pipeline(task, model=case.model(), tokenizer=pipe.tokenizer, device="cpu").model
    yield logits(model), case.logits
