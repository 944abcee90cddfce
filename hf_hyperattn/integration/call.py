"""Rarer parts of reading the call that Transformers makes of an attention function (hyper.py does the rest)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.utils import output_capturing

from ..engines import check_backend
from .families import RETURNING_WEIGHTS
from .hosts import find_hosts

#: Where a host keeps the engine that `set_backend` chose.
BACKEND = "_hyperattn_backend"

#: Keywords that change the mathematics and that no engine honours, with what to do instead.
REFUSED_KEYWORDS = {
    "head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "layer_head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "cache": "paged caches (continuous batching) work with attn_implementation='sdpa' only; use generate()",
    "alibi": "pass it as position_bias",
    "attention_bias": "pass it as position_bias",
    "attn_bias": "pass it as position_bias",
}

UNHONOURED = frozenset([*REFUSED_KEYWORDS, "cu_seq_lens_q"])


def set_backend(model: nn.Module, backend: str) -> nn.Module:
    """Let an engine compute all attention of a model that mechanisms take part in, patched or by name.

    It is a setting of the running model: copies of the model have it, checkpoints do not. Calls that no mechanism
    changes are the host's own. Arguments of single calls (`output_attentions`) that an engine cannot serve are errors.

    Args:
        model: any model, patched now, later or not at all; its modules are set.
        backend: a name out of `hf_hyperattn.engines.available_engines()`; "auto" takes the setting back.

    Returns:
        The model.

    Raises:
        ValueError: there is no such engine.
    """
    check_backend(backend)
    for _, host in find_hosts(model):
        host.__dict__.pop(BACKEND, None)
        if backend != "auto":
            host.__dict__[BACKEND] = backend
    return model


def onnx_error(module: nn.Module) -> ValueError:
    """The error of a call that `torch.onnx.export` records."""
    return ValueError(
        f"{type(module).__name__} has an attention of hf_hyperattn, which ONNX cannot hold; use torch.export, or "
        "unpatch_model(model) or set_attn_implementation('sdpa') to export the model without it"
    )


def heads_of_rank(module: nn.Module, heads: int) -> tuple[int, int] | None:
    """`HostCall.heads`, told from a projection that tensor parallelism has cut by rows; None where none is."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    for child in module.children():
        weight = getattr(child, "weight", None)
        if isinstance(weight, DTensor) and weight.placements == (Shard(0),):
            mesh = weight.device_mesh
            return heads * mesh.size(), heads * mesh.get_local_rank()
    return None


def within_indices(mask: Tensor | None, indices: Tensor | None, keys: int) -> Tensor | None:
    """The mask that leaves only the keys an indexer chose: DeepSeek's sparse attention and its kin.

    Under names other than "eager" and "sdpa" these families pass `indices` [B, N, top_k] beside the mask, which they
    otherwise fold in themselves.
    """
    if indices is None:
        return mask
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


@torch.compiler.assume_constant_result  # the compiler says no where ONNX is what it traces for
def exporting_to_onnx() -> bool:
    """Whether `torch.onnx.export` is running."""
    return torch.onnx.is_in_onnx_export()


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


def wants_weights(module: nn.Module, keywords: dict) -> bool:
    """Whether somebody will read the attention weights of this call.

    Some families pass `output_attentions` down; for the others Transformers collects them with hooks and keeps what
    it collects in a context variable.
    """
    if keywords.get("output_attentions") or type(module).__name__.startswith(RETURNING_WEIGHTS):
        return True
    collector = getattr(output_capturing, "_active_collector", None)
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        return False  # the model's own forward does not collect, and the compiler cannot read a context variable
    collected = collector.get() if collector is not None else None
    return any(key.endswith("attentions") for key in collected or ())
