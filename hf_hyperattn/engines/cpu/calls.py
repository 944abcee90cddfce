"""The structures of call.h, filled from tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

POINTER, LONG, FLOAT, WORD = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_uint32


class Matrix(ctypes.Structure):
    """A tensor [B, H, L, d] whose rows are consecutive numbers."""

    _fields_ = [("at", POINTER), *((name, LONG) for name in ("batch", "head", "row"))]


class Pairs(ctypes.Structure):
    """A tensor that is broadcast to [B, H, N, M]."""

    _fields_ = [("at", POINTER), *((name, LONG) for name in ("batch", "head", "row", "column"))]


class Numbers(ctypes.Structure):
    """A statistic [B, H or Hkv, L]; `group` query heads share a head of it."""

    _fields_ = [("at", POINTER), *((name, LONG) for name in ("batch", "head", "group"))]


class Call(ctypes.Structure):
    """`struct Call` of call.h."""

    _fields_ = [
        ("score", POINTER),
        *((name, LONG) for name in ("batch", "heads", "kv_heads", "queries", "keys", "dim", "value_dim")),
        *((name, Matrix) for name in ("query", "key", "value")),
        ("half", LONG),
        *((name, POINTER) for name in ("query_factor", "key_factor", "row", "column", "head")),
        *((name, Pairs) for name in ("mask", "bias")),
        *((name, LONG) for name in ("mask_is_bool", "is_causal", "window", "offset", "threads")),
        ("sinks", POINTER),
        *((name, FLOAT) for name in ("scale", "softcap")),
        *((name, WORD) for name in ("drop_below", "seed")),
        ("drop_factor", FLOAT),
        *((name, POINTER) for name in ("out", "lse")),
    ]


def address(t: Tensor | None) -> int | None:
    """Where a tensor's numbers begin."""
    return None if t is None else t.data_ptr()


def matrix(t: Tensor) -> Matrix:
    """A tensor whose last axis is consecutive, as a Matrix."""
    return Matrix(t.data_ptr(), *t.stride()[:3])


def pairs(t: Tensor | None, shape: Sequence[int]) -> Pairs:
    """A mask or bias; where it is broadcast its step is 0."""
    return Pairs() if t is None else Pairs(t.data_ptr(), *t.expand(shape).stride())


def numbers(tensors: Sequence[Tensor], heads: int):
    """Statistics, each with consecutive numbers in its last axis."""
    found = (Numbers * len(tensors))()
    for n, t in zip(found, tensors, strict=True):
        n.at, n.group = t.data_ptr(), heads // t.shape[1]
        n.batch, n.head = t.stride()[:2]
    return found


def pointers(tensors: Sequence[Tensor]):
    """An array of their addresses."""
    return (POINTER * len(tensors))(*(t.data_ptr() for t in tensors))


class Slots(ctypes.Structure):
    """`struct Slots` of backward.h."""

    _fields_ = [
        *((name, POINTER) for name in ("grad", "delta")),
        ("chunks", LONG),
        *((name, POINTER) for name in ("query_sums", "row", "column", "column_heads", "head")),
        *((name, POINTER) for name in ("query", "key", "value")),
        ("width", LONG),
        *((name, POINTER) for name in ("query_factor", "key_factor")),
    ]


class Parameter(ctypes.Structure):
    """`struct Parameter` of decode.h."""

    _fields_ = [("at", POINTER), ("step", LONG)]


class Decode(ctypes.Structure):
    """`struct Decode` of decode.h."""

    _fields_ = [
        ("head", POINTER),
        *((name, LONG) for name in ("heads", "needs_dot")),
        *((name, POINTER) for name in ("row", "column")),
    ]


def at(t: Tensor) -> ctypes.c_void_p:
    """A tensor's address as an argument."""
    return ctypes.c_void_p(t.data_ptr())
