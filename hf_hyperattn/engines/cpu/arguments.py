"""What the operators take, flat lists of tensors, by name, and as the structures that C++ reads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..options import Options
from ..score import PairScore, Source, parse_spec
from . import calls, library

#: What queries, keys and values may be; all three are the same.
DTYPES = (torch.float32, torch.bfloat16)


def piece_of(reader: str) -> int | None:
    """Which piece a reader, `"index type"`, reads for."""
    return int(reader.split()[0]) if reader else None


def source_of(score: PairScore) -> Source:
    """What the features are made of, or the features as they are."""
    raw = score.raw
    return raw if raw is not None else Source(score.query, score.key, 1.0, (score.query, score.key))


@dataclass
class Arguments:
    """The operator's tensors by their names; `table` is the score's."""

    query: Tensor
    key: Tensor
    value: Tensor
    row: list[Tensor]
    column: list[Tensor]
    head: list[Tensor]
    extras: dict[str, Tensor]
    table: int

    @classmethod
    def parse(
        cls, tensors: Sequence[Tensor], spec: str, extras: str, capped: bool, reader: str = ""
    ) -> Arguments:
        """From an operator's flat list; statistics that `reader` reads are not in it."""
        terms, names, read = parse_spec(spec), extras.split(), piece_of(reader)
        table = library.table(spec, capped, reader)
        if table is None:
            raise RuntimeError(f"hf_hyperattn: the compiled score {spec} is not there; use backend='auto'")
        query, key, value = (rows_of(t) for t in tensors[:3])
        take = iter(tensors[3:])
        given = [t for i, (t, _) in enumerate(terms) if i != read]
        counts = [sum(t.rows for t in given), sum(t.columns for t in given)]
        row, column = ([rows_of(next(take)) for _ in range(n)] for n in counts)
        head = [next(take).contiguous() for _ in range(sum(t.heads + gated for t, gated in terms))]
        return cls(query, key, value, row, column, head, dict(zip(names, take, strict=True)), table)

    def call(self, out: Tensor, lse: Tensor, width: int, scale: float, options: Options):
        """`struct Call`, and what must live as long as it."""
        (batch, heads, n, _), (_, kv_heads, m, _) = self.query.shape, self.key.shape
        take = lambda name: self.extras[name].contiguous() if name in self.extras else None
        factors, sinks = (take("query_factor"), take("key_factor")), take("sinks")
        mask, bias = self.extras.get("mask"), self.extras.get("bias")
        tables = calls.numbers(self.row, heads), calls.numbers(self.column, heads), calls.pointers(self.head)
        shape = batch, heads, n, m
        drop = options.dropout_p
        call = calls.Call(
            self.table, batch, heads, kv_heads, n, m, width, self.value.shape[-1],
            *(calls.matrix(t) for t in (self.query, self.key, self.value)), self.query.dtype == torch.bfloat16,
            *map(calls.address, factors), *map(ctypes.addressof, tables),
            calls.pairs(mask, shape), calls.pairs(bias, shape), mask is not None and mask.dtype == torch.bool,
            options.is_causal, options.window or 0, options.offset, torch.get_num_threads(),
            calls.address(sinks), scale, options.softcap or 0.0,
            min(int(drop * 2**32), 2**32 - 1), int(self.extras["seed"]) if drop else 0, 1 / (1 - drop),
            out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        return call, (factors, sinks, tables)


def rows_of(t: Tensor) -> Tensor:
    """The tensor with consecutive numbers in its last axis."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()
