"""What runs in place of a host's attention: the functions and masks of our names, and `host.hyper`, the one child
module that a patched host gets, which owns every added parameter and is only called.

A call goes through few functions of few files: it is read here, changed by its layers, and computed by an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils import output_capturing

from ..attached import attach
from ..config import HyperAttnConfig, MechanismConfig, mechanisms_of
from ..engines import Options, PairScore, ScoreTerm, attention, repeat_heads
from ..engines.score import DOT, dot_logits
from ..mechanisms.base import Host, HostCall, MechanismLayer, Plan
from ..mechanisms.selection.places import START, FirstKey, KnownOfMask, before_indexer, within_indices
from ..readable import can_read
from ..registry import get_mechanism
from ..selection import head_numbers
from .cache_of_call import CACHE, cache_of_call
from .call import (
    BACKEND,
    MASK_SAYS_ALL,
    RETURNING_WEIGHTS,
    UNHONOURED,
    UNROUTED,
    check_onnx,
    chunk_size_of,
    exporting_to_onnx,
    first_key,
    refuse_keywords,
    scaling_already_applied,
    update_paged,
    wants_weights,
)
from .first_call import WATCHED, note_reached
from .forgotten import ForgottenTokens, open_forgotten
from .hidden import HIDDEN, hidden_states_of_call
from .hierarchy_context import CONTEXT, hierarchy_of_call
from .stock import HYPER_DOT, STOCK, stock_forward
from .tensor_parallel import PARTITIONED, heads_of_rank, on_rank, refuse_partitioned

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'


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
        rank, everything = call.heads, False
        layers: Iterable[Callable] = self._modules.values()
        heads = call.query.shape[1] if rank is None else rank.total
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
        if call.keywords.get("hierarchy") is not None:
            warn_of_hierarchy(tuple(self._modules))
        if rank is not None:
            call, layers, everything = on_rank(tuple(self._modules.values()), call, rank)
        elif PARTITIONED in self.__dict__:
            refuse_partitioned(self)
        query, key = call.query, call.key
        terms = (ScoreTerm(DOT, partial(dot_logits, query, key, call.scale)),)
        plan = host_plan = Plan(call, PairScore(query, key, terms, call.scale), call.value, call.options)
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
            out = rank.rows(out, 1)
            attention_weights = None if attention_weights is None else rank.rows(attention_weights, 1)
        if torch.is_grad_enabled() and self.heads is not None and stock is not None and self.starts(call):
            with torch.no_grad():
                exact = stock().to(out.dtype)
            out = exact + (out - out.detach())
        return out, attention_weights

    _modules: dict[str, Any]  # the layers by their mechanisms' names
    starts: Any  # see `Hyper`
    heads: int | None = None  # that the host was patched for; None where a mechanism is used by name


class Hyper(Layers):
    """The layers of a host's mechanisms.

    Args:
        config: what is done to the model.
        host: the host it is built for.
    """

    _is_hf_initialized: bool

    def __init__(self, config: HyperAttnConfig, host: Host):
        super().__init__()
        self.config = config.for_any_host
        self.overrides = (config.overrides or {}).get(host.name, ())  # configs that hold for this host alone
        self.heads = host.heads
        self.moved = False  # whether a gate was seen away from where it starts
        self.newly_routed = False  # whether the patch made this host call the attention interface
        self.came_with_model = False  # whether it was built with its model, from a checkpoint or a config
        heads = None if config.heads is None else head_numbers(config.heads, host.heads, host.name)
        mechanisms = mechanisms_of(config.mechanisms, self.overrides) if self.overrides else config.mechanisms
        for mechanism in mechanisms:
            layer = get_mechanism(mechanism.mechanism).layer(mechanism, host, config.mode, heads)
            if heads is not None:
                check_heads(layer, heads, host)
            self.add_module(mechanism.mechanism, layer)

    def mechanisms(self) -> tuple[MechanismConfig, ...]:
        """The mechanism configs that hold for this host."""
        return mechanisms_of(self.config.mechanisms, self.overrides)

    def layers(self) -> list[MechanismLayer]:
        return list(self._modules.values())

    def starts(self, call: HostCall) -> bool:
        """Whether training begins here: nothing has moved yet. Not asked again once something has."""
        if self.moved or not torch.is_grad_enabled() or call.options.dropout_p or not can_read(*self.parameters()):
            return False
        self.moved = not all(layer.identical() for layer in self.layers())
        return not self.moved

    def reset_parameters(self) -> None:
        """Every added parameter at its starting value."""
        self.moved = False
        for layer in self.layers():
            layer.reset_parameters()


def warn_of_hierarchy(names: tuple[str, ...]) -> None:
    """Warn where none of these mechanisms can use the hierarchy of a call."""
    if not torch.compiler.is_compiling() and not any(get_mechanism(name).takes_hierarchy for name in names):
        logger.warning_once(
            f"hierarchy= reached attention that runs {' and '.join(names)}, which ignores it; leave it out, or patch "
            "the model with a mechanism over hierarchies too, such as HsaConfig()"
        )


def check_heads(layer: MechanismLayer, heads: tuple[int, ...], host: Host) -> None:
    """Refuse some of a host's heads for a layer that would change all of them.

    Args:
        layer: as its mechanism built it.
        heads: those that were chosen.
        host: where it is to be put.
    """
    if len(heads) < host.heads and not (layer.honours_heads and layer.heads == heads):
        raise ValueError(
            f"{layer.config.mechanism} changes all heads of {host.name}, and heads= chooses {len(heads)} of "
            f"{host.heads}; allowed: heads=None, or a {type(layer).__name__} that passes heads to MechanismLayer, "
            "changes those alone (self.head_mask) and says honours_heads = True"
        )


def attention_function(named=None) -> Callable:
    """The function that a name stands for.

    Args:
        named: has `of(module)`, the `Layers` that a mechanism's name means for a module, and `layers`, the same for all
            modules that say nothing of it, where they are known; None: what the module was patched with.

    What it reads of a call is the call contract: keys and values come unrepeated; the `is_causal` keyword wins over the
    module's; a mask, where there is one, says everything about visibility; without one a causal call of more than one
    query is top-left causal. What cannot be honoured raises a ValueError that names it.
    """

    # One function, since all that happens between a model and the kernel is paid at every layer of every token: what
    # few calls need is a lookup here and a function of call.py. In a graph lookups save nothing, so that the functions
    # are called always.
    def forward(module, query, key, value, attention_mask, *positional, **keywords):
        if positional:
            keywords |= name_positional(positional)
        get, compiling, attributes = keywords.get, torch.compiler.is_compiling(), module.__dict__
        if not compiling and WATCHED in attributes:
            note_reached(module)
        if get("cache") is not None:
            key, value = update_paged(module, key, value, attention_mask, keywords)
        # Weights are read by whom asks for them, by families that always return them, and by Transformers' collector.
        weights, collector = bool(get("output_attentions")), getattr(output_capturing, "_active_collector", None)
        if compiling or type(module).__name__.startswith(RETURNING_WEIGHTS) or (collector and collector.get()):
            weights = wants_weights(module, keywords)
        # Which layers: the host's own; of a name, what the model's config says of it, or the same for all modules.
        layers = module._modules.get("hyper") if named is None else named.layers
        if named is not None:
            says = getattr(getattr(module, "config", None), "hyperattn", None)
            layers = named.of(module) if layers is None or compiling or says is not None else layers
        if layers is None:
            return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
        if not compiling and ForgottenTokens in (type(key), type(value)):
            key, value = open_forgotten(layers, key, value)
        (_, heads, n, _), m, mask, window = query.shape, key.shape[2], attention_mask, get("sliding_window")
        if not UNHONOURED.isdisjoint(keywords):
            refuse_keywords(module, mask, keywords)
        if exporting_to_onnx() if compiling else torch.onnx.is_in_onnx_export():
            check_onnx(module, getattr(module, BACKEND, "auto"))
        # `hierarchy=` of the model's call comes down in a context, too, since some families drop keywords on the way.
        hierarchy = get("hierarchy")
        if compiling or CONTEXT in attributes:
            hierarchy = hierarchy_of_call(module, keywords)
        # What is visible: where the keys begin that a cache still has; an indexer's choice; the mask, cut to the keys;
        # or, where there is none, position: then `causal` and the window count.
        first = START if mask is None and not compiling else first_key(module, mask, window, n, m)
        if get("indices") is not None:
            first = before_indexer(first, mask, len(query), m)
            mask = within_indices(mask, keywords["indices"], m)
        if mask is not None and mask.shape[-1] > m:
            mask = mask[..., :m]
        config = getattr(module, "config", None)
        hides = type(config) not in MASK_SAYS_ALL or hasattr(type(module), "stock_class")
        causal = get("is_causal")
        causal = bool(getattr(module, "is_causal", hides) if causal is None else causal)
        # Layers take the query as projected and the factor apart; some families have multiplied one by the other.
        scale, offset = get("scaling"), 0
        scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
        factor = scaling_already_applied(module, scale) if scale == 1.0 else 1.0
        by_position = mask is None and causal and hides
        if mask is not None or (n == 1 and not (window and by_position)):
            window = None
        elif n == 1:  # one new token: it is the last one, and sees all that the cache holds
            offset = m - 1
        sinks = keywords.get("s_aux")
        sinks = get("sinks") if sinks is None else sinks
        call = HostCall(
            query if factor == 1.0 else query / factor,
            key,
            value,
            scale * factor,
            causal,
            Options(
                mask,
                get("position_bias"),
                by_position and n > 1,
                window or None,
                offset,
                get("softcap"),
                None if sinks is None else sinks.reshape(-1),
                float(get("dropout") or 0.0),
                any_rounding=getattr(config, STOCK, None) == HYPER_DOT,
            ),
            {**keywords, "hierarchy": hierarchy},
            first,
            hidden_states_of_call(module, n) if compiling or HIDDEN in attributes else None,
            heads_of_rank(module, heads) if dist.is_available() and dist.is_initialized() else None,
            getattr(module, BACKEND, "auto") if compiling else attributes.get(BACKEND, "auto"),
            chunk=chunk_size_of(module) if hasattr(config, "attention_chunk_size") else None,
            cache=cache_of_call(module) if CACHE in attributes and not compiling else None,
        )
        if key.shape[1] != value.shape[1]:  # Nemotron 3's encoders share keys among more heads than values
            kv_heads = max(key.shape[1], value.shape[1])
            call = replace(call, key=repeat_heads(key, kv_heads), value=repeat_heads(value, kv_heads))
        output = layers(call, weights, partial(_stock_output, module, query, key, value, attention_mask, keywords))
        if output is None:
            return stock_forward(module, query, key, value, attention_mask, weights, **keywords)
        return output[0].transpose(1, 2).contiguous(), output[1]

    return forward


#: The order of further arguments in Transformers' own attention functions, by which wrappers of others pass them.
POSITIONAL = ("dropout", "scaling", "is_causal")


def name_positional(values: tuple) -> dict[str, Any]:
    """Return positional arguments of an attention function, after the mask, by their names."""
    if len(values) > len(POSITIONAL):
        raise TypeError(
            f"an attention function of hf_hyperattn was given {len(values)} arguments after the mask; allowed: "
            f"{', '.join(POSITIONAL)} by position, others by name"
        )
    return dict(zip(POSITIONAL, values, strict=False))


def _stock_output(module, query, key, value, attention_mask, keywords: dict) -> Tensor:
    """[B, H, N, dv], what the host's own attention gives."""
    return stock_forward(module, query, key, value, attention_mask, **keywords)[0].transpose(1, 2)


#: The attention function of patched models: `host.hyper` where there is one and it changes something, else what the
#: model ran before. Either way weights are returned where they are wanted, so that `attentions` has every layer's.
patched_forward = attention_function()


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
