"""From the call that Transformers makes of an attention function to a `HostCall`, by the call contract.

Facts of the contract: keys and values come unrepeated; the `is_causal` keyword wins over the module's; a mask, where
there is one, says everything about visibility; without one a causal call of more than one query is top-left causal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.utils import output_capturing

from ..engines import Options, repeat_heads
from ..mechanisms.base import HostCall
from .families import first_key, is_causal_host, position_hides, reads_weights, scaling_already_applied
from .hidden import hidden_states_of_call
from .hierarchy_context import hierarchy_of_call

#: Keywords that change the mathematics and that no engine honours, with what to do instead.
REFUSED_KEYWORDS = {
    "head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "layer_head_mask": "Transformers 5 has no head masks; patch with heads=...",
    "cache": "paged caches (continuous batching) work with attn_implementation='sdpa' only; use generate()",
    "alibi": "pass it as position_bias",
    "attention_bias": "pass it as position_bias",
    "attn_bias": "pass it as position_bias",
}


def host_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **keywords,
) -> HostCall:
    """The call in our terms; what cannot be honoured raises a ValueError that names it.

    Args:
        query: [B, H, N, d], key and value: [B, Hkv, M, d] and [B, Hkv, M, dv], rotated and from the cache.
        attention_mask: None, bool, or additive, broadcastable to [B, H, N, M]; longer ones are cut to M as eager does.
        scaling: what the family multiplies q·k with; None means 1/sqrt(d).
        s_aux, sinks: one extra logit per head. `position_bias`: [1, H, N, M], added to the logits.
    """
    refuse_keywords(module, attention_mask, keywords)
    if exporting_to_onnx():
        raise ValueError(
            f"{type(module).__name__} has an attention of hf_hyperattn, which ONNX cannot hold; use torch.export, or "
            "unpatch_model(model) or set_attn_implementation('sdpa') to export the model without it"
        )
    keywords["hierarchy"] = hierarchy_of_call(module, keywords)
    first = first_key(module, attention_mask, sliding_window, query.shape[2], key.shape[2])
    attention_mask = within_indices(attention_mask, keywords.get("indices"), key.shape[2])
    causal = is_causal_host(module) if is_causal is None else bool(is_causal)
    hidden = causal and position_hides(module)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    applied = scaling_already_applied(module, scale)
    extra = s_aux if s_aux is not None else sinks
    if attention_mask is not None and attention_mask.shape[-1] > key.shape[-2]:
        attention_mask = attention_mask[..., : key.shape[-2]]
    options = Options(
        mask=attention_mask,
        bias=position_bias,
        softcap=softcap,
        dropout_p=float(dropout or 0.0),
        sinks=None if extra is None else extra.reshape(-1),
        **visibility(attention_mask, hidden, sliding_window, query.shape[2], key.shape[2]),
    )
    query = query if applied == 1.0 else query / applied
    if key.shape[1] != value.shape[1]:  # Nemotron 3's encoders share keys among more heads than values
        heads = max(key.shape[1], value.shape[1])
        key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    hidden_states = hidden_states_of_call(module, query.shape[2])
    heads = heads_of_rank(module, query.shape[1])
    return HostCall(
        query, key, value, scale * applied, causal, options, keywords, first, hidden_states, heads
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


def visibility(mask: Tensor | None, causal: bool, window: int | None, queries: int, keys: int) -> dict:
    """`is_causal`, `window` and `offset` for the engine: a mask says everything, no mask leaves it to position."""
    if mask is not None:
        return {}
    if queries == 1:  # one new token: it is the last one, and sees all that the cache holds
        return {"window": window, "offset": keys - 1} if window and causal else {}
    return {"is_causal": causal, "window": window or None}


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


def module_output(out: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What Transformers expects back: [B, N, H, dv] contiguous, and weights or None."""
    return out.transpose(1, 2).contiguous(), weights


def wants_weights(module: nn.Module, keywords: dict) -> bool:
    """Whether somebody will read the attention weights of this call.

    Some families pass `output_attentions` down; for the others Transformers collects them with hooks and keeps what
    it collects in a context variable.
    """
    if keywords.get("output_attentions") or reads_weights(module):
        return True
    collector = getattr(output_capturing, "_active_collector", None)
    if torch.compiler.is_compiling() and not getattr(collector, "compiling", False):
        return (
            False  # the model's own forward does not collect, and the compiler cannot read a context variable
        )
    collected = collector.get() if collector is not None else None
    return any(key.endswith("attentions") for key in collected or ())
