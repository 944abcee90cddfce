"""The gradient of a causal model's loss with respect to the output of every attention, one layer at a time.

Layers are checkpointed, so that never more than one layer's activations are held, and the loss is taken in pieces, so
that a large vocabulary does not fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ..integration.checkpoint_config import inner, patched_hosts
from ..integration.patching import base_model
from ..mechanisms.base import HostCall
from .hsa_certificate import evaluating

#: Called with a host's name, its call, what its attention gave [B, H, N, dv], and the gradient of that.
Listener = Callable[[str, HostCall, Tensor, Tensor], None]
PIECE = 512  # tokens whose logits are formed at a time
FUNCTION = "_gradient_checkpointing_func"


def listen_to_gradients(model: nn.Module, ids: Tensor, listener: Listener, last: int | None = None) -> float:
    """Run a patched model forward and backward on one text, and hand every host's gradient to `listener`.

    Args:
        model: a patched causal model, with all gates at 0 for gradients of the model as it was.
        ids: token ids [N].
        listener: called once a host, the last layer first.
        last: only so many tokens at the end are predicted and have queries; the others are read into a cache first,
            which is much cheaper for long texts. None: all.

    Returns:
        The loss a token: the negative log-likelihood of the text, in nats.
    """
    base = base_model(model)
    head = head_of(base, ids)
    with ExitStack() as stack:
        stack.enter_context(frozen(base))
        if last is None or last >= len(ids):
            cache, read = None, 0
            stack.enter_context(checkpointed(base))
        else:
            cache, read = prefix_cache(base, ids[:-last]), len(ids) - last
        stack.enter_context(heard(base, listener))
        hidden = final_hidden(base, ids[read:], cache)
        loss, slope = loss_and_slope(head, hidden, ids[read:])
        hidden.backward(slope)
    return loss


def final_hidden(model: nn.Module, ids: Tensor, cache=None) -> Tensor:
    """What the model's head reads, [N, e]."""
    found = model.base_model(ids[None], past_key_values=cache, use_cache=cache is not None)
    return found.last_hidden_state[0]


def prefix_cache(model: nn.Module, ids: Tensor) -> DynamicCache:
    """A cache that has read `ids` [N]."""
    cache = DynamicCache(config=model.config)
    with evaluating(model):
        model.base_model(ids[None], past_key_values=cache, use_cache=True)
    return cache


def head_of(model: nn.Module, ids: Tensor) -> Callable[[Tensor], Tensor]:
    """Final hidden states to logits: the output embedding, which some families scale or cap.

    Raises:
        ValueError: the model has a head of another kind.
    """
    embedding, some = model.get_output_embeddings(), ids[:8]
    with torch.no_grad():
        logits = model(some[None], use_cache=False).logits[0]
        own = embedding(final_hidden(model, some))
    ratio = (logits.float() @ own.float().mT).trace() / (own.float() ** 2).sum()
    if not torch.allclose(logits.float(), ratio * own.float(), atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than to scale its output embedding; allowed: causal "
            "language models without a softcap on their logits"
        )
    return lambda hidden: embedding(hidden) * ratio.to(hidden.dtype)


def loss_and_slope(
    head: Callable[[Tensor], Tensor], hidden: Tensor, ids: Tensor, slope: bool = True
) -> tuple[float, Tensor | None]:
    """The loss a token, and where wanted the gradient of its sum over tokens by the final hidden states."""
    leaf, total = hidden.detach().requires_grad_(True), 0.0
    for start in range(0, len(ids) - 1, PIECE):
        stop = min(start + PIECE, len(ids) - 1)
        logits = head(leaf[start:stop]).float()
        loss = F.cross_entropy(logits, ids[start + 1 : stop + 1], reduction="sum")
        if slope:
            loss.backward()
        total += loss.item()
    return total / (len(ids) - 1), leaf.grad


@contextmanager
def heard(model: nn.Module, listener: Listener) -> Iterator[None]:
    """Hooks on every patched host, for as long as the block runs."""

    def hook_for(name: str):
        def hook(_, arguments, keywords, output):
            call, _, stock = arguments
            out = stock() if output is None else output[0]  # None: the host's own attention is what counts
            if out.requires_grad:
                out.register_hook(lambda gradient: listener(name, call, out.detach(), gradient))
            return out, None if output is None else output[1]

        return hook

    handles = [
        inner(host.hyper).register_forward_hook(hook_for(name), with_kwargs=True)
        for name, host in patched_hosts(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter wants a gradient, and what the embedding gives does."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    handle = model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_())
    try:
        with torch.enable_grad():
            yield
    finally:
        handle.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, but for the layers themselves, which recompute what is inside them where the family can."""
    modes = {module: module.training for module in model.modules()}
    layers = [module for module in modes if isinstance(module, GradientCheckpointingLayer)]
    before = [(layer, layer.gradient_checkpointing, vars(layer).get(FUNCTION)) for layer in layers]
    model.eval()
    for layer in layers:
        layer.training = True  # of the layer alone: the dropout inside stays off
        layer.gradient_checkpointing = True
        setattr(layer, FUNCTION, partial(checkpoint, use_reentrant=True))
    try:
        yield
    finally:
        for layer, on, function in before:
            layer.gradient_checkpointing = on
            delattr(layer, FUNCTION) if function is None else setattr(layer, FUNCTION, function)
        for module, mode in modes.items():
            module.training = mode
