"""The passes of `tying="both"` over a hierarchy: forward and backward, O(nodes · branching), one step a group.

For child B of a family, with the means q̄, k̄, v̄ of its members and L_BC = S̄_BC + log|C|, L_BB = ρ(B):

    log Z_B = logsumexp over C of L_BC,   W_BC = exp(L_BC - log Z_B)     (so W_BB is `inside`, W_BC is |C|·weight)
    m_B     = Σ over C of W_BC v̄_C, the term C = B only where B is a leaf
    ρ(A)    = Σ |B|/|A| log Z_B                                           going up

    a_B = a_A + exp(p_A) · m_B,   p_B = p_A + log W_BB                    going down, a = p = 0 at the root

The output of a leaf is its a. Products of `inside` are kept as the logarithms p. No matrix W is stored: the backward
pass forms it again. In it, g_x is the gradient of x, and for a child B

    t_B = exp(p_A) g_a_B · m_B + g_p_B,   g_a_A = Σ g_a_B,   g_p_A = Σ t_B                          going up
    g_L_BC = W_BC (exp(p_A) g_a_B · v̄_C - t_B + |B|/|A| g_ρ_A)  for the terms of m_B,
    g_L_BB = g_p_B - W_BB (t_B - |B|/|A| g_ρ_A)                 where B is an inner node            going down

Tensors of queries are [R, K, nodes, G, ...] with G query heads to a key head, those of keys [R, K, nodes, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import Group, Slots

#: Numbers of a family's matrix that are formed at a time, where a family is wide.
BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True, eq=False)
class Setting:
    """What a call asks for besides its tensors."""

    slots: Slots
    scale: float
    keep_diagonal: bool


@dataclass(eq=False)
class Means:
    """Stores of the means of queries, keys and values; `log_z` and `message` are what the way up found."""

    query: object
    key: object
    value: object
    rho: object = None
    log_z: object = None
    message: object = None


def row_blocks(group: Group, query: Tensor) -> Iterator[slice]:
    """Rows of the families' matrices to be formed together: all of them but in wide families."""
    rows, each = group.width, query.numel() // query.shape[-1]
    step = rows if each * rows <= BLOCK_ELEMENTS or rows <= 256 else max(16, BLOCK_ELEMENTS // each)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def logits(
    group: Group, query: Tensor, key: Tensor, rho: Tensor, extra: Tensor | None, setting: Setting, rows: slice
) -> Tensor:
    """L of some rows: [R, K, F, r, G, b].

    Args:
        query: q̄ of those rows, [R, K, F, r, G, d]; key: k̄ of all, [R, K, F, b, d].
        rho: ρ of those rows, [R, K, F, r, G].
        extra: added to S̄, broadcastable to [R, K, F, b, G, b].
    """
    L = (query.flatten(3, 4) @ key.transpose(-1, -2)).unflatten(3, query.shape[3:5])
    L = L.mul_(setting.scale)
    if extra is not None:
        L += extra if extra.shape[3] == 1 else extra[:, :, :, rows]
    own = diagonal(L, rows)
    if group.all_fixed:
        value = rho.transpose(-1, -2)
    else:
        value = own.clone() if setting.keep_diagonal else torch.full_like(own, float("-inf"))
        if group.fixed is not None:
            value = torch.where(group.fixed[:, :, :, None, rows], rho.transpose(-1, -2), value)
    if group.fixed is not None or group.all_fixed:
        L += group.log_size.to(L.dtype)[:, :, :, None, None]
    if group.all_fixed or group.fixed is not None or not setting.keep_diagonal:
        own.copy_(value)
    return L


def diagonal(matrix: Tensor, rows: slice) -> Tensor:
    """The entries (B, B) of [R, K, F, r, G, b] as a view [R, K, F, G, r]."""
    return matrix.diagonal(offset=rows.start, dim1=3, dim2=5)


def zero_fixed(matrix: Tensor, group: Group, rows: slice, value: Tensor | float = 0.0) -> Tensor:
    """The same tensor with `value` (r by G) at (B, B) for the children whose own logit is ρ."""
    own = diagonal(matrix, rows)
    value = (
        value.transpose(-1, -2)
        if isinstance(value, Tensor)
        else torch.zeros((), dtype=own.dtype, device=own.device)
    )
    if group.all_fixed:
        own.copy_(value.expand_as(own))
    elif group.fixed is not None:
        own.copy_(torch.where(group.fixed[:, :, :, None, rows], value, own))
    return matrix


def mean(group: Group, children: Tensor) -> Tensor:
    """Means of parents from those of their children, [R, K, F, b, ...] to [R, K, F, ...]."""
    share = group.share.to(children.dtype)
    x = children.flatten(4) if children.dim() > 5 else children
    found = (share.expand(*x.shape[:3], -1)[..., None, :] @ x)[..., 0, :]
    return found.unflatten(-1, children.shape[4:]) if children.dim() > 5 else found


def go_up(means: Means, setting: Setting, extras: list[Tensor | None]) -> None:
    """Means, ρ, log Z and messages of all nodes, written into `means`."""
    slots = setting.slots
    query, width = slots.leaves(means.query), slots.leaves(means.value).shape[-1]
    means.rho = slots.store(query.new_zeros(()).expand(query.shape[:4]))
    means.log_z = slots.blank(query[..., 0])
    means.message = slots.blank(query.new_empty(()).expand(*query.shape[:4], width))
    for group, extra in zip(slots.groups, extras, strict=True):
        q, k, v, rho = (slots.children(s, group) for s in (means.query, means.key, means.value, means.rho))
        log_z, message = _family(group, q, k, v, rho, extra, setting)
        slots.put_children(means.log_z, group, log_z)
        slots.put_children(means.message, group, message)
        share = group.share.to(q.dtype)
        slots.put_parents(means.rho, group, (share[..., None] * log_z).sum(3))
        if group is not slots.groups[-1]:
            for store, x in ((means.query, q), (means.key, k), (means.value, v)):
                slots.put_parents(store, group, mean(group, x))


def _family(group: Group, q, k, v, rho, extra, setting: Setting) -> tuple[Tensor, Tensor]:
    """log Z [R, K, F, b, G] and m [R, K, F, b, G, dv] of all children."""
    log_z, message = [], []
    for rows in row_blocks(group, q):
        L = logits(group, q[:, :, :, rows], k, rho[:, :, :, rows], extra, setting, rows)
        top = L.amax(-1, keepdim=True)
        top = top.masked_fill_(top.isneginf(), 0.0)  # a leaf alone, without its diagonal
        e = L.sub_(top).exp_()
        total = e.sum(-1, keepdim=True)
        log_z.append((total.log() + top)[..., 0])
        e = zero_fixed(e, group, rows)
        m = (e.flatten(3, 4) @ v).unflatten(3, e.shape[3:5])
        message.append(m.div_(total.clamp_min(torch.finfo(total.dtype).tiny)))
    return torch.cat(log_z, 3) if len(log_z) > 1 else log_z[0], torch.cat(message, 3) if len(
        message
    ) > 1 else message[0]


def go_down(means: Means, setting: Setting):
    """Stores of a, [R, K, nodes, G, dv], and of p, [R, K, nodes, G]."""
    slots = setting.slots
    message = slots.leaves(means.message)
    a, p = slots.blank(message), slots.blank(message[..., 0])
    for group in reversed(slots.groups):
        above, share = slots.parents(a, group), slots.parents(p, group).exp()
        m = slots.children(means.message, group)
        slots.put_children(a, group, torch.addcmul(above[:, :, :, None], share[:, :, :, None, :, None], m))
        if group.fixed is None:
            continue
        log_z = slots.children(means.log_z, group)
        inside = slots.children(means.rho, group) - log_z
        inside = inside.masked_fill(log_z.isneginf(), float("-inf"))
        slots.put_children(p, group, slots.parents(p, group)[:, :, :, None] + inside)
    return a, p


@dataclass(eq=False)
class Gradients:
    """What the backward pass returns: gradients of the leaves' features and of the extras."""

    query: Tensor
    key: Tensor
    value: Tensor
    extras: list[Tensor | None]


def go_back(
    means: Means, p, grad_out: Tensor, grad_root: Tensor, setting: Setting, extras: list[Tensor | None]
) -> Gradients:
    """Gradients of a call, from those of the output [R, K, leaves, G, dv] and of ρ(root) [batch, K, G]."""
    slots = setting.slots
    a, t = _deltas(means, p, grad_out, setting)
    stores = [slots.blank(slots.leaves(s)) for s in (means.query, means.key, means.value, means.rho)]
    slots.put_roots(stores[3], grad_root.to(grad_out.dtype))
    found: list[Tensor | None] = []
    for group, extra in zip(reversed(slots.groups), reversed(extras), strict=True):
        children, grad_extra = _family_back(group, means, p, a, t, stores[3], extra, setting)
        found.append(grad_extra)
        share = group.share.to(grad_out.dtype)
        for store, x in zip(stores, children, strict=True):
            if store is not stores[3] and group is not slots.groups[-1]:
                above = slots.parents(store, group).unsqueeze(3)
                x = x + share.reshape(*share.shape, *[1] * (x.dim() - 4)) * above
            slots.put_children(store, group, x)
    return Gradients(*(slots.leaves(s) for s in stores[:3]), found[::-1])


def _deltas(means: Means, p, grad_out: Tensor, setting: Setting):
    """The way up of the backward pass: stores of g_a [R, K, nodes, G, dv] and of t [R, K, nodes, G]."""
    slots = setting.slots
    a = slots.store(grad_out)
    g_p, t = slots.store(grad_out.new_zeros(()).expand(grad_out.shape[:4])), slots.blank(grad_out[..., 0])
    for group in slots.groups:
        g_a = slots.children(a, group)
        share = slots.parents(p, group).exp()[:, :, :, None]
        mine = share * (g_a * slots.children(means.message, group)).sum(-1) + slots.children(g_p, group)
        slots.put_children(t, group, mine)
        slots.put_parents(a, group, g_a.sum(3))
        slots.put_parents(g_p, group, mine.sum(3))
    return a, (t, g_p)


def _family_back(group: Group, means: Means, p, a, t, g_rho, extra, setting: Setting):
    """Gradients of the children's q̄, k̄, v̄, ρ from their own family, and of its extra."""
    slots = setting.slots
    q, k, v, rho, log_z = (
        slots.children(s, group) for s in (means.query, means.key, means.value, means.rho, means.log_z)
    )
    log_z = log_z.masked_fill(log_z.isneginf(), 0.0)
    g_m = slots.children(a, group) * slots.parents(p, group).exp()[:, :, :, None, :, None]
    share = group.share.to(q.dtype)[..., None]
    g_p = slots.children(t[1], group)
    pull = slots.children(t[0], group) - share * slots.parents(g_rho, group)[:, :, :, None]
    g_q, g_own = torch.empty_like(q), torch.zeros_like(rho)
    g_k, g_v = torch.zeros_like(k), torch.zeros_like(v)
    g_extra = None if extra is None else torch.zeros_like(extra)
    for rows in row_blocks(group, q):
        pick = lambda x, rows=rows: x[:, :, :, rows]
        W = logits(group, pick(q), k, pick(rho), extra, setting, rows)
        W = W.sub_(pick(log_z)[..., None]).exp_()
        g = (pick(g_m).flatten(3, 4) @ v.transpose(-1, -2)).unflatten(3, W.shape[3:5])
        own = diagonal(W, rows).transpose(-1, -2).clone()
        D = g.sub_(pick(pull)[..., None]).mul_(W)
        if group.fixed is not None or group.all_fixed:
            g_own[:, :, :, rows] = pick(g_p) - own * pick(pull)
            D, W = zero_fixed(D, group, rows), zero_fixed(W, group, rows)
        g_v += W.flatten(3, 4).transpose(-1, -2) @ pick(g_m).flatten(3, 4)
        flat = D.flatten(3, 4)
        g_q[:, :, :, rows] = (flat @ k).unflatten(3, D.shape[3:5]).mul_(setting.scale)
        g_k += (flat.transpose(-1, -2) @ pick(q).flatten(3, 4)).mul_(setting.scale)
        if g_extra is not None:
            target = g_extra if g_extra.shape[3] == 1 else g_extra[:, :, :, rows]
            target += D.sum_to_size(target.shape)
    return (g_q, g_k, g_v, g_own), g_extra
