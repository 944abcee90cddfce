"""Key-tied attention for settings by name."""

from hf_hyperattn.engines import Options
from hf_hyperattn.hierarchy import Hierarchy
from hf_hyperattn.mechanisms.hsa.config import Rule
from hf_hyperattn.mechanisms.hsa.windowed.key import attend_keys, attend_levels


def split_names(settings):
    """A rule and options of settings by name, with `sink_logit` for the sinks of the options."""
    settings = {name: value for name, value in settings.items() if value is not None}
    names = "near", "sinks", "refine_top_k", "block_bias"
    rule = Rule("key", **{name: settings.pop(name) for name in names if name in settings})
    return rule, Options(sinks=settings.pop("sink_logit", None), **settings)


def key_tied(
    query, key, value, hierarchy, *, scale=None, mask=None, bias=None, place=None, **settings
):
    """`attend_keys` for settings by name; masks and biases of fewer axes, and window sizes."""
    if not isinstance(hierarchy, Hierarchy):
        hierarchy = Hierarchy(key.shape[2], sizes=hierarchy)
    mask, bias = (
        t if t is None else t.reshape((1,) * (4 - t.dim()) + t.shape) for t in (mask, bias)
    )
    how = {name: settings.pop(name) for name in ("backend", "weights") if name in settings}
    rule, options = split_names(settings | {"mask": mask, "bias": bias})
    how |= {"scale": query.shape[-1] ** -0.5 if scale is None else scale, "place": place}
    return attend_keys(query, key, value, hierarchy, rule, options, **how)


def attend_named(query, levels, *, scale=None, backend="auto", lse=True, **settings):
    """`attend_levels` for settings by name."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend_levels(query, levels, *split_names(settings), scale, backend, lse)
