"""The base implementation of a patched model: the one that it ran before it was patched.

It runs in unpatched layers and while gates are 0. This module finds its function and checks that
mechanisms can build on it.
"""

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
#: An empty cell of a closure. Reading its contents would raise an error.
EMPTY_CELL = CellType()

#: The attention implementation of patched models, as config.json has it.
PATCHED = "hf_hyperattn"

#: The name that is registered for it here. A copy of this module in an exported checkpoint
#: registers a name of its own. With the same name, other patched checkpoints would load without
#: this package and without their added parameters.
RUNNING = PATCHED
if __name__.partition(".")[0] != PATCHED:
    RUNNING += "_" + hashlib.sha256(__name__.encode()).hexdigest()[:12]

#: All names of ours that are registered; filled by names.py.
OURS: set[str] = {PATCHED, RUNNING}

#: The plain dot product on our engine. It is an ordinary implementation: it can be requested by
#: name, and mechanisms can build on it.
HYPER_DOT = "hyper_dot"

#: Key in the config of patched attention layers: the name of the base implementation.
STOCK = "hyperattn_stock"


#: The functions that are registered by names of ours; filled by names.py.
FUNCTIONS: dict[str, Callable] = {}
#: Number of nested wrappers that `find_own_function` looks into.
DEPTH = 4


def find_own_function(function: Any, depth: int = DEPTH) -> Callable | None:
    """Return Transformers' attention function that a registered function wraps.

    Without a wrapper, that is the registered function itself. Libraries wrap registered functions
    with `functools.wraps`, in a closure, or as an object.

    Args:
        function: The registered function.
        depth: Number of nested wrappers to look into.

    Returns:
        The function, or None if there is none inside.
    """
    # Missing upstream: a way to ask whether a registered function computes softmax(q·k)·v.
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
    # A function in its own closure (recursion) would be searched again at every depth.
    candidates = (part for part in inside if callable(part) and part is not function)
    return next(filter(None, (find_own_function(part, depth - 1) for part in candidates)), None)


def check_beneath(name: str | None, who: str) -> None:
    """Raise if a mechanism would build on a function that is not softmax(q·k)·v.

    Mechanisms add to these logits. On top of another function, the model would be unchanged only
    while all gates are closed, and it would learn from other gradients.

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
        # Not registered here: Transformers rejects the name, or a load falls back and warns.
        return
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
            "and the functions of hf_hyperattn are not: the wrapper has no effect while a mechanism is active; "
            "import hf_hyperattn before the library that wraps attention functions"
        )


def function_beneath(module: Any, name: str) -> Callable:
    """Return the attention function of a name, without a wrapper that runs already.

    Args:
        module: The attention layer that is running.
        name: Its base implementation.
    """
    function, running = ALL_ATTENTION_FUNCTIONS[name], module.config._attn_implementation
    # If our own function is wrapped too, its wrapper surrounds this call. Do not wrap it twice.
    if ALL_ATTENTION_FUNCTIONS.get(running) is FUNCTIONS.get(running):
        return function
    return find_own_function(function) or function


def marked(config) -> bool:
    """Return whether attention layers that run on this config are patched."""
    return STOCK in config.__dict__


def stock_name(config) -> str:
    """Return the base implementation of a config, or "sdpa" if this machine lacks it."""
    name = getattr(config, STOCK, "sdpa")
    known = isinstance(name, str) and (
        name == "eager" or name in ALL_ATTENTION_FUNCTIONS.valid_keys()
    )
    return name if known and name not in OURS else "sdpa"


def run_beneath(config, running: str = RUNNING) -> None:
    """Make a name that was set on a patched config its base implementation.

    Args:
        config: A patched config.
        running: The name of ours that the config runs afterwards.

    Raises:
        ValueError: The name is a mechanism's own, or no mechanism can build on it.
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


#: The families' own eager attention, by class of attention layer. Filled when a model is patched,
#: because torch's compiler cannot trace the search.
EAGER: dict[type, Callable] = {}


def find_eager(classes: Iterable[type]) -> None:
    """Find the eager attention of classes and store it in `EAGER`. Some have none.

    Their code passes it to the attention interface as the default.
    """
    # Missing upstream: the eager function is not registered under a name.
    for cls in set(classes) - EAGER.keys():
        for method in interface_callers(cls):
            for name in method.__code__.co_names:
                function = method.__globals__.get(name)
                # The first one: a subclass comes before its parents.
                if cls not in EAGER and "eager" in name and callable(function):
                    EAGER[cls] = function


def eager_function(cls: type) -> Callable:
    """Return the family's own eager attention.

    Args:
        cls: Class of the attention layer.

    Raises:
        ValueError: The family has none.
    """
    if cls not in EAGER:
        find_eager([cls])
    if cls not in EAGER:
        raise ValueError(
            f"{cls.__name__} has no eager attention, which softcap and output_attentions=True need; allowed: calls "
            "without them, under attn_implementation='sdpa'"
        )
    return EAGER[cls]
