"""Wrapping methods of Transformers' and PEFT's classes, and noticing where they are no longer what they were.

A wrapper's own parameters say what it relies on: the original must have them, at the same places and by the same names.
`warn_of_changes` is called once, when all wrappers are in place.
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

#: On a method: the names of our functions around it.
WRAPPED = "_hyperattn_wrapped"
#: What is wrapped, or relied on by name, without `wrap`: module, class, method and the parameters it is called with.
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
#: Sentences about what has changed.
changes: list[str] = []


def subclasses(cls: type) -> list[type]:
    """All classes there are below a class."""
    classes: list[type] = cls.__subclasses__()
    for below in classes:  # it grows
        classes += below.__subclasses__()
    return classes


def wrap(name: str, owner: Any = PreTrainedModel):
    """Decorator: the function becomes `name` of a class or module and gets the original first; each function once only.

    Class methods and static methods stay what they are. An owner that lacks it is left alone, which `warn_of_changes`
    tells.
    """

    def install(wrapper: Callable) -> Callable:
        label = f"{wrapper.__module__}.{wrapper.__name__}"
        static = inspect.getattr_static(owner, name, None)
        original = getattr(static, "__func__", static)
        wrapped = getattr(original, WRAPPED, ())
        if label in wrapped:
            return wrapper
        check(owner, name, list(inspect.signature(wrapper).parameters.values())[1:])
        if original is None:
            return wrapper

        @functools.wraps(original)
        def method(*args, **kwargs):
            return wrapper(original, *args, **kwargs)

        setattr(method, WRAPPED, (*wrapped, label))
        setattr(owner, name, method if static is original else type(static)(method))
        return wrapper

    return install


def check(owner: Any, name: str, expected: list[inspect.Parameter]) -> None:
    """Note it where a class or module lacks a function, or where its parameters are not those that are expected."""
    static = inspect.getattr_static(owner, name, None)
    if static is None:
        changes.append(f"{owner.__name__}.{name} is missing")
        return
    actual = list(inspect.signature(getattr(static, "__func__", static)).parameters.values())
    if isinstance(owner, type) and not isinstance(static, staticmethod):
        actual, expected = actual[1:], expected[1:]  # self, by whatever name
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p.name for p in expected if p.kind not in open_kinds]
    rest = [p for p in actual[len(named) :] if p.kind not in open_kinds and p.default is p.empty]
    passes_on = any(p.kind in open_kinds for p in expected)
    if [p.name for p in actual[: len(named)]] != named or (rest and not passes_on):
        changes.append(f"{owner.__name__}.{name} now takes ({', '.join(p.name for p in actual)})")


def warn_of_changes() -> None:
    """One warning that names what has changed in Transformers and PEFT, and the versions."""
    for module, cls, name, parameters in RELIED_ON:
        made = [
            inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for p in ("self", *parameters)
        ]
        rest = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        check(getattr(import_module(module), cls), name, [*made, rest])
    if changes:
        logger.warning(
            "hf_hyperattn: transformers %s and peft %s have changed what hf_hyperattn wraps: %s; patched models may "
            "lose what was added when they are loaded or saved; install versions that were tested (%s)",
            version("transformers"),
            version("peft"),
            "; ".join(changes),
            name_tested("transformers", "peft"),
        )
