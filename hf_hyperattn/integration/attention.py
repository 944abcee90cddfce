"""From the call that Transformers makes of an attention function to the engine, step by step.

1. `attention_function`: finds the layers that act on the attention layer that calls, by a patch or by a mechanism's
   name.
2. `read_call`: turns the arguments into a `HostCall`.
3. `Layers.forward`: every layer changes the plan of the call, and an engine computes the plan.
4. `stock_forward`: where no layer changes anything, the attention layer's own function runs.

The call contract:

- Keys and values come unrepeated.
- The `is_causal` keyword wins over the module's attribute.
- A mask, if there is one, says everything about visibility. Without one, a causal call of more than one query is
  top-left causal.
- What cannot be honoured raises a ValueError that names it.

Few modules have most of the attributes that are asked for here, so that a cheap lookup comes before a function call. In
a compiled graph lookups save nothing: there the functions are called always.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils import output_capturing

from ..attached import attach
from ..engines import Options, PairScore, ScoreTerm, attention, repeat_heads
from ..engines.score import DOT, dot_logits
from ..mechanisms.base import HostCall, Plan
from ..mechanisms.selection.places import (
    START,
    FirstKey,
    KnownOfMask,
    apply_indices,
    read_unindexed,
)
from ..readable import can_read
from ..registry import get_mechanism
from .cache_of_call import CACHE, cache_of_call
from .call import (
    BACKEND,
    MASK_SAYS_ALL,
    UNHONOURED,
    UNROUTED,
    check_onnx,
    chunk_size_of,
    exporting_to_onnx,
    first_key,
    refuse_keywords,
    scaling_already_applied,
    update_paged,
)
from .first_call import WATCHED, note_reached
from .forgotten import ForgottenTokens, open_forgotten
from .hidden import HIDDEN, hidden_states_of_call
from .hierarchy_context import CONTEXT, hierarchy_of_call
from .stock import HYPER_DOT, STOCK, eager_function, function_beneath, stock_name
from .tensor_parallel import PARTITIONED, heads_of_rank, on_rank, refuse_partitioned

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'

#: Classes of families that always return their attention weights.
RETURNING_WEIGHTS = ("BridgeTower", "Mgpstr")

#: The order of further arguments in Transformers' own attention functions, by which wrappers of others pass them.
POSITIONAL = ("dropout", "scaling", "is_causal")


def attention_function(named: Any = None) -> Callable:
    """The function that a name stands for.

    Args:
        named: has `of(module)`, the `Layers` that a mechanism's name means for a module, and `layers`, the same for all
            modules that say nothing of it, where they are known; None: what the module was patched with.
    """

    def forward(module, query, key, value, attention_mask, *positional, **keywords):
        if positional:
            keywords |= name_positional(positional)
        compiling = torch.compiler.is_compiling()
        if not compiling and WATCHED in module.__dict__:
            note_reached(module)
        if keywords.get("cache") is not None:
            key, value = update_paged(module, key, value, attention_mask, keywords)
        weights = wants_weights(module, keywords)
        layers = module._modules.get("hyper") if named is None else find_named_layers(module, named)
        if layers is None:
            return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
        if not compiling and ForgottenTokens in (type(key), type(value)):
            key, value = open_forgotten(layers, key, value)
        call = read_call(module, query, key, value, attention_mask, keywords)
        stock_output = partial(
            compute_stock_output, module, query, key, value, attention_mask, keywords
        )
        output = layers(call, weights, stock_output)
        if output is None:  # no layer changes this call
            return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
        return output[0].transpose(1, 2).contiguous(), output[1]

    return forward


def name_positional(values: tuple) -> dict[str, Any]:
    """Return positional arguments of an attention function, after the mask, by their names."""
    if len(values) > len(POSITIONAL):
        raise TypeError(
            f"an attention function of hf_hyperattn was given {len(values)} arguments after the mask; allowed: "
            f"{', '.join(POSITIONAL)} by position, others by name"
        )
    return dict(zip(POSITIONAL, values, strict=False))


def find_named_layers(module: Any, named: Any) -> Layers | None:
    """Return the layers that a mechanism's name means for a module; None if it does not act there."""
    says = getattr(getattr(module, "config", None), "hyperattn", None)
    if named.layers is None or says is not None or torch.compiler.is_compiling():
        return named.of(module)
    return named.layers


def wants_weights(module: nn.Module, keywords: dict) -> bool:
    """Whether somebody will read the attention weights of this call.

    Some families pass `output_attentions` down; for the others Transformers collects them with hooks and keeps what
    it collects in a context variable.
    """
    if keywords.get("output_attentions") or type(module).__name__.startswith(RETURNING_WEIGHTS):
        return True
    collector = getattr(output_capturing, "_active_collector", None)
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        return False  # the model's own forward does not collect, and the compiler cannot read a context variable
    collected = collector.get() if collector is not None else None
    return any(key.endswith("attentions") for key in collected or ())


def read_call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keywords: dict
) -> HostCall:
    """Return the call of a host's attention.

    Args:
        module: The host, an attention layer of Transformers.
        query: [B, H, N, d].
        key, value: [B, Hkv, M, d] and [B, Hkv, M, dv].
        mask: As `family_mask` makes it, or of another make.
        keywords: All others of the call.

    Raises:
        ValueError: The call has an argument that no engine honours.
    """
    attributes, compiling = module.__dict__, torch.compiler.is_compiling()
    check_call(module, mask, keywords)
    visible = read_visible_keys(module, query, key, mask, keywords)
    scale, factor = read_scale(module, query, keywords)
    if (
        key.shape[1] != value.shape[1]
    ):  # Nemotron 3's encoders share keys among more heads than values
        kv_heads = max(key.shape[1], value.shape[1])
        key, value = repeat_heads(key, kv_heads), repeat_heads(value, kv_heads)
    config, get = getattr(module, "config", None), keywords.get
    sinks = get("sinks") if get("s_aux") is None else get("s_aux")
    # `hierarchy=` of the model's call comes down in a context, too, since some families drop keywords on the way.
    has_context = compiling or CONTEXT in attributes
    options = Options(
        mask=visible.mask,
        bias=get("position_bias"),
        is_causal=visible.by_position,
        window=visible.window,
        offset=visible.offset,
        softcap=get("softcap"),
        sinks=None if sinks is None else sinks.reshape(-1),
        dropout_p=float(get("dropout") or 0.0),
        any_rounding=getattr(config, STOCK, None) == HYPER_DOT,
    )
    return HostCall(
        query=query if factor == 1.0 else query / factor,
        key=key,
        value=value,
        scale=scale * factor,
        is_causal=visible.is_causal,
        options=options,
        keywords={
            **keywords,
            "hierarchy": hierarchy_of_call(module, keywords) if has_context else get("hierarchy"),
        },
        first=visible.first,
        hidden=hidden_states_of_call(module, query.shape[2])
        if compiling or HIDDEN in attributes
        else None,
        heads=heads_of_rank(module, query.shape[1])
        if dist.is_available() and dist.is_initialized()
        else None,
        backend=getattr(module, BACKEND, "auto") if compiling else attributes.get(BACKEND, "auto"),
        chunk=chunk_size_of(module) if hasattr(config, "attention_chunk_size") else None,
        cache=cache_of_call(module) if CACHE in attributes and not compiling else None,
    )


def check_call(module: Any, mask: Tensor | None, keywords: dict) -> None:
    """Raise for what cannot be honoured, or not be exported."""
    if not UNHONOURED.isdisjoint(keywords):
        refuse_keywords(module, mask, keywords)
    if exporting_to_onnx() if torch.compiler.is_compiling() else torch.onnx.is_in_onnx_export():
        check_onnx(module, getattr(module, BACKEND, "auto"))


class VisibleKeys(NamedTuple):
    """Which keys the queries of a call see.

    Args:
        mask: cut to the keys of the call; None where position says all.
        is_causal: whether queries see no later keys, by the mask or by position.
        by_position: whether no mask says so.
        window, offset: as in `Options`.
        first: where the keys begin.
    """

    mask: Tensor | None
    is_causal: bool
    by_position: bool
    window: int | None
    offset: int
    first: FirstKey


def read_visible_keys(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, keywords: dict
) -> VisibleKeys:
    """Return which keys the queries of a call see: by its mask, or by position where it has none."""
    queries, keys, window = query.shape[2], key.shape[2], keywords.get("sliding_window")
    first = START
    if mask is not None or torch.compiler.is_compiling():
        first = first_key(module, mask, window, queries, keys)
    if keywords.get("indices") is not None:
        first = read_unindexed(first, mask, len(query), keys)
        mask = apply_indices(mask, keywords["indices"], keys)
    if mask is not None and mask.shape[-1] > keys:
        mask = mask[..., :keys]
    hides = position_hides(module)
    is_causal = keywords.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", hides) if is_causal is None else is_causal)
    by_position, offset = mask is None and is_causal and hides, 0
    if mask is not None:
        window = None
    elif queries == 1:
        # One new token is the last one. Without a window it sees all that the cache holds.
        window = window if by_position else None
        offset = keys - 1 if window else 0
    return VisibleKeys(mask, is_causal, by_position and queries > 1, window or None, offset, first)


def read_scale(module: Any, query: Tensor, keywords: dict) -> tuple[float, float]:
    """Return the factor of the logits of this query, and the factor that the query has been multiplied with.

    Layers take the query as projected and the whole factor apart; some families have multiplied one by the other.
    """
    scale = keywords.get("scaling")
    scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    return scale, scaling_already_applied(module, scale) if scale == 1.0 else 1.0


def position_hides(module: nn.Module) -> bool:
    """Whether a causal call without a mask hides later keys.

    In families with eager attention alone nothing does; hosts that `model_patches` routes (they know their stock
    class) keep to the call contract all the same.
    """
    return type(getattr(module, "config", None)) not in MASK_SAYS_ALL or hasattr(
        type(module), "stock_class"
    )


def is_causal_host(module: nn.Module) -> bool:
    """Whether the module says that its queries see only earlier keys; where it says nothing, what SDPA would take."""
    return bool(getattr(module, "is_causal", position_hides(module)))


class Layers(nn.Module):
    """Layers of mechanisms, one child each, in the order of their stages."""

    def forward(
        self, call: HostCall, weights: bool = False, stock: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The output [B, H, N, dv] and the weights where asked for; None where every layer leaves the call as it is.

        Args:
            call: the host's call.
            weights: whether to return the attention weights.
            stock: computes the output of the host's own attention. Where gates have not moved but are to learn, the
                output is that to the last bit, with the gradients of the mechanism.

        Raises:
            ValueError: the call has another number of heads than the host was patched for, or key heads that do not
                divide the query heads.
        """
        self.check_head_counts(call)
        if call.keywords.get("hierarchy") is not None:
            warn_of_hierarchy(tuple(self._modules))
        layers: Iterable[Callable] = self._modules.values()
        rank, everything = call.heads, False
        if rank is not None:
            call, layers, everything = on_rank(tuple(self._modules.values()), call, rank)
        elif PARTITIONED in self.__dict__:
            refuse_partitioned(self)
        query, key = call.query, call.key
        terms = (ScoreTerm(DOT, partial(dot_logits, query, key, call.scale)),)
        plan = host_plan = Plan(
            call, PairScore(query, key, terms, call.scale), call.value, call.options
        )
        for layer in layers:
            plan = layer(plan)
        if plan is host_plan and self.heads is not None:
            return None
        if plan.attend is attention and not plan.after:  # which sees to full precision by itself
            out, attention_weights = attention(
                plan.score, plan.value, plan.options, backend=call.backend, weights=weights
            )
            out = out.to(query.dtype)
        else:
            out, attention_weights = plan.run(weights=weights)
        if rank is not None and everything:
            out = rank.slice_rank(out, 1)
            attention_weights = (
                None if attention_weights is None else rank.slice_rank(attention_weights, 1)
            )
        if (
            torch.is_grad_enabled()
            and self.heads is not None
            and stock is not None
            and self.starts(call)
        ):
            with torch.no_grad():
                exact = stock().to(out.dtype)
            out = exact + (out - out.detach())
        return out, attention_weights

    def check_head_counts(self, call: HostCall) -> None:
        """Raise for other numbers of heads than the host was patched for, or than kernels can share."""
        heads = call.query.shape[1] if call.heads is None else call.heads.total
        if self.heads is not None and heads != self.heads:
            raise ValueError(
                f"a host patched for {self.heads} heads was called with {heads}; patch it in the form in which it runs"
            )
        if call.query.shape[1] % call.key.shape[1]:
            # Kernels divide by the number of query heads that share a key head, and would end the process at 0.
            raise ValueError(
                f"attention was called with {call.query.shape[1]} query heads and {call.key.shape[1]} key heads; "
                "allowed: a number of key heads (num_key_value_heads) that divides the number of query heads"
            )

    _modules: dict[str, Any]  # the layers by their mechanisms' names
    starts: Any  # see `Hyper`
    heads: int | None = (
        None  # that the host was patched for; None where a mechanism is used by name
    )


def warn_of_hierarchy(names: tuple[str, ...]) -> None:
    """Warn where none of these mechanisms can use the hierarchy of a call."""
    if not torch.compiler.is_compiling() and not any(
        get_mechanism(name).takes_hierarchy for name in names
    ):
        logger.warning_once(
            f"hierarchy= reached attention that runs {' and '.join(names)}, which ignores it; leave it out, or patch "
            "the model with a mechanism over hierarchies too, such as HsaConfig()"
        )


def compute_stock_output(module, query, key, value, attention_mask, keywords: dict) -> Tensor:
    """[B, H, N, dv], what the host's own attention gives."""
    return stock_forward(module, query, key, value, attention_mask, **keywords)[0].transpose(1, 2)


def stock_forward(module, query, key, value, attention_mask, weights: bool = False, **keywords):
    """The stock attention function of this host; masks come as SDPA has them, bool or None.

    Args:
        weights: attention weights are wanted: only the family's eager function has them, so it computes all.
    """
    name = stock_name(module.config)
    attention_mask = apply_indices(attention_mask, keywords.pop("indices", None), key.shape[2])
    if weights or name == "eager" or keywords.get("softcap") is not None:
        mask = additive_mask(module, query, key, attention_mask, keywords.get("is_causal"))
        return eager_function(type(module))(module, query, key, value, mask, **keywords)
    if name == "flex_attention" or ("flash" in name and attention_mask is not None):
        name = "sdpa"  # these want masks of their own kind; the result is the same
    return function_beneath(module, name)(module, query, key, value, attention_mask, **keywords)


def additive_mask(
    module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """The mask as eager attention wants it: 0 where visible, the dtype's minimum elsewhere, causality included."""
    causal = is_causal_host(module) if is_causal is None else is_causal
    if mask is None and query.shape[2] > 1 and causal and position_hides(module):
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    dtype = (
        torch.float32 if query.dtype == torch.float64 else query.dtype
    )  # in which families take the softmax
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(dtype).min)


def family_mask(*args, config: Any = None, **kwargs):
    """The mask that the family's stock attention gets.

    Bool, True = take part, or None where position says it all; for families with eager attention alone additive, and
    None only where nothing is hidden. Masks say where the keys begin; where a cache has dropped some, there is one.
    """
    if UNROUTED and getattr(config, "model_type", "") in UNROUTED:
        UNROUTED[config.model_type](config)
    make = eager_mask if type(config) in MASK_SAYS_ALL else sdpa_mask
    if torch.compiler.is_compiling():
        return make(*args, config=config, **kwargs)
    dropped, padding = int(kwargs.get("kv_offset", 0)), kwargs.get("attention_mask")
    if dropped:
        kwargs["allow_is_causal_skip"] = False
    if padding is not None and not can_read(padding):  # what it hides is not known
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = make(*args, config=config, **kwargs)
    if mask is not None:
        says_stop = {"q_offset", "q_length"} <= {*kwargs}
        stop = kwargs["q_offset"] + kwargs["q_length"] - dropped if says_stop else None
        attach(mask, KnownOfMask(mask, FirstKey(dropped, padding, stop), is_ours=True))
    return mask


#: The attention function of patched models: `host.hyper` where there is one and it changes something, else what the
#: model ran before. Either way weights are returned where they are wanted, so that `attentions` has every layer's.
patched_forward = attention_function()
