"""Compute terms that are added to the mean logits of sibling blocks.

They are means of a position bias, and learned positions of siblings. This module shows how S̄_BC
becomes S̄_BC + e_B·e_C for siblings B and C (math in docs/hsa.md). e_B is a learned embedding of a
child's position in its family, with one table per kind of family. Sequences of different kinds and
scales, such as words in a sentence and patches in a row, can so share one attention.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .layout import Group, Layout
from .up_down import Terms, average_children


class SiblingEmbeddings(nn.Module):
    """Hold the tables e, one per kind of family, [positions, heads, width].

    Tables of zeros change nothing. Both factors of e_B·e_C are learned, so at exact zeros no
    gradient moves them. A model that learns them starts from small random numbers.

    Args:
        positions: Largest number of children for each kind of family, by the kind's name in the
            hierarchy. Families without a kind have no positions.
        heads: Number of query heads.
        width: Width of an embedding.
        std: Standard deviation of the starting values; 0 for the identity.
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
        """Draw normal starting values."""
        for table in self.tables:
            nn.init.normal_(table, std=self.std) if self.std else nn.init.zeros_(table)

    def by_kind(self) -> dict[str, Tensor]:
        """Return the table of every kind of family."""
        return dict(zip(self.names, self.tables, strict=True))


def pair_terms(
    layout: Layout,
    kv_heads: int,
    position_bias: Tensor | None,
    tables: Mapping[str, Tensor] | None,
    dtype,
) -> Terms:
    """Return for every group the term of its mean logits, or None.

    Args:
        layout: Layout of the hierarchy's nodes.
        kv_heads: Number of key heads K.
        position_bias: [1 or B, 1 or H, 1 or N, N] or None.
        tables: Sibling embeddings by kind of family. None ignores the kinds of families; an empty
            mapping raises if the hierarchy has a kind.
        dtype: Of the terms.

    Returns:
        Tensors that broadcast to [R, K, F, b, G, b].

    Raises:
        ValueError: The hierarchy has a kind without a table, or a family with more children than
            its table has.
    """
    terms: list[Tensor | None] = [None] * len(layout.groups)
    if position_bias is not None:
        terms = list(pair_means(layout, position_bias.to(dtype)))
    if tables is not None:
        for index, group in enumerate(layout.groups):
            product = sibling_products(group, layout.kind_names, tables, dtype)
            if product is not None:
                term = terms[index]
                terms[index] = product if term is None else term + product
    return [t if t is None else _by_key_head(t, kv_heads) for t in terms]


def _by_key_head(term: Tensor, kv_heads: int) -> Tensor:
    """Return [R, 1 or K, F, b, 1 or G, b] from [R, 1 or H, F, b, b]."""
    if term.shape[1] == 1:
        return term.unsqueeze(4)
    # H = K · G: the G query heads of a key head are neighbours.
    return term.unflatten(1, (kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)


def pair_means(layout: Layout, pairs: Tensor) -> list[Tensor]:
    """Return for every group the means over i in B, j in C of siblings B and C.

    Args:
        layout: Layout of the hierarchy's nodes.
        pairs: [1 or batch, 1 or H, 1 or N, N]; numbers at padding are ignored.

    Returns:
        For each group [R or 1, 1 or H, F, b, b].
    """
    rows, length = layout.apart, pairs.shape[-1]
    pairs = pairs.expand(-1, -1, length, -1)
    ones = pairs.new_ones(rows, 1, length, 1)
    real = layout.from_leaves(layout.to_leaves(ones))[:, :, None, :, 0] > 0
    # Padding may hold -inf, and -inf · 0 would be NaN in the product below.
    pairs = pairs.masked_fill(~real, 0.0)
    pairs = pairs if rows == 1 else pairs.expand(rows, -1, -1, -1)
    # Means over rows i come from the tree. Means over columns j are products with the share of each
    # token in a node.
    members = torch.eye(length, dtype=pairs.dtype, device=pairs.device).expand(rows, 1, -1, -1)
    over_rows, of_tokens = (_pool_buffer(layout, layout.to_leaves(x)) for x in (pairs, members))
    return [
        layout.read_children(over_rows, group)
        @ layout.read_children(of_tokens, group).transpose(-1, -2)
        for group in layout.groups
    ]


def _pool_buffer(layout: Layout, leaves: Tensor):
    """Return a buffer with the means of all nodes.

    They are computed from numbers of the leaves, [R, H, leaves, w].
    """
    buffer = layout.make_buffer(leaves)
    for group in layout.groups:
        means = average_children(group, layout.read_children(buffer, group))
        layout.put_parents(buffer, group, means)
    return buffer


def sibling_products(
    group: Group, kind_names, tables: Mapping[str, Tensor], dtype
) -> Tensor | None:
    """Return e_B·e_C of a group, [1, H, F, b, b].

    It is 0 for B = C, and in families without a kind.

    Args:
        group: The group.
        kind_names: Names of kinds by number.
        tables: Sibling embeddings by kind.
        dtype: Of the result.

    Returns:
        The products, or None if no family has a kind.
    """
    total = None
    for number in group.kinds_present:
        # Kind 0 is no kind.
        if number == 0:
            continue
        table = _select_table(tables, kind_names[number], group.most_children(number))
        e = table.to(dtype)[: group.width]
        product = torch.einsum("bhw,chw->hbc", e, e)
        # A node has no position relative to itself.
        product = product - torch.diag_embed(product.diagonal(dim1=-2, dim2=-1))
        # The widest family of the group may be of another kind.
        spare = group.width - len(e)
        product = nn.functional.pad(product, (0, spare, 0, spare)) if spare else product
        of_kind = (group.kind == number).to(dtype)[None, None, :, None, None]
        product = of_kind * product[None, :, None]
        total = product if total is None else product + total
    return total


def _select_table(tables: Mapping[str, Tensor], name: str, children: int) -> Tensor:
    """Return the table of a kind.

    Args:
        tables: Sibling embeddings by kind.
        name: Name of the kind.
        children: Children of its largest family.

    Raises:
        ValueError: There is no such table, or it has too few positions.
    """
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
