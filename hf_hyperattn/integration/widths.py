"""How wide a host is: of the hidden states that enter it, and of a head's queries, keys and values.

Modules say it in many words, so their projections are asked first, then the names they use, then the config.
"""

from __future__ import annotations

from torch import nn

#: The projections that read the host's hidden states, by the last part of their names, the query's first.
READERS = (
    "q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "q_proj_with_mqa", "q_a_proj",
    "qkv", "qkv_proj", "c_attn", "query_key_value", "Wqkv", "W_pack", "in_proj", "fused_qkv", "c_q",
)  # fmt: skip
VALUES = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj", "c_v")
WIDTH = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "encoder_dim")
HEAD_DIM = (
    "qk_head_dim", "head_dim", "attention_head_size", "head_size", "dim_per_head", "key_value_proj_dim", "d_kv",
    "d_head",
)  # fmt: skip
VALUE_DIM = ("v_head_dim", "value_head_dim")


def input_width(module: nn.Module) -> int | None:
    """Features of the hidden states [..., N, width] that a host is called with; None where nothing tells."""
    reader = projection(module, READERS)
    if reader is not None:
        return sizes(reader)[0]
    return first_int((module, getattr(module, "config", None)), WIDTH)


def head_dim(module: nn.Module, heads: int) -> int | None:
    """Numbers in a query or key of one head; None where nothing tells."""
    config = getattr(module, "config", None)
    found = first_int((module,), HEAD_DIM) or first_int((config,), HEAD_DIM)
    if found is None:
        width = first_int((module, config), WIDTH) or input_width(module)
        found = width // heads if width else None
    return found


def value_dim(module: nn.Module, heads: int, kv_heads: int) -> int | None:
    """Numbers in a value of one head; None where nothing tells."""
    found = first_int((module, getattr(module, "config", None)), VALUE_DIM)
    if found is None and (values := projection(module, VALUES)) is not None:
        written = sizes(values)[1]
        found = written // kv_heads if written % kv_heads == 0 else None
    return found or head_dim(module, heads)


def projection(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first linear map of these names inside a host."""
    inside = {n.rsplit(".", 1)[-1]: m for n, m in module.named_modules() if sizes(m) is not None}
    return next((inside[name] for name in names if name in inside), None)


def sizes(module: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a linear map: torch's, a quantised one, PEFT's around one, or Transformers' Conv1D."""
    module = getattr(module, "base_layer", module)
    if isinstance(getattr(module, "in_features", None), int):
        return module.in_features, module.out_features
    if isinstance(getattr(module, "nx", None), int):
        return module.nx, module.nf
    return None


def first_int(places: tuple, names: tuple[str, ...]) -> int | None:
    """The first of the names, on the first of the places, that is a number."""
    values = (_value(place, name) for place in places if place is not None for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _value(place, name: str):
    """The attribute, or None; a config may refuse one that differs between layers."""
    try:
        return getattr(place, name, None)
    except Exception:
        return None
