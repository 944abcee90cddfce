"""Rare parts of an attention call: engine setting, refused keywords, ONNX, paged caches, chunks.

`call_path.py` reads the common parts of a call and uses these functions for single families and
unusual calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ...engines import check_backend
from ...mechanisms.selection.places import FirstKey, KnownOfMask
from ...utils.attached import attached_to
from ...utils.readable import is_exporting
from .hosts import find_hosts

#: Attribute of an attention layer with the engine that `set_backend` chose.
BACKEND = "_hyperattn_backend"

#: Keywords that change the result but that no engine honours, each with its replacement.
REFUSED_KEYWORDS = {
    "head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "layer_head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "alibi": "pass it as position_bias",
    "attention_bias": "pass it as position_bias",
    "attn_bias": "pass it as position_bias",
}

#: Keywords that make `refuse_keywords` look closer. Packed sequences (`cu_seq_lens_q`) are fine
#: with a mask.
UNHONOURED = frozenset([*REFUSED_KEYWORDS, "cu_seq_lens_q"])

#: Attention classes that multiply both query and key by `module.scaling`. `scaling_already_applied`
#: recognises the families that multiply only the query.
SCALED_QUERY_AND_KEY = ("OpenAIPrivacyFilterAttention",)

#: Config classes of models that only have eager attention. They need an additive mask that contains
#: causality.
MASK_SAYS_ALL: set[type] = set()

#: By model type, the function that raises if our names cannot reach the model's attention. Filled
#: by names.py.
UNROUTED: dict[str, Callable] = {}


def set_backend(model: nn.Module, backend: str) -> nn.Module:
    """Compute all attention of a model that uses mechanisms on one engine.

    The setting belongs to the model in memory: copies keep it, checkpoints do not. Calls that no
        mechanism changes still run the original attention. If the engine cannot serve an argument
        of a call (`output_attentions`), that call raises.

    Args:
        model: Any model, patched now or later. Every attention layer stores the setting.
        backend: A name from `hf_hyperattn.engines.available_engines()`. "auto" removes the setting.

    Returns:
        The model.

    Raises:
        ValueError: The engine does not exist, or no attention layer was found. Families that are
            rerouted when patched have attention layers only after the patch.
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
    """Raise if `torch.onnx.export` cannot express the call in plain operators."""
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


# Inside a traced graph torch's function would return False, so it is called outside and its result
# kept as a constant.
@torch.compiler.assume_constant_result
def exporting_to_onnx() -> bool:
    """Return whether `torch.onnx.export` is running."""
    return torch.onnx.is_in_onnx_export()


def update_paged(module: nn.Module, key: Tensor, value: Tensor, keywords: dict):
    """Write to the paged cache of continuous batching, and return its keys and values.

    The returned tensors hold the keys of all requests in the step.

    Since Transformers 5.24 the ordinary caches have the keyword `cache` too. Decoders use them, and
    the paged one, before they call the attention interface. Encoders that pass on all keywords hand
    down the user's argument, which the original attention ignores; it is ignored here too.

    Args:
        keywords: Keywords of the call. The paged cache is removed, so that the original attention
            does not write to it again.

    Raises:
        ValueError: The call has a paged cache, and does not say which tokens belong to one request.
    """
    if isinstance(keywords["cache"], Cache):
        return key, value
    if keywords.get("read_index") is None:
        raise ValueError(
            f"{type(module).__name__} was called with a paged cache outside of continuous batching, which would let "
            "requests see each other; call model.generate_batch, or generate()"
        )
    cache = keywords.pop("cache")
    states = dict(key_states=key, value_states=value, layer_idx=module.layer_idx)
    if "kwargs" in inspect.signature(cache.update).parameters:
        return cache.update(**states, kwargs=keywords)
    # Transformers 5.17 has tokens as the first axis.
    indices = {name: keywords[name] for name in ("read_index", "write_index")}
    updated = cache.update(**states, **indices)
    return tuple(t.transpose(0, 1)[None] for t in updated)


def refuse_keywords(module: nn.Module, mask: Tensor | None, keywords: dict) -> None:
    """Raise if a keyword changes the result and no engine honours it."""
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
    """Note that a model without SDPA needs the masks of eager attention."""
    if not model._supports_sdpa:
        MASK_SAYS_ALL.add(type(model.config))


def note_all(model: nn.Module) -> None:
    """Call `note_masks` for a model that existed before this package was imported, and its parts."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            note_masks(part)


def first_key(
    module: nn.Module, mask: Tensor | None, window: int | None, queries: int, keys: int
) -> FirstKey:
    """Return where the keys of a call begin in the text, as noted on the mask.

    For third-party masks with a sliding window the start is unknown.
    """
    known = attached_to(mask, KnownOfMask)
    compiling = torch.compiler.is_compiling()
    if known is not None and known.is_ours:
        return known.first
    window = window or getattr(module, "sliding_window", None)
    # The cache of a sliding window drops old keys. Once it is full, the number of dropped keys
    # cannot be seen here.
    unclear = (
        isinstance(window, int)
        and queries < keys
        and keys >= window
        and (mask is not None or compiling)
    )
    return FirstKey(None if unclear else 0)


def chunk_size_of(module: nn.Module) -> int | None:
    """Return the chunk size if the layer attends within chunks, else None.

    Some layers of Llama 4 attend within chunks. `config.layer_types` says which.
    """
    config = getattr(module, "config", None)
    size = getattr(config, "attention_chunk_size", None)
    if size is None:
        return None
    types = getattr(config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if not (isinstance(types, list | tuple) and isinstance(index, int) and index < len(types)):
        # Without a list of types, every layer attends within chunks.
        return size
    return size if types[index] == "chunked_attention" else None


def scaling_already_applied(module: nn.Module, scale: float) -> float:
    """Return the factor that the query was multiplied by before the call; 1.0 for most families.

    Whisper, OPT and similar families scale the query themselves and then pass scaling=1.0, while
    `module.scaling` keeps the factor. Families without scaling (T5) have `module.scaling` = 1.0 as
    well.
    """
    factor = getattr(module, "scaling", None)
    if scale != 1.0 or not isinstance(factor, float) or factor <= 0:
        return 1.0
    return factor**2 if type(module).__name__ in SCALED_QUERY_AND_KEY else factor
