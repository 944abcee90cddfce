"""How an attention module is made to call Transformers' attention interface, one instance at a time.

A family file gives a `Route`: a mixin whose methods take the place of the stock class's own score, softmax
and sum. `serve` changes the class of one live module to a subclass made of that mixin and the stock class.
The subclass has the stock module path and name, so output capture, device maps, sharding policies and
printing see the class they know; weights, hooks and sub-modules are untouched, and nothing in Transformers
itself changes.
"""

from __future__ import annotations

import functools
import inspect
import threading
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .eager import eager_attention

# Transformers 5.24 renamed the argument `past_key_values` to `cache`. Routes have the new name. `STOCK_CACHE` is the
# name that methods of the installed version have.
STOCK_CACHE = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)

RECORD = "_model_patches_record"  # instance attribute: the names `route` added, the implementation it met
UNREAD = (
    "output_attentions",
    "use_cache",
    "kwargs",
)  # `__call__` notes the first; the cache itself says the second


class Asked(threading.local):
    """What the calls that are running in this thread were asked for: modules are shared among threads."""

    def __init__(self):
        self.weights = False  # whether the innermost attention module is to return its weights
        self.weights_of_block = (
            False  # the same of the block around it, where that does not say so to its attention
        )


ASKED = Asked()


def intersect(mask: torch.Tensor | None, allowed: torch.Tensor) -> torch.Tensor:
    """`mask` (None, bool or additive) with everything hidden that `allowed` (bool, True = take part) hides."""
    if mask is None:
        return allowed
    return (
        mask & allowed
        if mask.dtype == torch.bool
        else mask.masked_fill(~allowed, torch.finfo(mask.dtype).min)
    )


if TYPE_CHECKING:

    class Stock(nn.Module):
        """What a mixin finds in the class that it stands before: a module with whatever attributes the family has."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Stock = object


class Route(Stock):
    """Base of the mixins that stand before a stock class."""

    stock_class: type[Any]  # set on the classes that `routed_class` makes
    route: type[Route]
    takes_cache = False  # whether `forward` has an argument `cache`; set likewise

    def __call__(self, *args, **kwargs):
        """As in the original; the cache may have either of its names."""
        if self.takes_cache and "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return super().__call__(*args, **kwargs)

    @classmethod
    def check(cls, module: nn.Module) -> None:
        """Raise ValueError where a variant of the family cannot be routed."""

    def __reduce_ex__(self, protocol):
        # The class is known under the stock name, so pickle has to be told how to make it again
        return _empty_routed, (type(self).stock_class, type(self).route), self.__dict__


class AttentionRoute(Route):
    """Mixin of an attention module: the stock keeps its projections and its cache, the mixin calls `attend`."""

    is_causal = False  # for stock classes that set no attribute of their own
    upcast_scores = (
        False  # True where the original takes the product of queries and keys in float32
    )
    passes_on: tuple[
        str, ...
    ] = ()  # arguments of the stock's `forward` that the mixin's has among its keywords
    place_of_output_attentions: int | None = (
        None  # where a call may ask without the argument's name
    )

    def __call__(self, *args, **kwargs):
        """As in the original; notes the argument `output_attentions`, which `attend` passes on."""
        place = self.place_of_output_attentions
        given = (
            args[place]
            if place is not None and place < len(args)
            else kwargs.get("output_attentions")
        )
        around = ASKED.weights
        ASKED.weights = bool(given)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            ASKED.weights = around

    def attend(
        self,
        query,
        key,
        value,
        attention_mask,
        *,
        scaling,
        dropout=0.0,
        position_bias=None,
        is_causal=None,
        implementation=None,
        **extra,
    ):
        """Call the implementation named in the config.

        Shapes as in `eager_attention`; `position_bias` `[B or 1, H or 1, Q or 1, K]` is expanded to heads and rows,
        `dropout` is used while training, `is_causal` replaces the module's, `implementation` the config's name;
        `extra` goes on to the implementation.
        """
        name = implementation or self.config._attn_implementation
        extra.setdefault("output_attentions", ASKED.weights)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        if position_bias is not None:
            extra["position_bias"] = position_bias.expand(-1, query.shape[1], query.shape[2], -1)
        return attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout if self.training else 0.0,
            scaling=scaling,
            is_causal=self._causal_now(is_causal),
            **extra,
        )

    def _causal_now(self, asked: bool | None) -> bool:
        # `config.is_causal = False` is how Transformers makes a decoder bidirectional
        causal = self.is_causal if asked is None else asked
        return bool(causal and getattr(self.config, "is_causal", True) is not False)


def _empty_routed(stock: Any, route: Any) -> nn.Module:
    cls = routed_class(stock, route)
    return cls.__new__(cls)


@functools.cache
def routed_class(stock: Any, route: Any) -> Any:
    """The subclass of `stock` that computes as `route` says, under the stock's module path and name."""
    base = stock
    while base.__name__.endswith(
        "FlashAttention2"
    ):  # stock's own flash variants replace the whole forward
        base = base.__mro__[1]
    body: dict[str, Any] = {
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
        "stock_class": stock,
        "route": route,
    }
    cls: Any = type(stock.__name__, (route, base), body)
    arguments = list(inspect.signature(cls.forward).parameters)[1:]
    cls.takes_cache = "cache" in arguments
    if issubclass(route, AttentionRoute):
        _check_stock(cls, base)
    if "output_attentions" in arguments:
        cls.place_of_output_attentions = arguments.index("output_attentions")
    return cls


def _check_stock(cls: Any, stock: Any) -> None:
    """Raise ValueError if a stock class, of a later Transformers, has changed in a way that its route would miss."""
    if cls.forward is stock.forward:
        if not any(hasattr(stock, name) for name in vars(cls.route) if not name.startswith("__")):
            raise _outdated(stock, "no longer calls the methods")
        return
    known = {*inspect.signature(cls.forward).parameters, *cls.passes_on, *UNREAD}
    if STOCK_CACHE != "cache" and "cache" in known:
        known.add(STOCK_CACHE)
    unknown = [name for name in inspect.signature(stock.forward).parameters if name not in known]
    if unknown:
        raise _outdated(stock, f"takes {', '.join(unknown)}")


def _outdated(stock: Any, change: str) -> ValueError:
    return ValueError(
        f"{stock.__name__} of Transformers {transformers.__version__} {change}, which its route in model_patches does "
        "not know; install a Transformers release that this package was tested with"
    )


def calls_interface(cls: type[Any]) -> bool:
    """Whether a stock attention class calls the attention interface itself, as more do from release to release."""
    forward = inspect.unwrap(cls.forward)
    return "ALL_ATTENTION_FUNCTIONS" in forward.__code__.co_names


def is_routed(module: nn.Module) -> bool:
    """Whether `module` is one that `route` has changed."""
    return isinstance(module, Route)


def route(module: Any, mixin: Any, config) -> None:
    """Change one stock module, in place. `config` is lent to modules that keep none."""
    added: tuple[str, ...] = ()
    if "config" not in module.__dict__:
        module.config, added = config, ("config",)
    module.__dict__[RECORD] = (added, module.config._attn_implementation)
    _become(module, routed_class(module.__class__, mixin))


def unroute(module: Any) -> None:
    """Give one routed module its stock class back and remove what `route` set."""
    added, _ = module.__dict__.pop(
        RECORD, ((), None)
    )  # none where the routed class itself was instantiated
    for name in added:
        delattr(module, name)
    _become(module, type(module).stock_class)


def check_unroute(module: Any, now: str | None = None) -> None:
    """Raise ValueError while the config names an implementation that the stock class would ignore or misread.

    Args:
        now: the name; None for the one in the config.
    """
    now = now or module.config._attn_implementation
    _, before = module.__dict__.get(RECORD, ((), now))
    built_in = before in (None, "sdpa") or str(before).startswith("flash_attention")
    allowed = ["eager", before] if built_in else ["eager"]
    if now not in allowed:
        raise ValueError(
            f"cannot unserve {type(module).__name__} while its config says attn_implementation={now!r}, which the "
            f"stock class would ignore or misread: set {' or '.join(map(repr, allowed))} first"
        )


def _become(module: Any, cls: type[Any]) -> None:
    """Give a live module another class, also where the instance keeps its own `forward`.

    Accelerate keeps the bound method as `_old_forward`, and puts it back as `forward` when its hook is removed.
    """
    previous = type(module)
    module.__class__ = cls
    for name in ("forward", "_old_forward"):
        kept = module.__dict__.get(name)
        if isinstance(kept, MethodType) and kept.__func__ is previous.forward:
            module.__dict__[name] = MethodType(cls.forward, module)
