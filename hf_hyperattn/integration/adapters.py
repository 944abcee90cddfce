"""A guard in PEFT: an adapter that holds added parameters is never loaded into a model that has no place for them.

PEFT passes over names in `modules_to_save` that a model does not have. An adapter trained on a patched model would thus
load into the unpatched one without a word, and compute something else.
"""

from __future__ import annotations

import functools

from peft.tuners.tuners_utils import BaseTuner

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


install()
