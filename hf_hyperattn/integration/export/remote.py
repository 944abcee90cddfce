"""Run an exported checkpoint without this package: `hyperattn export` copies this module.

It is a small version of importing the package. The attention function is registered, and a model of
an exported class is patched while it is built. No method of Transformers is wrapped, so only the
exported classes are affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...config import HyperAttnConfig
from ..attention.call import note_all
from ..attention.call_path import family_mask, patched_forward
from ..attention.hyper import patched_hosts
from ..attention.stock import PATCHED, RUNNING, marked, run_beneath
from ..loading.record_check import check_loaded
from ..patching.attach import patch_from_record, resolve_stock
from ..patching.checkpoint_config import INTERNAL, all_configs, list_configs, saved_name
from ..patching.conversions import rebuild_conversion

#: Attribute of a model under construction: the configs that ask for our name.
REQUESTED = "_hyperattn_requested"

# A mixin: the type checker sees the class that it stands before.
if TYPE_CHECKING:
    Stock = PreTrainedModel
else:
    Stock = object


class Patched(Stock):
    """A mixin before a Transformers class: attaches every `hyper` before loading."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: weights have the names of the Transformers class.

        For custom code, Transformers skips the conversion of names when it loads.
        """
        return False

    def __init__(self, config, *args, **kwargs):
        # This copy registers a name of its own (see `stock.RUNNING`), not the one in config.json.
        ours = [part for part in list_configs(config) if part._attn_implementation == PATCHED]
        for part in ours:
            setattr(part, INTERNAL, RUNNING)
        self.__dict__[REQUESTED] = ours
        super().__init__(config, *args, **kwargs)

    def post_init(self):
        """Patch the model as its config records, then finish as in Transformers.

        Raises:
            ValueError: The config has no record, or names attention layers that the model lacks.
        """
        # Again, because some models overwrite the names of their parts with the one at the top.
        for part in self.__dict__.pop(REQUESTED):
            setattr(part, INTERNAL, RUNNING)
        note_all(self)
        resolve_stock(self)
        recorded: Any = getattr(self.config, "hyperattn", None)
        record = HyperAttnConfig.from_dict(recorded)
        patch_from_record(self, record)
        rebuild_conversion(self, record)
        for config in all_configs(self):
            # For the next save: Transformers only writes a name that was assigned to the config.
            if name := saved_name(config):
                config.attn_implementation = name
        for _, host in patched_hosts(self):
            host.register_forward_pre_hook(stay_patched)
        super().post_init()

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        """Compare the record with the loaded tensors, then finish as in Transformers."""
        check_loaded(model, loading_info, load_config.pretrained_model_name_or_path)
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def set_attn_implementation(self, *args, **kwargs):
        """Set the base implementation, and keep the patch."""
        super().set_attn_implementation(*args, **kwargs)
        for config in filter(marked, all_configs(self)):
            run_beneath(config)


def stay_patched(host, args) -> None:
    """Keep the patch if another name was assigned to the config; a forward pre-hook.

    The assigned name becomes the base implementation.
    """
    # Missing upstream: a callback for an assignment to `config._attn_implementation`. The package
    # wraps the config class instead, which an exported checkpoint must not do.
    if host.config._attn_implementation != RUNNING:
        run_beneath(host.config)


AttentionInterface.register(RUNNING, patched_forward)
AttentionMaskInterface.register(RUNNING, family_mask)
