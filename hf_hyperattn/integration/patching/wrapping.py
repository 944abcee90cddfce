"""Wrap methods of Transformers and PEFT, and detect that a new version has changed them.

The parameters of a wrapper declare what it relies on: the original must have them at the same
places and with the same names. `warn_of_changes` is called once, after all wrappers are installed.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel

from .versions import name_tested

logger = logging.getLogger("hf_hyperattn")

#: Attribute of a wrapped method: the names of our functions around it.
WRAPPED = "_hyperattn_wrapped"
#: Private methods that are overridden, called, or wrapped in another way than by `wrap`: module,
#: class, method, and the parameters that we rely on.
RELIED_ON = (
    (
        "transformers.utils.hub",
        "PushToHubMixin",
        "_upload_modified_files",
        ("working_dir", "repo_id"),
    ),
    ("transformers.utils.hub", "PushToHubMixin", "push_to_hub", ("repo_id",)),
    ("transformers", "PreTrainedModel", "should_save_on_this_rank", ("is_main_process",)),
    (
        "transformers",
        "PreTrainedModel",
        "barrier_after_gathered_checkpoint_save",
        ("distributed_config",),
    ),
    ("peft.tuners.tuners_utils", "BaseTuner", "inject_adapter", ("model", "adapter_name")),
    ("peft", "LoraModel", "_replace_module", ("parent", "child_name", "new_module", "child")),
    (
        "peft",
        "LoraModel",
        "_unload_and_optionally_merge",
        ("merge", "progressbar", "safe_merge", "adapter_names"),
    ),
    ("peft", "LoraModel", "_enable_peft_forward_hooks", ()),
    (
        "peft",
        "LoraModel",
        "_get_adapter_state_dict",
        ("model", "config", "adapter_name", "state_dict"),
    ),
    (
        "peft",
        "LoraModel",
        "_remap_adapter_state_dict_for_load",
        ("model", "config", "adapter_name", "state_dict"),
    ),
    ("peft", "LoraModel", "_remove_adapter_name_from_key", ("key", "adapter_name")),
)
#: Descriptions of all changes found so far.
changes: list[str] = []


def subclasses(cls: type) -> list[type]:
    """Return all direct and indirect subclasses of a class, parents first."""
    classes: list[type] = cls.__subclasses__()
    # The list grows during the loop, which so reaches the subclasses of subclasses.
    for below in classes:
        classes += below.__subclasses__()
    return classes


def wrap(name: str, owner: Any = PreTrainedModel):
    """Return a decorator that puts a function in the place of a method or function.

    The function gets the original as its first argument. It is installed only once, also if its
    module is imported again. Class methods and static methods keep their kind.

    Args:
        name: Name of the method or function.
        owner: The class or module that has it. If it does not, nothing is installed, and
            `warn_of_changes` reports it.
    """

    def install_wrapper(wrapper: Callable) -> Callable:
        label = f"{wrapper.__module__}.{wrapper.__name__}"
        static = inspect.getattr_static(owner, name, None)
        original = getattr(static, "__func__", static)
        wrapped = getattr(original, WRAPPED, ())
        if label in wrapped:
            return wrapper
        # Without the first parameter, which is the original.
        check_signature(owner, name, list(inspect.signature(wrapper).parameters.values())[1:])
        if original is None:
            return wrapper

        @functools.wraps(original)
        def method(*args, **kwargs):
            return wrapper(original, *args, **kwargs)

        setattr(method, WRAPPED, (*wrapped, label))
        # `type(static)` is `classmethod` or `staticmethod`, whose function is the original.
        setattr(owner, name, method if static is original else type(static)(method))
        return wrapper

    return install_wrapper


def check_signature(owner: Any, name: str, expected: list[inspect.Parameter]) -> None:
    """Add to `changes` if a function is missing or its parameters have changed.

    Args:
        owner: The class or module that should have the function.
        name: Name of the function.
        expected: The first parameters that it must have, with `self` for methods. A variadic
            parameter at the end allows any further ones.
    """
    static = inspect.getattr_static(owner, name, None)
    if static is None:
        changes.append(f"{owner.__name__}.{name} is missing")
        return
    actual = list(inspect.signature(getattr(static, "__func__", static)).parameters.values())
    # Without `self` or `cls`, whose name does not matter.
    if isinstance(owner, type) and not isinstance(static, staticmethod):
        actual, expected = actual[1:], expected[1:]
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in expected if p.kind not in open_kinds]
    # Further parameters with a default do no harm: the wrapper does not pass them.
    rest = [p for p in actual[len(named) :] if p.kind not in open_kinds and p.default is p.empty]
    passes_on = any(p.kind in open_kinds for p in expected)
    if [p.name for p in actual[: len(named)]] != named or (rest and not passes_on):
        changes.append(f"{owner.__name__}.{name} now takes ({', '.join(p.name for p in actual)})")


def warn_of_changes() -> None:
    """Check `RELIED_ON`, and log one warning with all changes and versions."""
    for module, cls, name, parameters in RELIED_ON:
        made = [
            inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for p in ("self", *parameters)
        ]
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        check_signature(getattr(import_module(module), cls), name, [*made, rest])
    if changes:
        logger.warning(
            "hf_hyperattn: transformers %s and peft %s have changed what hf_hyperattn wraps: %s; patched models may "
            "lose what was added when they are loaded or saved; install versions that were tested (%s)",
            version("transformers"),
            version("peft"),
            "; ".join(changes),
            name_tested("transformers", "peft"),
        )
