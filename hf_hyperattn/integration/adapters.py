"""Adapters that hold added parameters: never loaded into a model without a place for them, and never loaded in part.

PEFT passes over names in `modules_to_save` that a model does not have. An adapter trained on a patched model would thus
load into the unpatched one without a word, and compute something else.

`load_adapter` of Transformers before 5.18 makes the modules of `modules_to_save` and reads no parameters into them; the
wrapper here does.
"""

from __future__ import annotations

import functools
import inspect

import transformers
from packaging.version import Version
from peft import set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import load_peft_weights
from transformers.integrations.peft import PeftAdapterMixin

#: What finds an adapter on the Hub.
WHERE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
WRAPPED = "_hyperattn_wrapped"


def check_place(model, config) -> None:
    """Raise if an adapter's config asks for `hyper` and no module of that name is in the model."""
    if "hyper" not in (getattr(config, "modules_to_save", None) or ()):
        return
    if not any(name.rpartition(".")[2] == "hyper" for name, _ in model.named_modules()):
        raise ValueError(
            f"this adapter was trained on a patched model (modules_to_save has 'hyper'), and {type(model).__name__} is "
            "not patched; first call hf_hyperattn.patch_model(model, ...) as it was patched then, for instance with "
            "hf_hyperattn.HyperAttnConfig.from_pretrained(adapter_directory)"
        )


def install() -> None:
    """Put the check before PEFT's injection of an adapter, which every way of loading one goes through; once only."""
    inject = BaseTuner.inject_adapter
    if hasattr(inject, WRAPPED):
        return

    @functools.wraps(inject)
    def inject_adapter(self, model, adapter_name, *args, **kwargs):
        check_place(model, self.peft_config[adapter_name])
        return inject(self, model, adapter_name, *args, **kwargs)

    setattr(inject_adapter, WRAPPED, True)
    BaseTuner.inject_adapter = inject_adapter


def complete_load_adapter() -> None:
    """Make `load_adapter` read added parameters too; needless from Transformers 5.18 on."""
    load = PeftAdapterMixin.load_adapter
    if Version(transformers.__version__) >= Version("5.18") or hasattr(load, WRAPPED):
        return

    @functools.wraps(load)
    def load_adapter(self, *args, **kwargs):
        found = load(self, *args, **kwargs)
        given = inspect.signature(load).bind(self, *args, **kwargs).arguments
        name = given.get("adapter_name") or "default"
        if "hyper" in (getattr(self.peft_config[name], "modules_to_save", None) or ()):
            set_peft_model_state_dict(self, adapter_weights(given), name)
        return found

    setattr(load_adapter, WRAPPED, True)
    PeftAdapterMixin.load_adapter = load_adapter


def adapter_weights(given: dict) -> dict:
    """The parameters of an adapter, from the arguments of `load_adapter`."""
    weights, config = given.get("adapter_state_dict"), given.get("load_config")
    if weights is None:
        hub = getattr(config, "download_kwargs", None) or {}
        hub = {**hub, **(given.get("adapter_kwargs") or {}), **given, **given.get("kwargs", {})}
        where = given.get("peft_model_id") or config.pretrained_model_name_or_path
        weights = load_peft_weights(where, "cpu", **{k: hub[k] for k in WHERE if hub.get(k)})
    return {key.removeprefix("base_model.model."): value for key, value in weights.items()}


install()
complete_load_adapter()
