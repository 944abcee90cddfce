"""Checks of arguments that the faces of all mechanisms share. Every message names the argument and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..fields import LARGEST, SMALLEST
from ..readable import can_read

#: What is allowed of a positive parameter.
POSITIVE = f"finite numbers above 0 that float32 holds, from {SMALLEST:g} to {LARGEST:g}"


def check_qkv(query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool) -> None:
    """Ranks, dtypes, batch sizes, heads, widths and lengths of query, key and value."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t is None:
            continue
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
        raise ValueError(f"key has dim {key.shape[-1]}, query has {query.shape[-1]}; they must be equal")
    if query.shape[-1] < 2:
        raise ValueError(f"query has dim {query.shape[-1]}; allowed: at least 2")
    _check_heads(query, key, enable_gqa)
    if value is not None and value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value has heads and length {tuple(value.shape[1:3])}, key has {tuple(key.shape[1:3])}; they "
            "must be equal"
        )


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
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
    """Dropout probabilities are in [0, 1)."""
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(
            f"dropout_p={dropout_p!r} is not allowed; allowed: numbers from 0 up to, not including, 1"
        )


def check_choice(name: str, value: object, choices: tuple) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; allowed: {', '.join(map(repr, choices))}")


def check_positive(name: str, value: float | Tensor, heads: int, like: Tensor) -> Tensor:
    """A positive number, or one per query head, as a tensor [1] or [H] on the device of `like`.

    The values of a tensor are looked at where they can be read.
    """
    if isinstance(value, Tensor):
        if value.dim() > 1 or (value.numel() != 1 and value.numel() != heads):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; allowed: one value, or one per query head, "
                f"({heads},)"
            )
        if value.is_complex() or (
            can_read(value) and not bool(((value >= SMALLEST) & (value <= LARGEST)).all())
        ):
            raise ValueError(f"{name}={value.tolist()} is not allowed; allowed: {POSITIVE}")
        return value.reshape(-1).to(like.device)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not SMALLEST <= value <= LARGEST:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {POSITIVE}")
    return torch.full((1,), float(value), dtype=torch.float64, device=like.device)
