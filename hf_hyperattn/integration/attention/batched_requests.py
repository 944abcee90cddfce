"""Continuous batching: the requests of one step, each computed as if it ran alone.

A step of `generate_batch` or `transformers serve --continuous-batching` puts the new tokens of all
requests into one row. Transformers says where each request's queries and keys lie in this row.
Here a call of an attention layer is cut at these places. A mechanism then sees one whole text at a
time, with the position of every token, and no mask of all pairs is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...mechanisms.base import HostCall
from ...mechanisms.selection.places import FirstKey, KnownOfMask
from ...utils.attached import attach, attached_to

#: Keywords of a step that describe the row of all requests. They are wrong for a single request.
OF_ROW = frozenset(
    (
        "block_table",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "position_ids",
        "read_index",
        "write_index",
    )
)


#: Attribute of a paged cache: the ids of the requests of the running step.
IDS_OF_STEP = "_hyperattn_ids_of_step"
#: Attribute of a paged cache: a `RequestState` for each request, by its id.
STATES = "_hyperattn_states"


class RequestState:
    """What mechanisms remember of one request, as attributes.

    It stands for the cache of a conversation, which keeps this state otherwise.
    """


@dataclass(eq=False)
class BatchedRequest:
    """Where one request lies in the row of a step.

    Args:
        queries, keys: Its part of the queries and of the keys.
        window: Sliding window of the attention layer; None: none.
        first: Where its keys begin in its text, and the facts that all layers share.
        mask: Bool [1, 1, N, M] if position and `first` do not say what its queries see; else None.
    """

    queries: slice
    keys: slice
    window: int | None
    first: FirstKey
    mask: Tensor | None = None
    #: The mask that attention functions of Transformers need, once it was made.
    stock_mask: Tensor | None = field(default=None, init=False)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


@dataclass(eq=False)
class Step:
    """The requests of one step, for the layers that cache alike.

    Args:
        about: The window, and the versions of the tensors that it was read from.
        requests: All requests with queries, in the order of the row.
    """

    about: tuple
    requests: list[BatchedRequest]


def read_step(module: Any, keywords: dict, device: torch.device) -> Step:
    """Return the requests of a call; they are read once for all layers of a kind.

    Args:
        module: The attention layer.
        keywords: Of the call, before the paged cache changes them.
        device: Of the queries.
    """
    window = find_window(module, keywords)
    query_ends, key_ends = keywords["cu_seq_lens_q"], keywords["cu_seq_lens_k"]
    if isinstance(key_ends, dict):
        # Some versions of Transformers pass the ends for every kind of layer.
        kind = "full_attention" if window is None else "sliding_attention"
        key_ends = key_ends[kind]
    ids = keywords.get("position_ids")
    about = window, *(read_version(t) for t in (query_ends, key_ends, ids))
    step = attached_to(key_ends, Step)
    if step is None or step.about != about:
        requests = list_requests(query_ends, key_ends, ids, window, device)
        step = Step(about, requests)
        attach(key_ends, step)
    return step


def read_version(tensor: Tensor | None) -> int | None:
    """Return the version of a tensor, which counts its changes; None if it has none."""
    return None if tensor is None or tensor.is_inference() else tensor._version


def find_window(module: Any, keywords: dict) -> int | None:
    """Return the sliding window of a layer in continuous batching; None without one.

    Some families do not pass it. Then the config tells, as the paged cache reads it.
    """
    window = keywords.get("sliding_window")
    if window is not None:
        return int(window)
    config = getattr(module, "config", None)
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is not None and types is not None:
        window = window if types[module.layer_idx] == "sliding_attention" else None
    return window


def list_requests(
    query_ends: Tensor,
    key_ends: Tensor,
    position_ids: Tensor | None,
    window: int | None,
    device: torch.device,
) -> list[BatchedRequest]:
    """Return the requests of a step.

    Args:
        query_ends, key_ends: int32 [requests + 1], from 0: the end of each request in the row.
        position_ids: [1, N], the place of each query in its text; None: unknown.
        window: Sliding window of the layers; None: none.
        device: Of the masks.
    """
    query_places, key_places = query_ends.tolist(), key_ends.tolist()
    ids = None
    if window is not None and position_ids is not None and position_ids.dim() == 2:
        ids = position_ids[0].tolist()
    requests = []
    spans = zip(query_places, query_places[1:], key_places, key_places[1:], strict=False)
    for first_query, stop_query, first_key, stop_key in spans:
        n, m = stop_query - first_query, stop_key - first_key
        if not n:
            # Steps of fixed sizes are filled up with empty requests.
            continue
        dropped = count_dropped(n, m, window, None if ids is None else ids[first_query])
        mask = None
        if window is not None and (dropped != 0 or m > window):
            mask = make_mask(n, m, window, device)
            # As if the model had made it: nothing is padding, and all keys are there.
            first = FirstKey(dropped, stop=m)
            attach(mask, KnownOfMask(mask, first, is_ours=dropped is not None))
        else:
            first = FirstKey(readings={})
        request = BatchedRequest(
            queries=slice(first_query, stop_query),
            keys=slice(first_key, stop_key),
            window=window,
            first=first,
            mask=mask,
        )
        requests.append(request)
    return requests


def count_dropped(
    queries: int, keys: int, window: int | None, first_place: int | None
) -> int | None:
    """Return how many tokens of a request's text stand before its keys; None if unknown.

    Args:
        queries, keys: Sizes of the request in this step.
        window: Sliding window of the layer, which drops older tokens; None: none.
        first_place: Place of the first query in the text; None: unknown.
    """
    before = keys - queries
    if window is None:
        return 0
    if first_place is not None:
        return first_place - before
    # Until the window is full, the cache keeps all tokens.
    return 0 if before < window - 1 else None


def make_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [1, 1, N, M]: which of its keys each query of one request sees.

    Args:
        queries, keys: Sizes of the request; its queries are its newest tokens.
        window: Sliding window of the layer; None: none.
        device: Of the mask.
    """
    key = torch.arange(keys, device=device)
    own = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = key <= own
    if window is not None:
        seen = seen & (key > own - window)
    return seen[None, None]


def keywords_of_request(keywords: dict) -> dict:
    """Return the keywords of a step that hold for every request by itself.

    A model makes the position bias for a whole row, and families with one have no paged cache.

    Raises:
        ValueError: A keyword is made for the row of all requests.
    """
    if keywords.get("position_bias") is not None:
        raise ValueError(
            "continuous batching was given position_bias=..., which is made for the row of all requests; allowed: "
            "generate()"
        )
    kept = {name: value for name, value in keywords.items() if name not in OF_ROW}
    # Transformers says False with masks. A decoder's requests are causal with and without one.
    return kept | {"is_causal": True}


def split_call(call: HostCall, step: Step) -> Iterator[tuple[BatchedRequest, HostCall]]:
    """Yield each request with its part of a call.

    Args:
        call: The call of the attention layer, for the row of all requests.
        step: Its requests.
    """
    states = list_states(call.cache, step)
    for request, state in zip(step.requests, states, strict=True):
        n, m = request.sizes
        by_position = request.mask is None and n > 1
        options = replace(
            call.options,
            mask=request.mask,
            is_causal=by_position,
            window=None,
            offset=m - n if by_position else 0,
        )
        yield (
            request,
            replace(
                call,
                query=call.query[:, :, request.queries],
                key=call.key[:, :, request.keys],
                value=call.value[:, :, request.keys],
                is_causal=True,
                options=options,
                first=request.first,
                hidden=None if call.hidden is None else call.hidden[:, request.queries],
                cache=state,
            ),
        )


def find_states(cache: Any) -> dict[str, RequestState]:
    """Return what is remembered of each request of a paged cache."""
    return cache.__dict__.setdefault(STATES, {})


def list_states(cache: Any, step: Step) -> list[RequestState | None]:
    """Return the state of each request of a step.

    Args:
        cache: The paged cache; None: no mechanism remembers anything.
        step: The requests.
    """
    ids = getattr(cache, IDS_OF_STEP, None)
    if ids is None:
        return [None] * len(step.requests)
    states = find_states(cache)
    return [states.setdefault(ids[i], RequestState()) for i in range(len(step.requests))]


def find_stock_mask(request: BatchedRequest, device: torch.device) -> Tensor | None:
    """Return the mask of a request for an attention function of Transformers.

    Without a mask, these functions show the last query all keys, and align several queries with the
    first keys.
    """
    n, m = request.sizes
    if request.mask is not None or n in (1, m):
        return request.mask
    if request.stock_mask is None:
        request.stock_mask = make_mask(n, m, request.window, device)
    return request.stock_mask


def join_outputs(query: Tensor, step: Step, outputs: list[Tensor]) -> Tensor:
    """Return the output of the row, [1, N, H, dv].

    Args:
        query: [1, H, N, d], of the row.
        step: Its requests.
        outputs: Of each request, [1, n, H, dv].
    """
    stop = step.requests[-1].queries.stop if step.requests else 0
    rest = query.shape[2] - stop
    if rest:
        # Steps of fixed sizes have queries that belong to no request.
        width = outputs[0].shape[3] if outputs else query.shape[3]
        outputs = [*outputs, query.new_zeros(1, rest, query.shape[1], width)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
