"""The gradient of a causal model's loss with respect to the output of every attention, one layer at a time.

Layers are checkpointed, so that never more than one layer's activations are held, and the loss is taken in pieces, so
that a large vocabulary does not fill the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..analysis.cost import patched_layers
from ..analysis.perplexity import evaluation_mode
from ..integration.patching import base_model
from ..mechanisms.base import HostCall

#: Called with a host's name, its call, the output of its attention [B, H, N, dv], and the gradient of that.
OnGradient = Callable[[str, HostCall, Tensor, Tensor], None]
#: (start, stop) of tokens, in order.
Spans = Sequence[tuple[int, int]]
Head = Callable[[Tensor], Tensor]
#: Of the head and the final hidden states [N, e]: the loss a token that counts, and by these the gradient of its sum.
Loss = Callable[[Head, Tensor], tuple[float, Tensor | None]]
PIECE = 512  # tokens whose logits are formed at a time
FUNCTION = "_gradient_checkpointing_func"


def attention_gradients(
    model: nn.Module, ids: Tensor, on_gradient: OnGradient, loss: Loss
) -> float:
    """Run a patched model forward and backward on one text, and pass every layer's gradient to `on_gradient`.

    Args:
        model: a patched causal model, with all gates at 0 for gradients of the model as it was.
        ids: token ids [N].
        on_gradient: called once a layer, the last one first.
        loss: such as `loss_of` or `divergence`.

    Returns:
        The loss.
    """
    base = base_model(model)
    head = head_of(base, ids)
    with frozen(base), checkpointed(base), attention_hooks(base, on_gradient):
        hidden = final_hidden(base, ids)
        value, gradient = loss(head, hidden)
        hidden.backward(gradient)
    return value


def final_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the model's head reads, [N, e]."""
    return model.base_model(to_model(ids, model)[None], use_cache=False).last_hidden_state[0]


def to_model(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """The ids where the model takes them; offloaded models fetch them."""
    return ids if model.device.type == "meta" else ids.to(model.device)


def head_of(model: PreTrainedModel, ids: Tensor) -> Head:
    """Final hidden states to logits: the output embedding, which some families scale.

    Raises:
        ValueError: the model has a head of another kind.
    """
    embedding: Any = model.get_output_embeddings()
    some = ids[:8]
    with torch.no_grad():
        logits = model(to_model(some, model)[None], use_cache=False).logits[0].float()
        plain = embedding(final_hidden(model, some)).float()
    ratio = (logits @ plain.mT).trace() / (plain**2).sum()
    if not torch.allclose(logits, ratio * plain, atol=1e-3, rtol=1e-3):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than to scale its output embedding; allowed: causal "
            "language models without a softcap on their logits"
        )
    return lambda hidden: embedding(hidden) * ratio.to(hidden.dtype)


def loss_of(
    head: Head, hidden: Tensor, ids: Tensor, gradient: bool = True, spans: Spans | None = None
) -> tuple[float, Tensor | None]:
    """The loss a token that counts, and the gradient of the sum by the final hidden states; None without `gradient`."""
    leaf, total, counted = (
        hidden.detach().requires_grad_(gradient),
        0.0,
        predicted_of(spans, len(ids)),
    )
    for piece in counted.split(PIECE):
        logits = head(leaf[piece.to(leaf.device)]).float()
        loss = F.cross_entropy(logits, ids.cpu()[piece + 1].to(logits.device), reduction="sum")
        if gradient:
            loss.backward()
        total += loss.item()
    return total / len(counted), leaf.grad


def divergence(
    head: Head, hidden: Tensor, teacher: Tensor, gradient: bool = True, spans: Spans | None = None
) -> tuple[float, Tensor | None]:
    """KL(teacher ‖ student) in nats a token that counts, and the gradient of its sum by what the student's head reads.

    Args:
        hidden, teacher: final hidden states [N, e].
        spans: (start, stop) of the tokens whose prediction counts; None: all N predictions, also that after the text.
    """
    leaf, total = hidden.detach().requires_grad_(gradient), 0.0
    counted = torch.arange(len(leaf)) if spans is None else predicted_of(spans, len(leaf))
    for piece in counted.to(leaf.device).split(PIECE):
        with torch.no_grad():
            own = head(teacher[piece]).float().log_softmax(-1)
        student = head(leaf[piece]).float().log_softmax(-1)
        loss = F.kl_div(student, own, reduction="sum", log_target=True)
        if gradient:
            loss.backward()
        total += loss.item()
    return total / len(counted), leaf.grad


def predicted_of(spans: Spans | None, length: int) -> Tensor:
    """The queries whose next token counts."""
    spans = ((1, length),) if spans is None else spans
    return torch.cat([torch.arange(max(start, 1) - 1, stop - 1) for start, stop in spans])


@contextmanager
def attention_hooks(model: nn.Module, on_gradient: OnGradient) -> Iterator[None]:
    """Hooks on every patched host, for as long as the block runs."""

    def hook(_, arguments, output, name: str):
        call, _, stock = arguments
        out = (
            stock() if output is None else output[0]
        )  # None: the host's own attention is what counts
        if out.requires_grad:
            plain = (
                out.detach()
            )  # a hook that refers to its own tensor is never freed, nor is the layer's call
            out.register_hook(lambda gradient: on_gradient(name, call, plain, gradient))
        return out, None if output is None else output[1]

    with ExitStack() as handles:
        for name, hyper in patched_layers(model):
            handles.enter_context(hyper.register_forward_hook(partial(hook, name=name)))
        yield


@contextmanager
def frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter gets a gradient, and the output of the embedding does."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    ask = lambda _, __, out: out.requires_grad_()
    with model.get_input_embeddings().register_forward_hook(ask), torch.enable_grad():
        for name in trained:
            model.get_parameter(name).requires_grad_(False)
        try:
            yield
        finally:
            for name in trained:  # by name: offload puts new ones in their place
                model.get_parameter(name).requires_grad_(True)


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, but for the layers themselves, which recompute what is inside them where the family can."""
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    before = [(layer, layer.gradient_checkpointing, vars(layer).get(FUNCTION)) for layer in layers]
    with evaluation_mode(model):
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
