"""Sibling positions: a learned embedding e_B for the child positions of a family, one table per kind of family.

S̄_BC + e_B·e_C takes the place of S̄_BC for siblings B and C (math in docs/hsa.md). This is how sequences of different
kinds and scales, words in a sentence, patches in a row, share one attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .layout import Group, Slots


class SiblingEmbeddings(nn.Module):
    """Tables e, one per kind of family, [positions, heads, width]; zero is the identity.

    Both factors of e_B·e_C are learned, so at exact zeros nothing would ever move: a model that is to learn them
    starts from small random numbers.

    Args:
        positions: for each kind of family, by the name that the hierarchy gives it, the most children it may have.
            Families of no kind have no positions.
        heads: query heads.
        width: of an embedding.
        std: standard deviation of the starting values; 0 for the identity.
    """

    def __init__(self, positions: Mapping[str, int], heads: int, width: int, std: float = 0.02):
        super().__init__()
        self.positions, self.std = dict(positions), std
        self.names = tuple(self.positions)
        self.tables = nn.ParameterList(
            nn.Parameter(torch.empty(count, heads, width)) for count in self.positions.values()
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal numbers of the starting standard deviation."""
        for table in self.tables:
            nn.init.normal_(table, std=self.std) if self.std else nn.init.zeros_(table)

    def forward(self, slots: Slots, dtype: torch.dtype) -> list[Tensor | None]:
        """What `products` returns for these tables."""
        return products(slots, self.names, list(self.tables), dtype)


def products(
    slots: Slots, names: Sequence[str], tables: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor | None]:
    """For every group e_B·e_C, [1, H, F, b, b], 0 for B = C and in families of no kind; None if all are such.

    Args:
        slots: the layout. names: kinds of families. tables: e of each, [positions, H, w].

    Raises:
        ValueError: the hierarchy has a kind without a table, or a family with more children than its table has.
    """
    return [
        _products(group, slots.kind_names, dict(zip(names, tables, strict=True)), dtype)
        for group in slots.groups
    ]


def _products(group: Group, kind_names: Sequence[str], tables: dict[str, Tensor], dtype) -> Tensor | None:
    found = None
    for number in group.kinds_present:
        if number == 0:
            continue
        e = _table(tables, kind_names[number], group.most_children(number)).to(dtype)[: group.width]
        product = torch.einsum("bhw,chw->hbc", e, e)
        product = product - torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
        spare = group.width - len(e)
        product = nn.functional.pad(product, (0, spare, 0, spare)) if spare else product
        mine = (group.kind == number).to(dtype)[None, None, :, None, None]
        found = mine * product[None, :, None] + (0 if found is None else found)
    return found


def _table(tables: dict[str, Tensor], name: str, children: int) -> Tensor:
    if name not in tables:
        raise ValueError(
            f"the hierarchy has families of kind {name!r}, which have no sibling embeddings; allowed: "
            f"{', '.join(map(repr, tables)) or 'none'}"
        )
    if children > len(tables[name]):
        raise ValueError(
            f"a family of kind {name!r} has {children} children; allowed: at most {len(tables[name])}, the positions "
            "of its sibling embeddings"
        )
    return tables[name]
