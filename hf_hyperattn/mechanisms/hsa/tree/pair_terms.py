"""Terms of the mean logits of sibling blocks: means of a position bias, and learned positions of siblings.

With sibling positions, S̄_BC + e_B·e_C takes the place of S̄_BC for siblings B and C, where e_B is a learned embedding
for the child positions of a family, one table per kind of family (math in docs/hsa.md). This is how sequences of
different kinds and scales, words in a sentence, patches in a row, share one attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .layout import Group, Layout
from .up_down import Terms, average_children


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

    def by_kind(self) -> dict[str, Tensor]:
        """The table of every kind of family."""
        return dict(zip(self.names, self.tables, strict=True))


def pair_terms(
    layout: Layout,
    kv_heads: int,
    position_bias: Tensor | None,
    tables: Mapping[str, Tensor] | None,
    dtype,
) -> Terms:
    """For every group None, or what is added to its mean logits, broadcastable to [R, K, F, b, G, b].

    Args:
        position_bias: [1 or B, 1 or H, 1 or N, N] or None.
        tables: sibling embeddings by kind of family; None if there are none, which is another thing than no tables:
            kinds of families are then not looked at.

    Raises:
        ValueError: the hierarchy has a kind without a table, or a family with more children than its table has.
    """
    terms: list[Tensor | None] = [None] * len(layout.groups)
    if position_bias is not None:
        terms = list(pair_means(layout, position_bias.to(dtype)))
    for index, group in enumerate(layout.groups):
        product = (
            None if tables is None else sibling_products(group, layout.kind_names, tables, dtype)
        )
        if product is not None:
            term = terms[index]
            terms[index] = product if term is None else term + product
    return [t if t is None else _by_key_head(t, kv_heads) for t in terms]


def _by_key_head(term: Tensor, kv_heads: int) -> Tensor:
    """[R, 1 or H, F, b, b] as [R, 1 or K, F, b, 1 or G, b]."""
    if term.shape[1] == 1:
        return term.unsqueeze(4)
    return term.unflatten(1, (kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)


def pair_means(layout: Layout, pairs: Tensor) -> list[Tensor]:
    """For every group the means over i in B, j in C of siblings B and C; of leaves the entries themselves.

    Args:
        pairs: [1 or batch, 1 or H, 1 or N, N]; what it holds at padding is not looked at.

    Returns:
        For each group [R or 1, 1 or H, F, b, b].
    """
    rows, length = layout.apart, pairs.shape[-1]
    pairs = pairs.expand(-1, -1, length, -1)
    real = (
        layout.from_leaves(layout.to_leaves(pairs.new_ones(rows, 1, length, 1)))[:, :, None, :, 0]
        > 0
    )
    pairs = pairs.masked_fill(~real, 0.0)
    pairs = pairs if rows == 1 else pairs.expand(rows, -1, -1, -1)
    members = torch.eye(length, dtype=pairs.dtype, device=pairs.device).expand(rows, 1, -1, -1)
    over_rows, of_tokens = (_pool_buffer(layout, layout.to_leaves(x)) for x in (pairs, members))
    return [
        layout.read_children(over_rows, group)
        @ layout.read_children(of_tokens, group).transpose(-1, -2)
        for group in layout.groups
    ]


def _pool_buffer(layout: Layout, leaves: Tensor):
    """A buffer of the means of these numbers of the leaves, [R, H, leaves, w]."""
    buffer = layout.make_buffer(leaves)
    for group in layout.groups:
        layout.put_parents(
            buffer, group, average_children(group, layout.read_children(buffer, group))
        )
    return buffer


def sibling_products(
    group: Group, kind_names, tables: Mapping[str, Tensor], dtype
) -> Tensor | None:
    """e_B·e_C of a group, [1, H, F, b, b], 0 for B = C and in families of no kind; None if all are such."""
    total = None
    for number in group.kinds_present:
        if number == 0:
            continue
        e = _select_table(tables, kind_names[number], group.most_children(number)).to(dtype)[
            : group.width
        ]
        product = torch.einsum("bhw,chw->hbc", e, e)
        product = product - torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
        spare = group.width - len(e)
        product = nn.functional.pad(product, (0, spare, 0, spare)) if spare else product
        of_kind = (group.kind == number).to(dtype)[None, None, :, None, None]
        total = of_kind * product[None, :, None] + (0 if total is None else total)
    return total


def _select_table(tables: Mapping[str, Tensor], name: str, children: int) -> Tensor:
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
