"""What a patched model runs where nothing is changed: the implementation it had before it was patched."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from types import CellType, FunctionType
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .hosts import interface_callers

logger: Any = logging.getLogger("hf_hyperattn")  # `warning_once` is Transformers'
#: A cell of a closure whose variable has no value yet.
EMPTY_CELL = CellType()

#: The attention implementation of patched models, as config.json has it.
PATCHED = "hf_hyperattn"

#: The same as it is registered here. A copy of this module that came with an exported checkpoint has a name of its own:
#: were it the same, other patched checkpoints would load without the package, and without what was added.
RUNNING = PATCHED
if __name__.partition(".")[0] != PATCHED:
    RUNNING += "_" + hashlib.sha256(__name__.encode()).hexdigest()[:12]

#: All names of ours that are registered; filled by names.py.
OURS: set[str] = {PATCHED, RUNNING}

#: The plain dot product on our engine. For Transformers and for patches it is an implementation as others are: it can
#: be asked for by name, and run beneath a mechanism.
HYPER_DOT = "hyper_dot"

#: Key in the config of patched hosts: the name of the implementation from before.
STOCK = "hyperattn_stock"


#: The functions that are registered by names of ours; filled by names.py.
FUNCTIONS: dict[str, Callable] = {}
#: How far `find_own_function` looks into a function of others: wrappers of wrappers.
DEPTH = 4


def find_own_function(function: Any, depth: int = DEPTH) -> Callable | None:
    """Return the attention function of Transformers that a registered function is, or wraps; None if there is none.

    Libraries wrap the functions that are registered, with `functools.wraps`, in a closure, or as an object.
    """
    innermost = function.func if isinstance(function, partial) else function
    # `functools.wraps` copies the module's name, but not the globals.
    if isinstance(innermost, FunctionType) and innermost.__globals__["__name__"].startswith(
        "transformers."
    ):
        return function
    if depth == 0 or not callable(innermost):
        return None
    inside = [
        innermost,
        getattr(innermost, "__wrapped__", None),
        getattr(innermost, "__func__", None),
    ]
    inside += getattr(function, "args", ())
    inside += [
        cell.cell_contents
        for cell in getattr(innermost, "__closure__", None) or ()
        if cell != EMPTY_CELL
    ]
    if not isinstance(innermost, FunctionType | type):
        inside += getattr(innermost, "__dict__", {}).values()
    candidates = (part for part in inside if callable(part) and part is not function)
    return next(filter(None, (find_own_function(part, depth - 1) for part in candidates)), None)


def check_beneath(name: str | None, who: str) -> None:
    """Raise if a mechanism would run on top of an attention function that is not softmax(q·k)·v.

    What a mechanism adds is added to these logits. With another function beneath, the model would be itself at closed
    gates only, and it would learn from other gradients.

    Args:
        name: The attention implementation beneath.
        who: The attention layer or model, for the error.

    Raises:
        ValueError: The name belongs to a function of others.
    """
    plain = str(name).removeprefix("paged|")
    if name is None or plain == "eager" or plain in OURS | {HYPER_DOT}:
        return
    function = ALL_ATTENTION_FUNCTIONS.get(plain)
    if function is None:
        return  # Nothing runs by this name here: Transformers refuses it, or a load takes another one and warns.
    own = find_own_function(function)
    if own is None:
        raise ValueError(
            f"{who} runs attn_implementation={name!r}, a function that hf_hyperattn does not know, and mechanisms "
            "build on softmax(q·k)·v; allowed: 'eager', 'sdpa' or flash attention; first call "
            "model.set_attn_implementation('sdpa')"
        )
    if own is not function and ALL_ATTENTION_FUNCTIONS.get(RUNNING) is FUNCTIONS.get(RUNNING):
        logger.warning_once(
            f"hf_hyperattn: the attention function {name!r} is wrapped by {getattr(function, '__module__', 'others')}, "
            "and those of hf_hyperattn are not: where a mechanism acts, the wrapper does not; import hf_hyperattn "
            "before the library that wraps attention functions"
        )


def function_beneath(module: Any, name: str) -> Callable:
    """Return the attention function of this name, without a wrapper that is around the running function already."""
    function, running = ALL_ATTENTION_FUNCTIONS[name], module.config._attn_implementation
    if ALL_ATTENTION_FUNCTIONS.get(running) is FUNCTIONS.get(running):
        return function
    return find_own_function(function) or function


def marked(config) -> bool:
    """Whether hosts that run on this config are patched."""
    return STOCK in config.__dict__


def stock_name(config) -> str:
    """The implementation from before, or "sdpa" where this machine does not have it."""
    name = getattr(config, STOCK, "sdpa")
    known = isinstance(name, str) and (
        name == "eager" or name in ALL_ATTENTION_FUNCTIONS.valid_keys()
    )
    return name if known and name not in OURS else "sdpa"


def run_beneath(config, running: str = RUNNING) -> None:
    """Let the implementation that was asked for on a patched config be what runs beneath the mechanism.

    Args:
        running: the name of ours that the config goes on to run.

    Raises:
        ValueError: it is a mechanism's own name, or cannot run beneath one.
    """
    name = config._attn_implementation
    if name is not None and not name.startswith(PATCHED):
        if name in OURS or "flex_attention" in name:
            raise ValueError(
                f"attn_implementation={name!r} cannot run beneath what {config.model_type!r} is patched with; allowed: "
                "'eager', 'sdpa' or flash attention, or unpatch_model(model) first"
            )
        check_beneath(name, f"a patched {config.model_type!r}")
        setattr(config, STOCK, name)
    config._attn_implementation_internal = running


#: The families' own eager attention by class of host. Found when a model is patched: the compiler cannot look for it.
EAGER: dict[type, Callable] = {}


def find_eager(classes: Iterable[type]) -> None:
    """Look for the eager attention of these classes, which their code hands to the attention interface as the default;
    some have none.
    """
    for cls in set(classes) - EAGER.keys():
        named = [
            (f.__globals__, name) for f in interface_callers(cls) for name in f.__code__.co_names
        ]
        eager = [
            known[name] for known, name in named if "eager" in name and callable(known.get(name))
        ]
        if eager:
            EAGER[cls] = eager[0]


def eager_function(cls: type) -> Callable:
    """The family's own eager attention."""
    if cls not in EAGER:
        find_eager([cls])
    if cls not in EAGER:
        raise ValueError(
            f"{cls.__name__} has no eager attention, which softcap and output_attentions=True need; allowed: calls "
            "without them, under attn_implementation='sdpa'"
        )
    return EAGER[cls]
