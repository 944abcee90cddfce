"""Run mechanisms under context parallelism, in which each rank has some tokens of every row.

This is torch's `context_parallel`, which Accelerate uses for `cp_size`. Keys and values of all ranks
are gathered, and put into the order of the text.

- The queries of a rank are one or two runs of neighbouring tokens. A run is computed like a part of
  a prompt: its keys are all tokens up to its last one.
- If a query's output depends on other queries, or queries see later tokens, then queries are
  gathered, too. Every rank computes all of them and keeps its own.
- Gradients are summed over the ranks in the backward pass.

What the tokens of a rank alone cannot tell raises an error, on all ranks alike: masks beyond
padding, biases by position, caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...engines.options import Options, position_mask
from ...mechanisms.base import HostCall, MechanismLayer
from ...mechanisms.selection.cache import LayerCache
from ...mechanisms.selection.places import START, FirstKey
from ...utils.attached import attached_to
from ...utils.torch_private import (
    PLAIN_ATTENTION,
    find_backward_pass,
    find_context_mesh,
    find_token_order,
)
from .tensor_parallel import gather_parts

#: Attribute that is set on attention layers whose last call in training was under context
#: parallelism.
SHARED_TOKENS = "_hyperattn_shared_tokens"


def find_context(module: nn.Module) -> Any:
    """Return the ranks that share the tokens of a call, torch's device mesh; None if none do.

    Args:
        module: The attention layer.

    Raises:
        RuntimeError: The layer is computed again in the backward pass, outside the context.
    """
    if nn.functional.scaled_dot_product_attention is PLAIN_ATTENTION:
        if SHARED_TOKENS in module.__dict__:
            leave_context(module)
        return None
    return enter_context(module)


@torch.compiler.disable(reason="ranks exchange keys of a call under context parallelism")
def enter_context(module: nn.Module) -> Any:
    """Return the active device mesh, and note a call in training."""
    mesh = find_context_mesh()
    if mesh is not None and torch.is_grad_enabled():
        module.__dict__[SHARED_TOKENS] = True
    return mesh


@torch.compiler.disable(reason="a layer leaves context parallelism")
def leave_context(module: nn.Module) -> None:
    """Forget the last call under context parallelism, unless the layer is computed again for it."""
    # Within a backward pass torch has a graph task: a checkpoint runs the layer again.
    if find_backward_pass() != -1:
        raise RuntimeError(
            f"{type(module).__name__} is computed again in the backward pass, outside the context_parallel block of "
            "its forward; allowed: loss.backward() inside the block"
        )
    del module.__dict__[SHARED_TOKENS]


def forget_context(model: nn.Module) -> None:
    """Remove the notes of `enter_context` from a model."""
    for module in model.modules():
        module.__dict__.pop(SHARED_TOKENS, None)


@dataclass(frozen=True)
class Run:
    """A run of neighbouring tokens in a rank's part of the rows.

    Args:
        first: Its first token in the rank's part.
        start: The same token, counted in the text.
        count: Number of tokens.
    """

    first: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """One past its last token in the text."""
        return self.start + self.count


class SharedRows:
    """Rows whose tokens are shared by ranks.

    Args:
        mesh: torch's device mesh of the ranks.
        count: Number of tokens of this rank, the same on all.
        device: Of the tokens.

    Attributes:
        length: Number of tokens of a row on all ranks.
        runs: The runs of this rank.
    """

    def __init__(self, mesh: Any, count: int, device: torch.device):
        self.mesh = mesh
        self.length = count * mesh.size()
        order = find_token_order(self.length, mesh.size(), device)
        #: Where each token of the text stands in gathered rows; None: at its own place.
        self.places = None if order is None else order.argsort()
        part = slice(count * mesh.get_local_rank(), count * (mesh.get_local_rank() + 1))
        self.own = torch.arange(self.length, device=device)[part] if order is None else order[part]
        self.runs = find_runs(self.own.tolist())

    def gather(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the tensor of all ranks, in the order of the text.

        Args:
            tensor: The rank's part.
            axis: The axis of the tokens.
        """
        whole = gather_parts(tensor, axis, self.mesh)
        return whole if self.places is None else whole.index_select(axis, self.places)


def find_runs(tokens: list[int]) -> list[Run]:
    """Return the runs of neighbours in a list of tokens."""
    breaks = [i for i in range(1, len(tokens)) if tokens[i] != tokens[i - 1] + 1]
    edges = [0, *breaks, len(tokens)]
    return [
        Run(first=first, start=tokens[first], count=last - first)
        for first, last in zip(edges, edges[1:], strict=False)
    ]


@torch.compiler.disable(reason="ranks exchange keys of a call under context parallelism")
def attend_shared(
    compute: Callable[[HostCall], Tensor],
    layers: nn.Module | None,
    module: nn.Module,
    call: HostCall,
    mesh: Any,
    weights: bool,
) -> Tensor:
    """Return the output [B, H, N, dv] of the rank's queries.

    Args:
        compute: Returns the output of a call.
        layers: The module with the mechanisms' layers; None without mechanisms.
        module: The attention layer.
        call: Its call, with the tokens of this rank.
        mesh: torch's device mesh of the ranks.
        weights: Whether attention weights are wanted, which is an error.

    Raises:
        ValueError: The rank's tokens alone cannot tell what the call computes.
    """
    name = type(module).__name__
    check_shared_call(name, call, weights)
    rows = SharedRows(mesh, call.query.shape[2], call.query.device)
    real = read_real_tokens(name, call, rows)
    call = replace(
        call,
        key=rows.gather(call.key, 2),
        value=rows.gather(call.value, 2),
        # The ids have been checked, and are those of a part of the tokens.
        keywords={**call.keywords, "position_ids": None},
        cache=None,
    )
    if call.is_causal and not mixes_queries(layers):
        return torch.cat([compute(take_run(call, run, real)) for run in rows.runs], 2)
    hidden = call.hidden
    whole = replace(
        call,
        query=rows.gather(call.query, 2),
        hidden=None if hidden is None else rows.gather(hidden, hidden.dim() - 2),
    )
    everything = Run(first=0, start=0, count=rows.length)
    return compute(take_run(whole, everything, real)).index_select(2, rows.own)


def mixes_queries(layers: nn.Module | None) -> bool:
    """Return whether a mechanism's layer, of any adapter, reads other queries for a query."""
    parts = () if layers is None else layers.modules()
    return any(part.mixes_queries for part in parts if isinstance(part, MechanismLayer))


def take_run(call: HostCall, run: Run, real: Tensor | None) -> HostCall:
    """Return the call of a run's queries, with the keys that they may see.

    Args:
        call: The call, with the keys of all ranks.
        run: The run.
        real: bool [B, M], the tokens that are no padding; None if all are.
    """
    stop = run.stop if call.is_causal else call.key.shape[2]
    tokens = slice(run.first, run.first + run.count)
    by_position = Options(is_causal=call.is_causal, window=find_window(call), offset=run.start)
    mask = None
    if real is not None:
        # As everywhere, a mask says everything that is hidden.
        mask = real[:, None, None, :stop]
        shown = position_mask(by_position, (0, run.count), (0, stop), real.device)
        mask = mask if shown is None else mask & shown
        by_position = Options()
    options = replace(
        call.options,
        mask=mask,
        is_causal=by_position.is_causal,
        window=by_position.window,
        offset=by_position.offset,
    )
    return replace(
        call,
        query=call.query[:, :, tokens],
        key=call.key[:, :, :stop],
        value=call.value[:, :, :stop],
        hidden=None if call.hidden is None else call.hidden[..., tokens, :],
        options=options,
        first=START if real is None else FirstKey(attention_mask=real, stop=stop),
    )


def find_window(call: HostCall) -> int | None:
    """Return the sliding window of the attention layer; None without one."""
    return call.keywords.get("sliding_window") or None


def check_shared_call(name: str, call: HostCall, weights: bool) -> None:
    """Raise if a call has something that holds for the tokens of one rank only.

    Args:
        name: Name of the attention layer, for the error.
        call: The call of this rank.
        weights: Whether attention weights are wanted.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    length = find_hierarchy_length(call)
    has_cache = attached_to(call.key, LayerCache) is not None
    other_model = "models without it, or FSDP2 or tensor parallelism"
    prompt = "training steps and prompts in one call"
    refused = (
        (
            queries != keys,
            f"{keys} keys for {queries} queries (cached, or of another text)",
            prompt,
        ),
        (has_cache, "a HierarchicalCache", "another cache, or use_cache=False"),
        (weights, "output_attentions", "calls without it"),
        (call.options.bias is not None, "a bias by position (ALiBi, T5)", other_model),
        (call.keywords.get("indices") is not None, "an indexer that chooses keys", other_model),
        (call.chunk is not None, "attention within chunks", other_model),
        (
            length is not None and length <= queries,
            f"a hierarchy of {length} tokens",
            "the hierarchy of the whole text, which is no buffer of context_parallel",
        ),
    )
    for is_there, what, allowed in refused:
        if is_there:
            raise ValueError(
                f"{name} was called within context parallelism (context_parallel, cp_size) with {what}, which a rank "
                f"with some of the tokens cannot use; allowed: {allowed}"
            )


def find_hierarchy_length(call: HostCall) -> int | None:
    """Return the number of tokens of the call's hierarchy; None without one."""
    hierarchy = call.keywords.get("hierarchy")
    if hierarchy is None:
        return None
    return hierarchy.shape[1] if isinstance(hierarchy, Tensor) else hierarchy.length


def read_real_tokens(name: str, call: HostCall, rows: SharedRows) -> Tensor | None:
    """Return bool [B, M], the tokens of all ranks that are no padding; None if all are.

    Args:
        name: Name of the attention layer, for errors.
        call: The call of this rank.
        rows: Its rows.

    Raises:
        ValueError: A rank's mask hides more than padding and later tokens, or position ids do not
            count the tokens of the whole text. All ranks raise.
    """
    batch, _, count, _ = call.query.shape
    real = call.read_mask().places.real
    ids = call.keywords.get("position_ids")
    # Ids with several axes (M-RoPE) count images in their own way.
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != count:
        ids = None
    # Ranks exchange these three once, so that all of them find the same errors.
    facts = torch.zeros(3, batch, count, dtype=torch.int64, device=call.query.device)
    facts[0] = 1 if real is None else real
    facts[1] = 0 if ids is None else ids
    facts[2] = hides_more(call, rows.runs)
    whole, position, hidden = rows.gather(facts, 2)
    whole = whole.bool()
    if bool(hidden.any()):
        raise ValueError(
            f"{name} was called within context parallelism (context_parallel, cp_size) with a mask that hides more "
            "than padding, later tokens and a sliding window; allowed: one text a row, and a 2D attention_mask among "
            "the buffers of context_parallel, or none"
        )
    if ids is not None and not counts_tokens(position, whole):
        raise ValueError(
            f"{name} was called within context parallelism (context_parallel, cp_size) with position_ids that do not "
            "count the tokens of the whole text; allowed: position_ids=torch.arange(length)[None] among the buffers of "
            "context_parallel, and one text a row"
        )
    return None if bool(whole.all()) else whole


def hides_more(call: HostCall, runs: list[Run]) -> bool:
    """Return whether a rank's mask hides more than padding, later tokens and a sliding window."""
    window, mask = find_window(call), call.options.mask
    if not call.is_causal:
        only_padding = mask is None or call.read_mask().real_if_only_padding is not None
        return window is not None or not only_padding
    if mask is None:
        # Families with eager attention only show everything without a mask.
        return not call.options.is_causal and call.query.shape[2] > 1
    reading = call.read_mask()
    # Transformers takes the runs of a rank for packed texts, if it gets no 2D mask.
    return not any(reading.shows_by_place(window, piece) for piece in (None, runs[0].count))


def counts_tokens(position: Tensor, real: Tensor) -> bool:
    """Return whether positions grow by one from each real token to the next.

    Args:
        position: int64 [B, M].
        real: bool [B, M].
    """
    # Padding before the text may be counted or not, so that only real tokens matter.
    shift = position - real.cumsum(1)
    largest = torch.iinfo(shift.dtype).max
    lowest = shift.masked_fill(~real, largest).amin(1)
    highest = shift.masked_fill(~real, -largest).amax(1)
    return bool((highest <= lowest).all())
