"""Checks of arguments that the functions of all mechanisms share.

A message names the argument, its value and the allowed values. Values of a tensor are not checked
while it is traced, fake or on the meta device. Learned numbers are not checked: their
parametrisation keeps them in range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config.fields import LARGEST, SMALLEST, refuse
from ..utils.readable import can_read
from ..utils.text import short

if TYPE_CHECKING:
    from .base import Host

#: Descriptions of the allowed numbers, by the smallest one.
ALLOWED = {
    SMALLEST: f"finite numbers above 0 that float32 holds, from {SMALLEST:g} to {LARGEST:g}",
    0.0: f"finite numbers from 0 to {LARGEST:g}",
    -LARGEST: f"a finite number of at most {LARGEST:g}",
}


def check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = True,
    **flags: bool,
) -> None:
    """Check the arguments that the functions of all mechanisms share.

    Args:
        query: [B, H, N, d].
        key: [B, H or Hkv, M, d].
        value: [B, H or Hkv, M, dv]. Functions of scores, which take no value, pass the key.
        attn_mask, dropout_p, scale, enable_gqa: As in `scaled_dot_product_attention`.
        **flags: Other arguments that must be True or False.

    Raises:
        ValueError: An argument is not allowed.
    """
    # Flags first: `check_qkv` already relies on one.
    for name, flag in {"enable_gqa": enable_gqa, **flags}.items():
        if not isinstance(flag, bool | torch.SymBool):
            refuse(name, flag, "True or False")
    check_qkv(query, key, value, enable_gqa)
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
    check_dropout(dropout_p)
    if scale is not None:
        check_number("scale", scale)


def check_tensor(name: str, value: object) -> None:
    """Raise unless `value` is a dense tensor of real numbers."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is of type {type(value).__name__}; allowed: a tensor")
    # Sparse and nested tensors fail later with errors that do not name the argument.
    if value.layout is not torch.strided:
        raise ValueError(
            f"{name} has layout {value.layout}; allowed: a dense tensor, torch.strided"
        )
    if value.is_complex():
        raise ValueError(f"{name} has dtype {value.dtype}; allowed: real numbers")


def check_number(name: str, value: object, least: float = -LARGEST) -> None:
    """Raise unless `value` is a finite number from `least`, a key of `ALLOWED`."""
    if isinstance(value, torch.SymInt | torch.SymFloat):  # traced: there is no value
        return
    # bool is a subclass of int.
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value <= LARGEST
    ):
        refuse(name, value, ALLOWED[least])


def check_qkv(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Check the ranks, dtypes and sizes of query, key and value."""
    # Each tensor by itself first, since the comparisons below need four axes.
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, t)
        if t.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; allowed: 4 axes, [batch, heads, length, dim]"
            )
        if not t.is_floating_point():
            raise ValueError(f"{name} has dtype {t.dtype}; allowed: floating point")
        if t.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} has batch size {t.shape[0]}, query has {query.shape[0]}; they must be equal"
            )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key has dim {key.shape[-1]}, query has {query.shape[-1]}; they must be equal"
        )
    if query.shape[-1] < 2:
        raise ValueError(f"query has dim {query.shape[-1]}; allowed: at least 2")
    _check_heads(query, key, enable_gqa)
    if value.shape[-1] < 1:
        raise ValueError("value has dim 0; allowed: at least 1")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value has heads and length {tuple(value.shape[1:3])}, key has {tuple(key.shape[1:3])}; they "
            "must be equal"
        )


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    """Check the numbers of heads: equal, or with `enable_gqa` a divisor."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        raise ValueError(
            f"key has {kv_heads} heads, query has {heads}; allowed: equal numbers, or enable_gqa=True"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"key has {kv_heads} heads, query has {heads}; allowed: a number that divides the query's"
        )


def check_dropout(dropout_p: float) -> None:
    """Raise unless a dropout probability is in [0, 1)."""
    number = isinstance(dropout_p, int | float) and not isinstance(dropout_p, bool)
    if not number or not 0.0 <= dropout_p < 1.0:
        refuse("dropout_p", dropout_p, "numbers from 0 up to, not including, 1")


def check_choice(name: str, value: object, choices: tuple) -> None:
    """Raise unless `value` is one of `choices`, which are strings or None."""
    # The type is checked first: `in` raises or compares elementwise for some other types, such as
    # tensors.
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise ValueError(
            f"{name}={short(value)} is unknown; allowed: {', '.join(map(repr, choices))}"
        )


def check_host(mechanism: str, host: Host | None, *dims: str) -> Any:
    """Return the attention layer of a mechanism that has parameters.

    Args:
        mechanism: The name, for errors.
        host: The attention layer; None if the mechanism is used by name.
        *dims: Fields that must be known: "head_dim", "value_dim".

    Raises:
        ValueError: The mechanism is used by name, or a dim is unknown.
    """
    if host is None:
        raise ValueError(
            f"{mechanism} has parameters to learn; allowed: patch_model or convert, not a name"
        )
    for dim in dims:
        if getattr(host, dim) is None:
            raise ValueError(
                f"{mechanism} needs the {dim.replace('_dim', ' dimension')} of {host.name}, and nothing tells it; "
                "allowed: attention layers with projections of queries, keys and values, choose them with layers=..."
            )
    return host


def check_parameter(
    name: str, value: float | Tensor, heads: int, like: Tensor, least: float = SMALLEST
) -> Tensor:
    """Return a number, or one number per query head, as a tensor.

    Args:
        name: Of the argument, for errors.
        value: A number, or a tensor of one number or of H.
        heads: H, the number of query heads.
        like: A tensor on the device of the result.
        least: The smallest allowed number, a key of `ALLOWED`.

    Returns:
        [1] or [H]; float64 for a number, else in the dtype of the tensor.

    Raises:
        ValueError: The value is not allowed.
    """
    if not isinstance(value, Tensor):
        check_number(name, value, least)
        # float64 keeps all digits of a Python number; users cast it to their working dtype.
        return torch.full((1,), float(value), dtype=torch.float64, device=like.device)
    if value.dim() > 1 or (value.numel() != 1 and value.numel() != heads):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; allowed: one value, or one per query head, ({heads},)"
        )
    if value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {value.dtype}; allowed: integers or floating point")
    # Written so that NaN fails: no comparison with it is True.
    if can_read(value):
        if not bool(((value >= least) & (value <= LARGEST)).all()):
            refuse(name, value.tolist(), ALLOWED[least])
    return value.reshape(-1).to(like.device)


def check_number_of_heads(name: str, value: float | Tensor, query: Tensor) -> float | Tensor:
    """Return a number above 0 as it is, or a tensor of such numbers as [1] or [H].

    Args:
        name, value: As in `check_parameter`.
        query: [B, H, N, d].
    """
    parameter = check_parameter(name, value, query.shape[1], query)
    return parameter if isinstance(value, Tensor) else value
