"""The path of one attention call, from Transformers to an engine.

Read this file to learn which steps run, and in which order, when a patched attention layer is
called:

1. `attention_function` finds the mechanism layers of the calling module: patched ones, or the
   layers of a name such as "cone".
2. `read_call` turns the arguments of Transformers into a `HostCall`.
3. `Layers.forward` lets every mechanism layer change the plan of the call. An engine then computes
   the plan.
4. `stock_forward` runs the module's own attention function if no mechanism layer changes anything.

The call contract:

- Keys and values come unrepeated (grouped-query attention).
- The keyword `is_causal` wins over the attribute `is_causal` of the module.
- A mask, if given, decides alone what is visible. Without a mask, a causal call of more than one
  query is top-left causal.
- An argument that no engine honours raises a ValueError with its name.

This code runs once per layer and decoding step. Most modules lack the optional attributes, so a
dictionary lookup comes before each function call. In a compiled graph a lookup saves nothing, and
the functions are always called.
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

from ...config.registry import get_mechanism
from ...engines import Options, PairScore, ScoreTerm, attention, repeat_heads
from ...engines.score import DOT, dot_logits
from ...mechanisms.base import HostCall, Plan
from ...mechanisms.selection.places import (
    START,
    FirstKey,
    KnownOfMask,
    apply_indices,
    read_unindexed,
)
from ...utils.attached import attach
from ...utils.readable import can_read
from ...utils.torch_private import PLAIN_ATTENTION
from ..parallel.context_parallel import SHARED_TOKENS, attend_shared, find_context
from ..parallel.partitioned import PARTITIONED, register_parameters
from ..parallel.tensor_parallel import heads_of_rank, on_rank
from .batched_requests import (
    Step,
    find_stock_mask,
    join_outputs,
    keywords_of_request,
    read_step,
    split_call,
)
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
from .hosts import count_heads
from .running_call import CACHE, CONTEXT, cache_of_call, hierarchy_of_call
from .stock import HYPER_DOT, STOCK, eager_function, function_beneath, stock_name

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'

#: Prefixes of attention class names whose families read the weights of every call.
RETURNING_WEIGHTS = ("BridgeTower", "Mgpstr")

#: Order of the arguments after the mask in Transformers' attention functions. Third-party wrappers
#: pass them by position.
POSITIONAL = ("dropout", "scaling", "is_causal")


def attention_function(named: Any = None) -> Callable:
    """Return the attention function that Transformers calls under one of our names.

    Args:
        named: A `NamedMechanism`, which finds the layers for a mechanism's own name ("cone"). None:
            use the layers that the calling module was patched with.
    """

    def forward(module, query, key, value, attention_mask, *positional, **keywords):
        if positional:
            keywords |= name_positional(positional)
        compiling = torch.compiler.is_compiling()
        # The compiler must not trace the watch: it would record a side effect of every call.
        if not compiling and WATCHED in module.__dict__:
            note_reached(module)
        # Only continuous batching says where to read its paged cache.
        is_batched = keywords.get("read_index") is not None
        step = read_step(module, keywords, query.device) if is_batched else None
        if keywords.get("cache") is not None:
            key, value = update_paged(module, key, value, keywords)
        if step is not None:
            return attend_step(module, query, key, value, keywords, step, named)
        weights = wants_weights(module, keywords)
        layers = find_layers(module, named)
        mesh = find_context(module) if may_share_tokens(module) else None
        if mesh is not None:
            # Under context parallelism each rank has some tokens, also in layers without mechanism.
            call = read_call(module, query, key, value, attention_mask, keywords)
            compute = partial(compute_output, layers)
            output = attend_shared(compute, layers, module, call, mesh, weights)
            return output.transpose(1, 2).contiguous(), None
        if layers is None:
            return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
        # An evicting cache hands out placeholders that only HSA and sparse layers may open.
        if not compiling and ForgottenTokens in (type(key), type(value)):
            key, value = open_forgotten(layers, key, value)
        call = read_call(module, query, key, value, attention_mask, keywords)
        stock_output = partial(
            compute_stock_output, module, query, key, value, attention_mask, keywords
        )
        output = layers(call, weights, stock_output)
        if output is None:
            # No layer changes this call: the original function gives bit-identical results.
            return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
        # Engines return [B, H, N, dv]. Transformers expects [B, N, H, dv].
        return output[0].transpose(1, 2).contiguous(), output[1]

    return forward


# Compiled models leave their graph here, as in the paged cache.
@torch.compiler.disable(reason="requests of continuous batching have other sizes in every step")
def attend_step(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keywords: dict,
    step: Step,
    named: Any,
) -> tuple[Tensor, None]:
    """Return the output of a step of continuous batching, request by request.

    Masks that a model makes for the row of all requests are not read.

    Args:
        module: The attention layer.
        query: [1, H, N, d], of all requests, one behind the other.
        key, value: [1, Hkv, M, d] and [1, Hkv, M, dv], of all requests, old tokens and new ones.
        keywords: All other arguments of the call.
        step: The requests.
        named: As in `attention_function`.

    Raises:
        ValueError: Ranks share the tokens of the step.
    """
    if find_context(module) is not None:
        raise ValueError(
            "continuous batching was called within context parallelism (context_parallel), where a rank has a part of "
            "every request; allowed: generate_batch() outside of it"
        )
    layers = find_layers(module, named)
    keywords = keywords_of_request(keywords)
    call = read_call(module, query, key, value, None, keywords)
    outputs = []
    for request, part in split_call(call, step):
        output = None if layers is None else layers(part)
        if output is None:
            # Query and values as the layer passed them: `read_call` undoes scaled queries.
            rows = query[:, :, request.queries], key[:, :, request.keys], value[:, :, request.keys]
            mask = find_stock_mask(request, query.device)
            outputs.append(stock_forward(module, *rows, mask, **keywords)[0])
        else:
            outputs.append(output[0].transpose(1, 2))
    return join_outputs(query, step, outputs).contiguous(), None


def may_share_tokens(module: Any) -> bool:
    """Return whether ranks share the tokens of a call, or shared those of the call before."""
    # torch's compiler guards this comparison: it compiles again inside `context_parallel`.
    is_plain = torch.nn.functional.scaled_dot_product_attention is PLAIN_ATTENTION
    return not is_plain or SHARED_TOKENS in module.__dict__


def find_layers(module: Any, named: Any) -> Any:
    """Return the module with the mechanism layers of an attention layer; None without any.

    Patched modules keep their layers in the child `hyper`. A mechanism's name has shared layers.
    """
    return module._modules.get("hyper") if named is None else find_named_layers(module, named)


def name_positional(values: tuple) -> dict[str, Any]:
    """Return the positional arguments after the mask as a dict of keywords.

    Raises:
        TypeError: More positional arguments than `POSITIONAL` lists.
    """
    if len(values) > len(POSITIONAL):
        raise TypeError(
            f"an attention function of hf_hyperattn was given {len(values)} arguments after the mask; allowed: "
            f"{', '.join(POSITIONAL)} by position, others by name"
        )
    return dict(zip(POSITIONAL, values, strict=False))


def find_named_layers(module: Any, named: Any) -> Layers | None:
    """Return the layers of a mechanism's name in a module; None if it does not act there."""
    record = getattr(getattr(module, "config", None), "hyperattn", None)
    # Shared layers have default parameters. A module whose config sets others needs its own.
    if named.layers is None or record is not None or torch.compiler.is_compiling():
        return named.find_layers(module)
    return named.layers


def wants_weights(module: nn.Module, keywords: dict) -> bool:
    """Return whether the caller will read the attention weights of this call.

    Some families pass `output_attentions` down. For the others Transformers collects weights with
    hooks, and a context variable lists which outputs it collects.
    """
    if keywords.get("output_attentions") or type(module).__name__.startswith(RETURNING_WEIGHTS):
        return True
    collector = getattr(output_capturing, "_active_collector", None)
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        # A compiled forward does not collect, and the compiler cannot read a context variable.
        return False
    collected = collector.get() if collector is not None else None
    return any(key.endswith("attentions") for key in collected or ())


def read_call(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keywords: dict
) -> HostCall:
    """Return one attention call as a `HostCall`.

    Args:
        module: The attention layer of Transformers.
        query: [B, H, N, d].
        key, value: [B, Hkv, M, d] and [B, Hkv, M, dv].
        mask: Bool (True = visible) or additive, from `family_mask` or from third-party code. None:
            position decides.
        keywords: All other arguments of the call.

    Raises:
        ValueError: An argument that no engine honours.
    """
    attributes = module.__dict__
    compiling = torch.compiler.is_compiling()
    check_call(module, mask, keywords)
    visible = read_visible_keys(module, query, key, mask, keywords)
    scale, factor = read_scale(module, query, keywords)
    if key.shape[1] != value.shape[1]:
        # Encoders of Nemotron 3 have fewer key heads than value heads. Engines need equal numbers.
        kv_heads = max(key.shape[1], value.shape[1])
        key, value = repeat_heads(key, kv_heads), repeat_heads(value, kv_heads)
    config = getattr(module, "config", None)
    get = keywords.get
    # GPT-OSS calls its learned sink logits `s_aux`, other families call them `sinks`.
    sinks = get("sinks") if get("s_aux") is None else get("s_aux")
    # Some families drop the keyword `hierarchy=` on the way down, so a context carries it as well.
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
    # The tests come before the calls: these features are rare, and this code runs for every layer
    # and token.
    hierarchy = hierarchy_of_call(module, keywords) if has_context else get("hierarchy")
    reads_hidden = compiling or HIDDEN in attributes
    hidden = hidden_states_of_call(module, query.shape[2]) if reads_hidden else None
    has_ranks = dist.is_available() and dist.is_initialized()
    heads = heads_of_rank(module, query.shape[1], count_heads) if has_ranks else None
    backend = getattr(module, BACKEND, "auto") if compiling else attributes.get(BACKEND, "auto")
    has_chunks = hasattr(config, "attention_chunk_size")
    reads_cache = CACHE in attributes and not compiling
    return HostCall(
        query=query if factor == 1.0 else query / factor,
        key=key,
        value=value,
        scale=scale * factor,
        is_causal=visible.is_causal,
        options=options,
        keywords={**keywords, "hierarchy": hierarchy},
        first=visible.first,
        hidden=hidden,
        heads=heads,
        backend=backend,
        chunk=chunk_size_of(module) if has_chunks else None,
        cache=cache_of_call(module) if reads_cache else None,
    )


def check_call(module: Any, mask: Tensor | None, keywords: dict) -> None:
    """Raise if no engine honours an argument, or if ONNX cannot hold the call."""
    if not UNHONOURED.isdisjoint(keywords):
        refuse_keywords(module, mask, keywords)
    # While the compiler traces, torch's own function would answer False.
    compiling = torch.compiler.is_compiling()
    exporting = exporting_to_onnx() if compiling else torch.onnx.is_in_onnx_export()
    if exporting:
        check_onnx(module, getattr(module, BACKEND, "auto"))


class VisibleKeys(NamedTuple):
    """The keys that each query of a call may attend to.

    Args:
        mask: Mask, cut to the keys of the call. None: position decides alone.
        is_causal: Whether queries see no later keys, because of the mask or by position.
        by_position: Whether the call is causal and no mask says so.
        window, offset: As in `Options`.
        first: Where the keys of the call begin in the text.
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
    """Return which keys the queries see: by the mask, or by position without one."""
    queries = query.shape[2]
    keys = key.shape[2]
    window = keywords.get("sliding_window")
    first = START
    if mask is not None or torch.compiler.is_compiling():
        first = first_key(module, mask, window, queries, keys)
    if keywords.get("indices") is not None:
        # DeepSeek's indexer chooses keys. Padding must be read before its choice hides other keys,
        # too.
        first = read_unindexed(first, mask, len(query), keys)
        mask = apply_indices(mask, keywords["indices"], keys)
    if mask is not None and mask.shape[-1] > keys:
        # A mask may be longer than the keys, as with static caches. Families cut it in the same
        # way.
        mask = mask[..., :keys]
    hides = position_hides(module)
    is_causal = keywords.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", hides) if is_causal is None else is_causal)
    by_position = mask is None and is_causal and hides
    offset = 0
    if mask is not None:
        # The mask already contains the window.
        window = None
    elif queries == 1:
        # One new token is the last one. Without a window it sees all that the cache holds.
        window = window if by_position else None
        offset = keys - 1 if window else 0
    return VisibleKeys(
        mask=mask,
        is_causal=is_causal,
        by_position=by_position and queries > 1,
        window=window or None,
        offset=offset,
        first=first,
    )


def read_scale(module: Any, query: Tensor, keywords: dict) -> tuple[float, float]:
    """Return the factor of the logits, and the factor already in the query.

    Mechanism layers need the query as projected, and the factor by itself. Some families multiply
    the two beforehand.
    """
    scale = keywords.get("scaling")
    scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
    applied = scaling_already_applied(module, scale) if scale == 1.0 else 1.0
    return scale, applied


def position_hides(module: nn.Module) -> bool:
    """Return whether a causal call without a mask hides later keys.

    Families that only have eager attention put all visibility into the mask, so without a mask
    every key is visible. Modules that `model_patches` routes (their class has `stock_class`) follow
    the call contract instead.
    """
    return type(getattr(module, "config", None)) not in MASK_SAYS_ALL or hasattr(
        type(module), "stock_class"
    )


def is_causal_host(module: nn.Module) -> bool:
    """Return whether the queries of an attention layer see only earlier keys.

    A module without the attribute `is_causal` counts as causal, as in Transformers' SDPA function,
    unless its masks must contain causality.
    """
    return bool(getattr(module, "is_causal", position_hides(module)))


class Layers(nn.Module):
    """The layers of the mechanisms in one attention layer.

    Each layer is a child. Children are in the order of their stages.
    """

    def forward(
        self, call: HostCall, weights: bool = False, stock: Callable[[], Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return output and attention weights, or None if no layer changes the call.

        The output has shape [B, H, N, dv].

        Args:
            call: The attention call.
            weights: Whether to return the attention weights. Without it they are None.
            stock: Function that computes the output of the original attention. While all gates are
                still at their start, the output is bit-identical to it, but carries the gradients
                of the mechanism.

        Raises:
            ValueError: The number of query heads differs from the patched one, or is no multiple of
                the number of key heads.
        """
        if PARTITIONED in self.__dict__ and register_parameters(self):
            # Enter again: DeepSpeed gathers registered parameters when a module is called.
            return self(call, weights, stock)
        self.check_head_counts(call)
        if call.keywords.get("hierarchy") is not None:
            warn_of_hierarchy(tuple(self._modules))
        layers: Iterable[Callable] = self._modules.values()
        # Under tensor parallelism this rank holds a part of the heads. `everything` is True if a
        # layer mixes heads: then all ranks compute all heads, and each keeps its own rows at the
        # end.
        rank = call.heads
        everything = False
        if rank is not None:
            call, layers, everything = on_rank(tuple(self._modules.values()), call, rank)
        # Start from plain softmax attention, and let every layer change its stage of the plan.
        query, key = call.query, call.key
        terms = (ScoreTerm(DOT, partial(dot_logits, query, key, call.scale)),)
        score = PairScore(raw_query=query, raw_key=key, terms=terms, scale=call.scale)
        host_plan = Plan(call=call, score=score, value=call.value, options=call.options)
        plan = host_plan
        for layer in layers:
            plan = layer(plan)
        if plan is host_plan and self.heads is not None:
            return None
        if plan.attend is attention and not plan.after:
            # A shortcut for plain scores: `attention` raises the precision by itself, so `Plan.run`
            # is not needed.
            out, attention_weights = attention(
                plan.score, plan.value, plan.options, backend=call.backend, weights=weights
            )
            out = out.to(query.dtype)
        else:
            out, attention_weights = plan.run(weights=weights)
        if rank is not None and everything:
            out = rank.slice_rank(out, 1)
            if attention_weights is not None:
                attention_weights = rank.slice_rank(attention_weights, 1)
        can_start = torch.is_grad_enabled() and self.heads is not None
        if can_start and stock is not None and self.starts(call):
            # A fresh patch must not change the loss: take the values of the original attention,
            # which may differ in the last bit, and the gradients of ours.
            with torch.no_grad():
                exact = stock().to(out.dtype)
            out = exact + (out - out.detach())
        return out, attention_weights

    def check_head_counts(self, call: HostCall) -> None:
        """Raise if the number of heads is not the patched one, or not a multiple of key heads."""
        heads = call.query.shape[1] if call.heads is None else call.heads.total
        if self.heads is not None and heads != self.heads:
            raise ValueError(
                f"a host patched for {self.heads} heads was called with {heads}; patch it in the form in which it runs"
            )
        if call.query.shape[1] % call.key.shape[1]:
            # Kernels divide by the number of query heads per key head. A 0 there would crash the
            # process.
            raise ValueError(
                f"attention was called with {call.query.shape[1]} query heads and {call.key.shape[1]} key heads; "
                "allowed: a number of key heads (num_key_value_heads) that divides the number of query heads"
            )

    #: The layers by the names of their mechanisms.
    _modules: dict[str, Any]
    #: `Hyper.starts`: whether no added parameter has moved yet.
    starts: Any
    #: Number of query heads that the patch was made for. None for a mechanism that runs by name.
    heads: int | None = None


def warn_of_hierarchy(names: tuple[str, ...]) -> None:
    """Log one warning if none of these mechanisms uses the hierarchy of the call."""
    if not torch.compiler.is_compiling() and not any(
        get_mechanism(name).takes_hierarchy for name in names
    ):
        logger.warning_once(
            f"hierarchy= reached attention that runs {' and '.join(names)}, which ignores it; leave it out, or patch "
            "the model with a mechanism over hierarchies too, such as HsaConfig()"
        )


def compute_output(layers: Any, call: HostCall) -> Tensor:
    """Return the output [B, H, N, dv] of a call, by plain attention if no layer changes it."""
    output = None if layers is None else layers(call)
    output = Layers()(call) if output is None else output
    return output[0]


def compute_stock_output(module, query, key, value, attention_mask, keywords: dict) -> Tensor:
    """Return the output [B, H, N, dv] of the module's original attention."""
    return stock_forward(module, query, key, value, attention_mask, **keywords)[0].transpose(1, 2)


def stock_forward(module, query, key, value, attention_mask, weights: bool = False, **keywords):
    """Run the attention function that the module had before the patch.

    Masks arrive as SDPA takes them: bool or None.

    Args:
        weights: Whether attention weights are wanted. Only the family's eager function returns
            them.
    """
    name = stock_name(module.config)
    attention_mask = apply_indices(attention_mask, keywords.pop("indices", None), key.shape[2])
    if weights or name == "eager" or keywords.get("softcap") is not None:
        mask = additive_mask(module, query, key, attention_mask, keywords.get("is_causal"))
        return eager_function(type(module))(module, query, key, value, mask, **keywords)
    if name == "flex_attention" or ("flash" in name and attention_mask is not None):
        # These functions take masks of another form. SDPA computes the same from ours.
        name = "sdpa"
    return function_beneath(module, name)(module, query, key, value, attention_mask, **keywords)


def additive_mask(
    module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor | None:
    """Return the mask of eager attention: 0 where visible, else the dtype's minimum.

    A causal call without a mask gets a causal one, since eager functions ignore `is_causal`.
    """
    causal = is_causal_host(module) if is_causal is None else is_causal
    if mask is None and query.shape[2] > 1 and causal and position_hides(module):
        mask = torch.ones(
            query.shape[2], key.shape[2], dtype=torch.bool, device=query.device
        ).tril()[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    # Families compute the softmax in float32 at most, where the minimum of float64 would be -inf.
    dtype = torch.float32 if query.dtype == torch.float64 else query.dtype
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(dtype).min)


def family_mask(*args, config: Any = None, **kwargs):
    """Return the mask for the family's original attention, and note where its keys begin.

    It is bool (True = visible), or None if position decides alone. Families that only have eager
    attention get an additive mask, and None only if nothing is hidden. If a cache has dropped keys,
    there is always a mask, because the start of the keys is noted on it.
    """
    if UNROUTED and getattr(config, "model_type", "") in UNROUTED:
        UNROUTED[config.model_type](config)
    make = eager_mask if type(config) in MASK_SAYS_ALL else sdpa_mask
    if torch.compiler.is_compiling():
        return make(*args, config=config, **kwargs)
    dropped = int(kwargs.get("kv_offset", 0))
    padding = kwargs.get("attention_mask")
    if dropped:
        kwargs["allow_is_causal_skip"] = False
    if padding is not None and not can_read(padding):
        # Whether anything is hidden cannot be known here (meta tensors, tracing), so the mask must
        # not be skipped.
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = make(*args, config=config, **kwargs)
    if mask is not None:
        # Behind `stop` a static cache has empty slots. Without both arguments it is not known.
        knows_stop = {"q_offset", "q_length"} <= {*kwargs}
        stop = kwargs["q_offset"] + kwargs["q_length"] - dropped if knows_stop else None
        attach(mask, KnownOfMask(mask, FirstKey(dropped, padding, stop), is_ours=True))
    return mask


#: Attention function of patched models. It runs `module.hyper` if that exists and changes the call,
#: else the function that the model ran before. Both return attention weights on request, so
#: `attentions` covers every layer.
patched_forward = attention_function()
