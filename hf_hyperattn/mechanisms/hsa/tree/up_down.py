"""Compute `tying="both"` in one pass up the hierarchy and one down.

Forward and backward passes take O(nodes · branching) time. This module shows the recursion over
families, and its gradient.

For child B of a family, with the means q̄, k̄, v̄ of its members and L_BC = S̄_BC + log|C|, L_BB =
ρ(B):

    log Z_B = logsumexp over C of L_BC,   W_BC = exp(L_BC - log Z_B)     (so W_BB is `inside`, W_BC is |C|·weight)
    m_B     = Σ over C of W_BC v̄_C, the term C = B only where B is a leaf
    ρ(A)    = Σ |B|/|A| log Z_B                                           going up

    a_B = a_A + exp(p_A) · m_B,   p_B = p_A + log W_BB                    going down, a = p = 0 at the root

The output of a leaf is its a. Products of `inside` are kept as their logarithms p, because in deep
trees they underflow. No matrix W is stored: the backward pass forms it again. In it, g_x is the
gradient of x, and for a child B

    t_B = exp(p_A) g_a_B · m_B + g_p_B,   g_a_A = Σ g_a_B,   g_p_A = Σ t_B                          going up
    g_L_BC = W_BC (exp(p_A) g_a_B · v̄_C - t_B + |B|/|A| g_ρ_A)  for the terms of m_B,
    g_L_BB = g_p_B - W_BB (t_B - |B|/|A| g_ρ_A)                 where B is an inner node            going down

Tensors of queries are [R, K, nodes, G, ...] with G query heads to a key head. Tensors of keys are
[R, K, nodes, ...].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layout import Group, Layout

# Numbers of families' matrices that are formed at a time, if families are wide: 16 MiB of float32.
BLOCK_ELEMENTS = 2**22

#: A term of every group's mean logits, broadcastable to [R, K, F, b, G, b], or None.
Terms = Sequence[Tensor | None]


class UpDown:
    """Run one call, and keep the buffers that its backward pass reads again.

    Args:
        layout: Layout of the hierarchy's nodes.
        scale: Factor of the logits.
        keep_diagonal: Whether a token attends to itself.
        query: Leaves [R, K, leaves, G, d].
        key, value: Leaves [R, K, leaves, ...].
        terms: Added to the means of logits.
    """

    def __init__(
        self, layout: Layout, scale: float, keep_diagonal: bool, query, key, value, terms: Terms
    ):
        self.layout = layout
        self.scale = scale
        self.keep_diagonal = keep_diagonal
        self.terms = list(terms)
        # Leaves are their own means. `_pass_up` fills the nodes above.
        self.query, self.key, self.value = (layout.make_buffer(x) for x in (query, key, value))
        self.rho = layout.make_buffer(query.new_zeros(()).expand(query.shape[:4]))
        self.log_z = layout.make_blank(query[..., 0])
        message_shape = (*query.shape[:4], value.shape[-1])
        self.message = layout.make_blank(query.new_empty(()).expand(message_shape))

    def compute_output(self) -> tuple[Tensor, Tensor]:
        """Return the output [R, K, leaves, G, dv] and ρ(root) [batch, K, G]."""
        self._pass_up()
        return self.layout.read_leaves(self._pass_down()), self.layout.read_roots(self.rho)

    def _pass_up(self) -> None:
        """Compute means, ρ, log Z and messages of all nodes."""
        layout = self.layout
        for group, term in zip(layout.groups, self.terms, strict=True):
            means = (self.query, self.key, self.value)
            q, k, v, rho = (layout.read_children(x, group) for x in (*means, self.rho))
            log_z, message = self._attend_family(group, q, k, v, rho, term)
            layout.put_children(self.log_z, group, log_z)
            layout.put_children(self.message, group, message)
            share = group.share.to(q.dtype)
            layout.put_parents(self.rho, group, (share[..., None] * log_z).sum(3))
            # The last group's parents are roots, whose means no step reads.
            if group is not layout.groups[-1]:
                for buffer, x in zip(means, (q, k, v)):
                    layout.put_parents(buffer, group, average_children(group, x))

    def _attend_family(
        self, group: Group, q, k, v, rho, term: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log Z [R, K, F, b, G] and m [R, K, F, b, G, dv] of all children."""
        log_z, message = [], []
        for rows in row_blocks(group, q):
            L = self._family_logits(group, q[:, :, :, rows], k, rho[:, :, :, rows], term, rows)
            top = L.amax(-1, keepdim=True)
            # A single leaf without its diagonal has only logits of -inf, and -inf - (-inf) would be
            # NaN.
            top = top.masked_fill_(top.isneginf(), 0.0)
            e = L.sub_(top).exp_()
            total = e.sum(-1, keepdim=True)
            log_z.append((total.log() + top)[..., 0])
            # The message leaves out the diagonal of inner nodes, which goes down as `inside`.
            m = (zero_fixed(e, group, rows).flatten(3, 4) @ v).unflatten(3, e.shape[3:5])
            # If there is nothing to attend to, the total is 0, and the message must be 0 and not
            # NaN.
            message.append(m.div_(total.clamp_min(torch.finfo(total.dtype).tiny)))
        return _join_rows(log_z), _join_rows(message)

    def _family_logits(
        self, group: Group, query, key, rho, term: Tensor | None, rows: slice
    ) -> Tensor:
        """Return L of some children of all families, [R, K, F, r, G, b].

        Args:
            group: The families.
            query: q̄ of these children, [R, K, F, r, G, d].
            key: k̄ of all children, [R, K, F, b, d].
            rho: ρ of these children, [R, K, F, r, G].
            term: Added to the mean logits, or None.
            rows: The children r among the b children of a family.
        """
        # All G query heads of a key head share one product.
        L = query.flatten(3, 4) @ key.transpose(-1, -2)
        L = L.unflatten(3, query.shape[3:5]).mul_(self.scale)
        if term is not None:
            L += term if term.shape[3] == 1 else term[:, :, :, rows]
        inner = group.fixed is not None or group.all_fixed
        if not inner and self.keep_diagonal:
            return L

        # The diagonal: ρ for inner nodes and filling; for leaves their own logit, or -inf.
        on_diagonal, rho = view_diagonal(L, rows), rho.transpose(-1, -2)
        value = rho
        if not group.all_fixed:
            if self.keep_diagonal:
                value = on_diagonal.clone()
            else:
                value = torch.full_like(on_diagonal, float("-inf"))
            if group.fixed is not None:
                value = torch.where(group.fixed[:, :, :, None, rows], rho, value)
        if inner:
            L += group.log_size.to(L.dtype)[:, :, :, None, None]
        # Written last, because log|B| must not be added to ρ. For leaves log|B| is 0.
        on_diagonal.copy_(value)
        return L

    def _pass_down(self):
        """Return the buffer of a, and keep the buffer of p."""
        layout, message = self.layout, self.layout.read_leaves(self.message)
        a, self.p = layout.make_blank(message), layout.make_blank(message[..., 0])
        for group in reversed(layout.groups):
            above, p = layout.read_parents(a, group), layout.read_parents(self.p, group)
            m = layout.read_children(self.message, group)
            below = torch.addcmul(above[:, :, :, None], p.exp()[:, :, :, None, :, None], m)
            layout.put_children(a, group, below)
            if group.fixed is None:
                # All children are leaves: no node below reads their p.
                continue
            log_z = layout.read_children(self.log_z, group)
            inside = layout.read_children(self.rho, group) - log_z
            inside = inside.masked_fill(log_z.isneginf(), float("-inf"))
            layout.put_children(self.p, group, p[:, :, :, None] + inside)
        return a

    def compute_gradients(
        self, grad_out: Tensor, grad_root: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Terms]:
        """Return the gradients of queries, keys, values and terms.

        Args:
            grad_out, grad_root: Gradients of the results of `compute_output`.
        """
        layout = self.layout
        self._pass_gradients_up(grad_out)
        tables = (self.query, self.key, self.value, self.rho)
        *g_means, g_rho = (layout.make_blank(layout.read_leaves(x)) for x in tables)
        layout.put_roots(g_rho, grad_root.to(grad_out.dtype))
        grad_terms: list[Tensor | None] = []
        for group, term in zip(reversed(layout.groups), reversed(self.terms), strict=True):
            above_rho = layout.read_parents(g_rho, group)
            *grads, below_rho, g_term = self._family_gradients(group, above_rho, term)
            grad_terms.append(g_term)
            share = group.share.to(grad_out.dtype)
            for buffer, x in zip(g_means, grads):
                if group is not layout.groups[-1]:
                    # The parent's mean holds each child with its share.
                    above = layout.read_parents(buffer, group).unsqueeze(3)
                    x = x + share.reshape(*share.shape, *[1] * (x.dim() - 4)) * above
                layout.put_children(buffer, group, x)
            layout.put_children(g_rho, group, below_rho)
        query, key, value = (layout.read_leaves(x) for x in g_means)
        return query, key, value, grad_terms[::-1]

    def _pass_gradients_up(self, grad_out: Tensor) -> None:
        """Compute the buffers of g_a [R, K, nodes, G, dv], t and g_p [R, K, nodes, G]."""
        layout = self.layout
        self.g_a, self.t = layout.make_buffer(grad_out), layout.make_blank(grad_out[..., 0])
        self.g_p = layout.make_buffer(grad_out.new_zeros(()).expand(grad_out.shape[:4]))
        for group in layout.groups:
            g_a = layout.read_children(self.g_a, group)
            share = layout.read_parents(self.p, group).exp()[:, :, :, None]
            t = share * (g_a * layout.read_children(self.message, group)).sum(-1)
            t = t + layout.read_children(self.g_p, group)
            layout.put_children(self.t, group, t)
            layout.put_parents(self.g_a, group, g_a.sum(3))
            layout.put_parents(self.g_p, group, t.sum(3))

    def _family_gradients(self, group: Group, g_rho_above: Tensor, term: Tensor | None):
        """Return gradients of the children's q̄, k̄, v̄, ρ, and of the term.

        Only the share that comes from their own family is computed here.

        Args:
            group: The families.
            g_rho_above: Gradient of the parents' ρ, [R, K, F, G].
            term: Term of the mean logits, or None.
        """

        def children(buffer) -> Tensor:
            return self.layout.read_children(buffer, group)

        tables = (self.query, self.key, self.value, self.rho, self.log_z)
        q, k, v, rho, log_z = map(children, tables)
        log_z = log_z.masked_fill(log_z.isneginf(), 0.0)
        # g_m = exp(p_A) g_a_B, and pull = t_B - |B|/|A| g_ρ_A: see the module docstring.
        share_above = self.layout.read_parents(self.p, group).exp()[:, :, :, None, :, None]
        g_m = children(self.g_a) * share_above
        pull = children(self.t) - group.share.to(q.dtype)[..., None] * g_rho_above[:, :, :, None]
        g_p = children(self.g_p)
        g_q, g_rho = torch.empty_like(q), torch.zeros_like(rho)
        g_k, g_v = torch.zeros_like(k), torch.zeros_like(v)
        g_term = None if term is None else torch.zeros_like(term)
        for rows in row_blocks(group, q):
            L = self._family_logits(group, q[:, :, :, rows], k, rho[:, :, :, rows], term, rows)
            W = L.sub_(log_z[:, :, :, rows][..., None]).exp_()
            g = (g_m[:, :, :, rows].flatten(3, 4) @ v.transpose(-1, -2)).unflatten(3, W.shape[3:5])
            inside = view_diagonal(W, rows).transpose(-1, -2).clone()
            g_L = g.sub_(pull[:, :, :, rows][..., None]).mul_(W)
            if group.fixed is not None or group.all_fixed:
                # The diagonal of inner nodes is ρ, so its gradient goes there and not to q̄ and k̄.
                g_rho[:, :, :, rows] = g_p[:, :, :, rows] - inside * pull[:, :, :, rows]
                g_L, W = zero_fixed(g_L, group, rows), zero_fixed(W, group, rows)
            g_v += W.flatten(3, 4).transpose(-1, -2) @ g_m[:, :, :, rows].flatten(3, 4)
            flat = g_L.flatten(3, 4)
            g_q[:, :, :, rows] = (flat @ k).unflatten(3, g_L.shape[3:5]).mul_(self.scale)
            g_k += (flat.transpose(-1, -2) @ q[:, :, :, rows].flatten(3, 4)).mul_(self.scale)
            if g_term is not None:
                target = g_term if g_term.shape[3] == 1 else g_term[:, :, :, rows]
                target += g_L.sum_to_size(target.shape)
        return g_q, g_k, g_v, g_rho, g_term


def _join_rows(rows: list[Tensor]) -> Tensor:
    """Return the blocks of `row_blocks` as one tensor."""
    return torch.cat(rows, 3) if len(rows) > 1 else rows[0]


def row_blocks(group: Group, query: Tensor) -> Iterator[slice]:
    """Return the rows of the families' matrices that are formed together.

    These are all rows, except in wide families, whose matrices would take too much memory.

    Args:
        group: The families.
        query: q̄ of all children, [R, K, F, b, G, d].
    """
    rows, each = group.width, query.numel() // query.shape[-1]
    fits = each * rows <= BLOCK_ELEMENTS or rows <= 256
    step = rows if fits else max(16, BLOCK_ELEMENTS // each)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def view_diagonal(matrix: Tensor, rows: slice) -> Tensor:
    """Return the entries (B, B) of [R, K, F, r, G, b] as a view [R, K, F, G, r]."""
    return matrix.diagonal(offset=rows.start, dim1=3, dim2=5)


def zero_fixed(matrix: Tensor, group: Group, rows: slice) -> Tensor:
    """Set (B, B) to 0 in place for children whose own logit is ρ.

    Returns the same matrix.
    """
    if group.all_fixed:
        view_diagonal(matrix, rows).zero_()
    elif group.fixed is not None:
        view_diagonal(matrix, rows).masked_fill_(group.fixed[:, :, :, None, rows], 0.0)
    return matrix


def average_children(group: Group, children: Tensor) -> Tensor:
    """Return the means of parents, [R, K, F, ...].

    They are computed from the means of their children, [R, K, F, b, ...].
    """
    share = group.share.to(children.dtype)
    x = children.flatten(4) if children.dim() > 5 else children
    means = (share.expand(*x.shape[:3], -1)[..., None, :] @ x)[..., 0, :]
    return means.unflatten(-1, children.shape[4:]) if children.dim() > 5 else means
