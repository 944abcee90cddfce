"""Model cards for what is published with hf_hyperattn: templates and a small renderer.

Plain data in, ``huggingface_hub`` card objects out; this package imports neither ``hf_hyperattn`` nor torch.

    card = hub_cards.render_model_card(config, base_model="org/base", license="apache-2.0", results=[...])
    hub_cards.write_card("a/saved/model")       # beside the weights; a README.md of a person's own is kept
"""

from .beside import own_card_kept, try_to_write_card, write_card
from .directory import card_for_directory, config_folder, hub_id_or_none
from .errors import explain_hub_error, explained
from .facts import Facts
from .published import patched_facts
from .render import render_adapter_card, render_config_card, render_model_card
from .results import Result
from .uploads import card_beside, hook_uploads, unhook_uploads

__all__ = [
    "Facts",
    "Result",
    "card_beside",
    "card_for_directory",
    "config_folder",
    "explain_hub_error",
    "explained",
    "hook_uploads",
    "hub_id_or_none",
    "own_card_kept",
    "patched_facts",
    "render_adapter_card",
    "render_config_card",
    "render_model_card",
    "try_to_write_card",
    "unhook_uploads",
    "write_card",
]
