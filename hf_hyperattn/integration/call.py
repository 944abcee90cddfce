"""What only few attention calls need, or single families; attention.py reads the rest of a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..attached import attached_to
from ..engines import check_backend
from ..mechanisms.selection.places import FirstKey, KnownOfMask
from ..readable import is_exporting
from .hosts import find_hosts

#: Where a host keeps the engine that `set_backend` chose.
BACKEND = "_hyperattn_backend"

#: Keywords that change the mathematics and that no engine honours, with what to do instead.
REFUSED_KEYWORDS = {
    "head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "layer_head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "alibi": "pass it as position_bias",
    "attention_bias": "pass it as position_bias",
    "attn_bias": "pass it as position_bias",
}

UNHONOURED = frozenset([*REFUSED_KEYWORDS, "cu_seq_lens_q"])

#: Families whose query arrives multiplied by `module.scaling` are recognised by rule (see below); these are the
#: exceptions: the rule does not hold, or query and key share the factor.
SCALED_QUERY_AND_KEY = ("OpenAIPrivacyFilterAttention",)

#: Config classes of models that have eager attention alone. Their code counts on a mask that says all, in numbers.
MASK_SAYS_ALL: set[type] = set()

#: What raises the error for model types that are out of reach of our names; filled by names.py.
UNROUTED: dict[str, Callable] = {}


def set_backend(model: nn.Module, backend: str) -> nn.Module:
    """Let an engine compute all attention of a model that mechanisms take part in, patched or by name.

    It is a setting of the running model: copies of the model have it, checkpoints do not. Calls that no mechanism
    changes are the host's own. Arguments of single calls (`output_attentions`) that an engine cannot serve are errors.

    Args:
        model: any model, patched now or later; its modules are set.
        backend: a name out of `hf_hyperattn.engines.available_engines()`; "auto" takes the setting back.

    Returns:
        The model.

    Raises:
        ValueError: there is no such engine, or the model has no attention that could be told yet: families whose
            attention is served by rerouting it are told after the patch.
    """
    check_backend(backend)
    hosts = [host for _, host in find_hosts(model)]
    if not hosts and backend != "auto":
        raise ValueError(
            f"set_backend: {type(model).__name__} has no attention that could be told of an engine; call it after "
            "patch_model or set_attn_implementation"
        )
    for host in hosts:
        host.__dict__.pop(BACKEND, None)
        if backend != "auto":
            host.__dict__[BACKEND] = backend
    return model


def check_onnx(module: nn.Module, backend: str) -> None:
    """Raise where `torch.onnx.export` records a call of which no plain operators can be made."""
    if not is_exporting():
        raise ValueError(
            f"{type(module).__name__} has an attention of hf_hyperattn, which ONNX cannot hold by torch.jit.trace; use "
            "torch.onnx.export(..., dynamo=True)"
        )
    if backend not in ("auto", "reference"):
        raise ValueError(
            f"{type(module).__name__} runs on the engine {backend!r}, which ONNX cannot hold; use set_backend(model, "
            "'auto') before the export"
        )


@torch.compiler.assume_constant_result  # the compiler says no where ONNX is what it traces for
def exporting_to_onnx() -> bool:
    """Whether `torch.onnx.export` is running."""
    return torch.onnx.is_in_onnx_export()


def update_paged(
    module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, keywords: dict
):
    """Keys and values of all requests of a step of continuous batching, whose mask says which belong together.

    Args:
        keywords: of the call; the paged cache is taken out, for the host's own attention not to write to it again.

    Since Transformers 5.24 the ordinary caches have the name `cache` too. Decoders take them before they call the
    interface. Encoders that pass on all keywords hand down what the user gave them, which the original ignores.
    """
    if isinstance(keywords["cache"], Cache):
        return key, value
    if mask is None:
        raise ValueError(
            f"{type(module).__name__} was called with a paged cache and no mask, which would let requests see each "
            "other; call model.generate_batch, or generate()"
        )
    cache, states = (
        keywords.pop("cache"),
        dict(key_states=key, value_states=value, layer_idx=module.layer_idx),
    )
    if "kwargs" in inspect.signature(cache.update).parameters:
        return cache.update(**states, kwargs=keywords)
    # Transformers 5.17: tokens come first, and layers of several kinds get all their masks
    if isinstance(mask, dict):
        raise ValueError(
            f"{type(module).__name__} is one of layers of several kinds, which this Transformers gives no mask of "
            "their own in continuous batching; allowed: generate(), or Transformers 5.23"
        )
    places = {name: keywords.pop(name) for name in ("read_index", "write_index")}
    return tuple(t.transpose(0, 1)[None] for t in cache.update(**states, **places))


def refuse_keywords(module: nn.Module, mask: Tensor | None, keywords: dict) -> None:
    """Raise for keywords that would be lost although they change the result."""
    for name in keywords.keys() & REFUSED_KEYWORDS.keys():
        if keywords[name] is not None:
            raise ValueError(
                f"{type(module).__name__} was called with {name}=..., which hf_hyperattn cannot honour; "
                f"{REFUSED_KEYWORDS[name]}"
            )
    if mask is None and keywords.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"{type(module).__name__} was called with cu_seq_lens_q and no mask, which would let packed "
            "sequences see each other; pass position_ids and use_cache=False instead"
        )


def note_masks(model: PreTrainedModel) -> None:
    """Remember of a model that has no SDPA that its masks must be those of eager attention."""
    if not model._supports_sdpa:
        MASK_SAYS_ALL.add(type(model.config))


def note_all(model: nn.Module) -> None:
    """`note_masks` for a model that was built before this package was imported, and for its parts."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            note_masks(part)


def first_key(
    module: nn.Module, mask: Tensor | None, window: int | None, queries: int, keys: int
) -> FirstKey:
    """Where the keys of a call begin, by its mask; unknown where a mask of another make comes with a sliding window."""
    known, compiling = attached_to(mask, KnownOfMask), torch.compiler.is_compiling()
    if known is not None and known.is_ours:
        return known.first
    window = window or getattr(module, "sliding_window", None)
    unclear = (
        isinstance(window, int)
        and queries < keys
        and keys >= window
        and (mask is not None or compiling)
    )
    return FirstKey(None if unclear else 0)


def chunk_size_of(module: nn.Module) -> int | None:
    """Return the tokens of a chunk if the layer attends within chunks, as some layers of Llama 4 do; else None."""
    config = getattr(module, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    if size is None:
        return None
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if not (isinstance(types, list | tuple) and isinstance(index, int) and index < len(types)):
        return size
    return size if types[index] == "chunked_attention" else None


def scaling_already_applied(module: nn.Module, scale: float) -> float:
    """What the query has been multiplied with before the call, 1.0 for most families.

    Whisper, OPT and their kin scale the query themselves and then pass scaling=1.0, while `module.scaling` keeps the
    factor. Families without any scaling (T5) have 1.0 there too.
    """
    factor = getattr(module, "scaling", None)
    if scale != 1.0 or not isinstance(factor, float) or factor <= 0:
        return 1.0
    return factor**2 if type(module).__name__ in SCALED_QUERY_AND_KEY else factor
