"""The plain dot product on torch's own kernels (SDPA, FlashAttention), with biases as extra columns of Q and K.

A bias of low rank is a product of a few numbers per query with a few per key, so it can ride in the product that the
kernel computes anyway, and no N x M bias is stored. Half precision would round those numbers to 8 or 11 bits; each is
therefore split into parts that add up to it, and the products of parts that matter get a column each:

    float32, float64   x·y                                                1 column
    float16            x1·y1 + x1·y2 + x2·y1                              3 columns
    bfloat16           x1·y1 + x1·y2 + x2·y1 + x2·y2 + x1·y3 + x3·y1      6 columns

A number that is the same for a whole row is not seen by softmax and left out, unless the bias's parameters are learned:
their gradients need the log-sum-exp of the row in all its digits, and the number keeps that small. It is a product with
1, one more column. V is padded with zeros to the width of Q and K, since kernels are slow, or missing, where the widths
differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from ..readable import is_transformed
from .graph_torch import with_first_derivative_only
from .options import Options, position_mask
from .score import DOT, PairScore, ScoreTerm, repeat_heads

#: Which parts of the two factors meet, by dtype.
MEETINGS = {
    torch.float16: ((0, 0), (0, 1), (1, 0)),
    torch.bfloat16: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
}
#: Up to this many queries the dense bias is no larger than the extra columns of the keys would be.
FEW = 16


def attend(score: PairScore, value: Tensor, options: Options) -> tuple[Tensor, None]:
    """softmax(S)·V of a call that `unsupported_reason` has nothing against; arguments as in `reference.attend`."""
    query, key, scale = vectors(score)
    dtype, width = working(query, key, value), value.shape[-1]
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    extra = score.terms[1:]
    adding = options.bias is not None or (
        bool(extra) and as_mask(query.shape[2], dtype, query.device)
    )
    mask, causal = hiding(score, options, adding)
    if adding:
        mask = dense(extra, mask, options.bias)
    elif extra:
        query, key, value = widened(query, key, value, scale, extra)
    # kernels for CPUs add float32 to half precision, and read any other as if it were theirs
    if (
        mask is not None
        and mask.is_floating_point()
        and (mask.device.type != "cpu" or dtype not in MEETINGS)
    ):
        mask = mask.to(dtype)
    if key.is_cuda and (
        mask is not None or dtype not in MEETINGS
    ):  # only FlashAttention shares keys there
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    if torch.is_grad_enabled() and not (torch.compiler.is_compiling() or is_transformed()):
        query, key, value = with_first_derivative_only("backend='sdpa'", query, key, value)
        mask = None if mask is None else with_first_derivative_only("backend='sdpa'", mask)[0]
    with torch.autocast(query.device.type, enabled=False):  # it would round the columns
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=options.dropout_p,
            is_causal=causal,
            scale=scale,
            enable_gqa=bool(
                query.shape[1] != key.shape[1]
            ),  # shapes are tensors in torch.jit.trace
        )
    return out[..., :width].to(score.dtype), None


def supports(score: PairScore, value: Tensor, options: Options) -> bool:
    """Whether `auto` takes this engine: it can, and with a kernel that stores no N x M matrix."""
    device = value.device.type
    lean = device == "cuda" or (device == "cpu" and not options.dropout_p)
    return lean and unsupported_reason(score, value, options) is None


def unsupported_reason(score: PairScore, value: Tensor, options: Options) -> str | None:
    """Why the call cannot be computed here; None if it can."""
    first, *rest = score.terms
    n, m = score.shape[2:]
    masks = [t for t in (options.mask, options.bias) if t is not None]
    if first.term is not DOT or first.gate is not None:
        return "its score is not the plain dot product"
    if any(t.low_rank_factors is None for t in rest):
        return f"{next(t.term.name for t in rest if t.low_rank_factors is None)} has no exact form as columns here"
    if options.softcap is not None or options.sinks is not None:
        return "softcap and sinks are not available"
    if needs_grad(masks):
        return "masks get no gradient"
    query, key, scale = vectors(score)
    if rest and not abs(scale) > torch.finfo(torch.float32).tiny:
        return "its scale is 0, which columns are divided by"
    dtype = working(query, key, value)
    if options.bias is not None and not as_mask(n, dtype, value.device):
        return "it has a bias"
    if dtype in MEETINGS and value.device.type != "cpu" and rounds(options.mask, dtype):
        return "half precision would round the numbers of its mask"
    if m == 0:
        return "there are no keys"
    if n > FEW and not simply_hidden(options) and not (masks and masks[0].shape[-2:] == (n, m)):
        return "windows, offsets and causality beside a mask of keys need a mask of all pairs"
    if dtype in MEETINGS and needs_grad(numbers_of(rest)):
        return "half precision is too coarse for the gradients of the bias's parameters"
    return None


def rounds(mask: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether an additive mask holds numbers that this dtype does not, as biases of the caller's own."""
    return (
        mask is not None
        and mask.is_floating_point()
        and not torch.equal(mask.to(dtype).to(mask.dtype), mask)
    )


def numbers_of(terms) -> list[Tensor]:
    """Head parameters and gates, through which gradients reach what is learned of these terms."""
    return [t for term in terms for t in (*term.head, term.gate) if t is not None]


def needs_grad(tensors: list[Tensor]) -> bool:
    """Whether a backward pass will ask for the gradient of one of them."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def vectors(score: PairScore) -> tuple[Tensor, Tensor, float]:
    """Query, key and scale in the caller's dtype, where their product is that of the features."""
    if score.is_product:
        return score.raw_query, score.raw_key, score.scale
    return score.query, score.key, 1.0


def working(*tensors: Tensor) -> torch.dtype:
    """The dtype that holds all of them."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def as_mask(queries: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the bias goes in as a mask: few queries, and a kernel that adds the mask in float32."""
    return queries <= FEW and (dtype not in MEETINGS or device.type == "cpu")


def simply_hidden(options: Options) -> bool:
    """Whether position hides nothing, or hides as the kernel's own causal form does."""
    if options.window is not None:
        return False
    return not options.is_causal or (options.mask is None and options.offset == 0)


def hiding(score: PairScore, options: Options, adding: bool) -> tuple[Tensor | None, bool]:
    """The mask for the kernel, bool or additive, and its causal flag, which goes with no mask at all."""
    if simply_hidden(options) and not (adding and options.is_causal):
        return options.mask, options.is_causal
    n, m = score.shape[2:]
    visible = position_mask(options, (0, n), (0, m), score.device)
    assert visible is not None  # position hides something here
    if options.mask is None:
        return visible[None, None], False
    if options.mask.dtype == torch.bool:
        return options.mask & visible, False
    return options.mask.masked_fill(~visible, float("-inf")), False


def dense(extra: tuple[ScoreTerm, ...], mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """One additive mask of everything that is added to few queries' logits."""
    total: Any = 0.0 if bias is None else bias  # a tensor from the first term on
    for term in extra:
        part = term.definition()
        total = total + (part if term.gate is None else term.gate[:, None, None] * part)
    if mask is None:
        return total
    return total + mask if mask.dtype != torch.bool else torch.where(mask, total, float("-inf"))


def widened(query: Tensor, key: Tensor, value: Tensor, scale: float, extra: tuple[ScoreTerm, ...]):
    """Query and key with the columns of the extra terms, the value with zeros, all of one width."""
    learned = needs_grad(numbers_of(extra))
    columns = [columns_of(term, scale, query.dtype, learned) for term in extra]
    left, right = (joined(sides) for sides in zip(*columns, strict=True))
    if right.shape[1] not in (1, key.shape[1]):
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    width = max(query.shape[-1] + left.shape[-1], value.shape[-1])
    width += -width % (
        8 if query.is_cuda or query.dtype in MEETINGS else 2
    )  # what kernels are fast for
    return (
        with_columns(query, left, width),
        with_columns(key, right, width),
        pad(value, (0, width - value.shape[-1])),
    )


def with_columns(x: Tensor, columns: Tensor, width: int) -> Tensor:
    """[B, H, L, width]: x, the columns, zeros."""
    columns = columns.expand(*x.shape[:3], -1)
    zeros = x.new_zeros(()).expand(*x.shape[:3], width - x.shape[-1] - columns.shape[-1])
    return torch.cat([x, columns, zeros], -1)


def joined(sides: tuple[Tensor, ...]) -> Tensor:
    """Columns side by side, [B|1, H|1, L, c]."""
    batch, heads = (max(t.shape[axis] for t in sides) for axis in (0, 1))
    return torch.cat([t.expand(batch, heads, -1, -1) for t in sides], -1)


def columns_of(
    term: ScoreTerm, scale: float, dtype: torch.dtype, with_row: bool
) -> tuple[Tensor, Tensor]:
    """The columns of queries and keys, of `dtype`, whose product times the scale is the term with its gate.

    Args:
        with_row: whether the numbers of the rows are in it.
    """
    assert term.low_rank_factors is not None  # as of every term that gets here
    left, right, row = term.low_rank_factors()
    gate = (1.0 if term.gate is None else term.gate.to(left.dtype)[:, None, None]) / scale
    if with_row:
        left = torch.cat([left, row[..., None]], -1)
        right = torch.cat([right, right.new_ones(*right.shape[:-1], 1)], -1)
    left = left * gate
    if dtype not in MEETINGS:
        return left.to(dtype), right.to(dtype)
    pairs, count = MEETINGS[dtype], 1 + max(i for i, _ in MEETINGS[dtype])
    balance = balance_of(left, right)
    lefts, rights = parts_of(left / balance, dtype, count), parts_of(right * balance, dtype, count)
    return torch.cat([lefts[i] for i, _ in pairs], -1), torch.cat([rights[j] for _, j in pairs], -1)


def balance_of(left: Tensor, right: Tensor) -> Tensor:
    """Powers of 2, one a column, that make the largest factors on both sides alike: float16 then holds them."""
    size_left, size_right = (
        t.abs().amax((0, 1, 2)).clamp_min(1e-30) for t in (left.detach(), right.detach())
    )
    return torch.exp2(torch.round(torch.log2(size_left / size_right) / 2))


def parts_of(x: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Numbers of `dtype` that add up to x, the largest first."""
    parts = []
    for _ in range(count):
        parts.append(x.to(dtype))
        x = x - parts[-1].to(x.dtype)
    return parts
