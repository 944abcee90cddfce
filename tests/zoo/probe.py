"""What checks look at: which attention functions are called, and which modules no host serves."""

from contextlib import contextmanager

import torch
from transformers import AttentionInterface

from hf_hyperattn.integration.attention.hosts import find_hosts


@contextmanager
def counted(name):
    """Yields the list of modules that call the attention function registered under a name, one entry a call."""
    original, modules = AttentionInterface._global_mapping[name], []

    def counting(module, *args, **kwargs):
        modules.append(module)
        return original(module, *args, **kwargs)

    AttentionInterface.register(name, counting)
    try:
        yield modules
    finally:
        AttentionInterface.register(name, original)


def line(error):
    """The first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def guarded(check, *args):
    """A check's answer; an error is a no, with the error as the reason."""
    try:
        return check(*args)
    except Exception as error:
        return False, line(error)


def strays(model):
    """Classes of attention modules with weights of their own that no host serves: they stay as they were."""
    hosts = [name for name, _ in find_hosts(model)]
    found = set()
    for name, module in model.named_modules():
        if "Attention" not in type(module).__name__ or "hyper" in name.split("."):
            continue
        inside = any(
            h == name or h.startswith(f"{name}.") or name.startswith(f"{h}.") for h in hosts
        )
        leaf = not any("Attention" in type(m).__name__ for m in module.modules() if m is not module)
        if not inside and leaf and next(module.parameters(), None) is not None:
            found.add(type(module).__name__)
    return sorted(found)


def types_in(config):
    """The model types of a config and its parts."""
    found = {config.model_type}
    for name in config.sub_configs or {}:
        part = getattr(config, name, None)
        if hasattr(part, "model_type"):
            found |= types_in(part)
    return found


def stir(model):
    """Give every added parameter a value of its own, so that nothing is an identity."""
    generator = torch.Generator().manual_seed(1)
    added = [p for n, p in model.named_parameters() if ".hyper." in f".{n}"]
    with torch.no_grad():
        for parameter in added:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + 0.3)
    return added
