"""The compiled kernel of key-tied attention (key.cpp): float32 on the CPU, forward only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...engines import native

#: The kernel's vectors are this wide; head dimensions are filled up to a multiple.
LANES = 16


class Call(ctypes.Structure):
    """`struct Call` of key.cpp."""

    _fields_ = [
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_steps", ctypes.c_int64 * 3),
        ("levels", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_steps", ctypes.c_void_p),
        ("value_steps", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "queries", "dim", "value_dim")),
        *((name, ctypes.c_void_p) for name in ("near", "sinks", "top_k", "block_bias", "sink_logit")),
        *((name, ctypes.c_void_p) for name in ("starts", "stops")),
        ("is_causal", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is no compiler or it is turned off."""
    here = Path(__file__).parent
    headers = (here / f"key_{part}.h" for part in ("tile", "choice", "vectors"))
    return native.load("hsa_key", here / "key.cpp", *headers)


def serves(t: Tensor) -> bool:
    """Whether the kernel can compute a call with this query."""
    return t.dtype == torch.float32 and t.device.type == "cpu" and native.enabled() and library() is not None


def longs(values: Sequence[int]):
    """An array of int64."""
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def pointers(tensors: Sequence[Tensor]):
    """An array of their addresses."""
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))


def steps(tensors: Sequence[Tensor]):
    """Strides of batch, head and row of each."""
    return longs([s for t in tensors for s in t.stride()[:3]])


def ready(t: Tensor) -> Tensor:
    """The tensor with rows that are whole vectors and contiguous; itself where they are."""
    spare = -t.shape[-1] % LANES
    t = torch.nn.functional.pad(t, (0, spare)) if spare else t
    return t if t.stride(-1) == 1 else t.contiguous()


def forward(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], block_bias: Tensor | None,
    sink_logit: Tensor | None, spans: tuple[list[int], list[int]], sizes: Sequence[int], near: list[int],
    sinks: list[int], top_k: list[int], is_causal: bool, offset: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, N, dv] and log-sum-exp [B, H, N] of a call, as `key.attend` takes it apart."""
    width = values[0].shape[-1]
    query, keys, values = ready(query), [ready(t) for t in keys], [ready(t) for t in values]
    extras = [None if t is None else t.contiguous() for t in (block_bias, sink_logit)]
    out = query.new_empty(*query.shape[:3], values[0].shape[-1])
    lse = query.new_empty(query.shape[:3])
    arrays = [longs(v) for v in ([1, *sizes], near, sinks, top_k, *spans)]
    tables = [pointers(keys), pointers(values), steps(keys), steps(values)]
    address = ctypes.addressof
    call = Call(
        out.data_ptr(), lse.data_ptr(), query.data_ptr(), tuple(query.stride()[:3]), len(sizes),
        *map(address, tables), address(arrays[0]), query.shape[0], query.shape[1], keys[0].shape[1],
        query.shape[2], query.shape[3], values[0].shape[3], *map(address, arrays[1:4]),
        *(None if t is None else t.data_ptr() for t in extras), *map(address, arrays[4:]), is_causal, offset, scale,
    )  # fmt: skip
    library().hsa_key_forward(ctypes.byref(call))
    return out if width == out.shape[-1] else out[..., :width].contiguous(), lse


def pool(t: Tensor, sizes: Sequence[int], starts: list[int], stops: list[int]) -> list[Tensor]:
    """Means of [B, H, M, e] over windows of every size, [B, H, ceil(M / w), e] each."""
    t = t if t.stride(-1) == 1 else t.contiguous()
    counts = [t.shape[2], *(-(-t.shape[2] // size) for size in sizes)]
    tables = [t, *(t.new_empty(*t.shape[:2], n, t.shape[3]) for n in counts[1:])]
    library().hsa_pool(
        ctypes.c_void_p(t.data_ptr()), steps([t]), *(ctypes.c_int64(n) for n in (*t.shape[:2], t.shape[3])),
        longs(starts), longs(stops), ctypes.c_int64(len(sizes)), longs([1, *sizes]), pointers(tables), longs(counts),
    )  # fmt: skip
    return tables[1:]
