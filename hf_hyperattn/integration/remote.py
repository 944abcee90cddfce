"""What an exported checkpoint runs on where this package is not installed: `hyperattn export` copies it.

It is importing the package in small: the attention function is registered, and a model of an exported class is patched
while it is built. Nothing of Transformers is wrapped, so only the exported classes know of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..config import HyperAttnConfig
from .attach import patch_from_record, resolve_stock
from .attention import family_mask, patched_forward
from .call import note_all
from .checkpoint_config import INTERNAL, all_configs, patched_hosts, saved_name, tree
from .conversions import rebuild_conversion
from .record_check import check_loaded
from .stock import PATCHED, RUNNING, marked, run_beneath

REQUESTED = "_hyperattn_requested"


if TYPE_CHECKING:
    Stock = PreTrainedModel
else:
    Stock = object


class Patched(Stock):
    """Stands before a stock class and puts every `hyper` in place before the weights are loaded."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """The modelling is the stock's, and so are the names of its weights and their conversion when loading."""
        return False

    def __init__(self, config, *args, **kwargs):
        ours = [part for part in tree(config) if part._attn_implementation == PATCHED]
        for part in ours:
            setattr(part, INTERNAL, RUNNING)
        self.__dict__[REQUESTED] = ours
        super().__init__(config, *args, **kwargs)

    def post_init(self):
        """As in Transformers, after patching.

        Raises:
            ValueError: the config does not say what was patched, or names hosts that the model does not have.
        """
        for part in self.__dict__.pop(
            REQUESTED
        ):  # some models set the names of their parts from the one at the top
            setattr(part, INTERNAL, RUNNING)
        note_all(self)
        resolve_stock(self)
        recorded: Any = getattr(self.config, "hyperattn", None)
        record = HyperAttnConfig.from_dict(recorded)
        patch_from_record(self, record)
        rebuild_conversion(self, record)
        for config in all_configs(self):
            if name := saved_name(config):
                config.attn_implementation = (
                    name  # for the next save: Transformers writes no other name
                )
        for _, host in patched_hosts(self):
            host.register_forward_pre_hook(stay_patched)
        super().post_init()

    @staticmethod
    def _finalize_model_loading(model, load_config, loading_info):
        """As in Transformers, after the record is compared with the tensors."""
        check_loaded(model, loading_info, load_config.pretrained_model_name_or_path)
        return PreTrainedModel._finalize_model_loading(model, load_config, loading_info)

    def set_attn_implementation(self, *args, **kwargs):
        """As in Transformers, for what runs beneath the mechanism."""
        super().set_attn_implementation(*args, **kwargs)
        for config in filter(marked, all_configs(self)):
            run_beneath(config)


def stay_patched(host, args) -> None:
    """The hook before a host's call: a name that was written into its config becomes what runs beneath."""
    if host.config._attn_implementation != RUNNING:
        run_beneath(host.config)


AttentionInterface.register(RUNNING, patched_forward)
AttentionMaskInterface.register(RUNNING, family_mask)
