"""Sibling positions: a learned embedding e_B for the child positions of a family, one table per kind of family.

S̄_BC + e_B·e_C takes the place of S̄_BC for siblings B and C (math in docs/hsa.md). This is how sequences of different
kinds and scales, words in a sentence, patches in a row, share one attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .slots import Slots


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
        """For every group e_B·e_C, [1, H, F, b, b], 0 for B = C and in families of no kind; None if all are such.

        Raises:
            ValueError: the hierarchy has a kind without a table, or a family with more children than its table has.
        """
        return [self._products(group, slots.kind_names, dtype) for group in slots.groups]

    def _products(self, group, kind_names: tuple[str, ...], dtype) -> Tensor | None:
        found = None
        for number in group.kinds_present:
            if number == 0:
                continue
            name = kind_names[number]
            table = self._table(name, group.most_children(number)).to(dtype)
            e = table[: group.width]
            product = torch.einsum("bhw,chw->hbc", e, e)
            spare = group.width - len(e)
            product = nn.functional.pad(product, (0, spare, 0, spare)) if spare else product
            product = product - torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
            mine = (group.kind == number).to(dtype)[None, None, :, None, None]
            found = mine * product[None, :, None] + (0 if found is None else found)
        return found

    def _table(self, name: str, children: int) -> Tensor:
        if name not in self.positions:
            raise ValueError(
                f"the hierarchy has families of kind {name!r}, which have no sibling embeddings; allowed: "
                f"{', '.join(map(repr, self.names)) or 'none'}"
            )
        if children > self.positions[name]:
            raise ValueError(
                f"a family of kind {name!r} has {children} children; allowed: at most {self.positions[name]}, the "
                "positions of its sibling embeddings"
            )
        return self.tables[self.names.index(name)]
