"""Gradient of a causal model's loss with respect to the output of every attention layer.

Layers are checkpointed: the input of every layer is kept, [N, e] in the model's dtype, but the
activations of one layer only. Logits and losses are computed in float32, in pieces of tokens, also
if the model is in bfloat16 or float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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
from ..integration.parallel.offloaded import in_memory
from ..integration.patching.patch import base_model
from ..mechanisms.base import HostCall

#: Called with a layer's name, its call, the output of its attention [B, H, N, dv], and the
#: gradient of the loss with respect to this output.
OnGradient = Callable[[str, HostCall, Tensor, Tensor], None]
#: (start, stop) of token ranges, in order.
Spans = Sequence[tuple[int, int]]
#: Number of tokens whose logits are computed at a time, and the bytes that these logits may take.
PIECE, PIECE_BYTES = 512, 2**26
#: Attribute in which Transformers keeps a layer's checkpointing function.
FUNCTION = "_gradient_checkpointing_func"


@dataclass(frozen=True)
class Head:
    """Maps final hidden states [R, e] to float32 logits [R, V].

    Args:
        embedding: The model's output embedding.
        ratio: Factor of the logits. Some families scale them.
        dtype: dtype of the model's hidden states.
    """

    embedding: Any
    ratio: float
    dtype: torch.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        weight = self.embedding.weight
        if weight.dtype not in (torch.bfloat16, torch.float16):
            return self.embedding(hidden.to(self.dtype)).float() * self.ratio
        # Rounded logits would hide small changes. The float32 copy of the weights lives as long as
        # the logits of one piece.
        with in_memory([self.embedding]):
            weight, bias = self.embedding.weight, getattr(self.embedding, "bias", None)
            bias = None if bias is None else bias.float()
            return F.linear(hidden.to(weight.device).float(), weight.float(), bias) * self.ratio

    @property
    def piece(self) -> int:
        """Return the number of tokens whose logits are computed at a time."""
        return min(PIECE, max(1, PIECE_BYTES // (4 * self.embedding.weight.shape[0])))


#: Called with the head and the final hidden states [N, e]. Returns the mean loss per counted token,
#: and the gradient of the summed loss with respect to the hidden states.
Loss = Callable[[Head, Tensor], tuple[float, Tensor | None]]


def attention_gradients(
    model: nn.Module, ids: Tensor, on_gradient: OnGradient, loss: Loss
) -> float:
    """Run a patched model forward and backward on one text and report each layer's gradient.

    Args:
        model: A patched causal model. With all gates at 0, it computes the original
            attention, and the gradients belong to the original model.
        ids: Token ids [N].
        on_gradient: Called once per layer, the last layer first.
        loss: A function such as `loss_of` or `compute_divergence`.

    Returns:
        The mean loss per counted token.
    """
    base = base_model(model)
    head = head_of(base, ids)
    with freeze_parameters(base), checkpoint_layers(base), attention_hooks(base, on_gradient):
        hidden = final_hidden(base, ids)
        value, gradient = loss(head, hidden)
        # The head is not part of this graph: `loss` already went back through it, piece by piece.
        hidden.backward(gradient)
    return value


def final_hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the final hidden states [N, e], the input of the output embedding."""
    return model.base_model(to_model(ids, model)[None], use_cache=False).last_hidden_state[0]


def to_model(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """Move token ids to the device of the model.

    Offloaded models have hooks that move inputs themselves.
    """
    return ids if model.device.type == "meta" else ids.to(model.device)


def head_of(model: PreTrainedModel, ids: Tensor) -> Head:
    """Return the function from final hidden states to logits.

    It is the output embedding times a constant, because some families scale their logits. The
    constant is found by comparing both on the first tokens of a text.

    Raises:
        ValueError: The logits are not a multiple of the output embedding's result.
    """
    embedding: Any = model.get_output_embeddings()
    some = ids[:8]
    with torch.no_grad():
        logits = model(to_model(some, model)[None], use_cache=False).logits[0]
        hidden = final_hidden(model, some)
        plain = embedding(hidden).float()
    # Both were rounded to the model's dtype.
    rounding = max(1e-3, torch.finfo(logits.dtype).eps)
    logits = logits.float()
    # Least squares: the ratio that minimises |logits - ratio · plain|².
    ratio = ((logits @ plain.mT).trace() / (plain**2).sum()).item()
    if not torch.allclose(logits, ratio * plain, atol=1e-3, rtol=rounding):
        raise ValueError(
            f"{type(model).__name__} does more to its logits than to scale its output embedding; "
            "allowed: causal language models without a softcap on their logits"
        )
    return Head(embedding=embedding, ratio=ratio, dtype=hidden.dtype)


def loss_of(
    head: Head, hidden: Tensor, ids: Tensor, gradient: bool = True, spans: Spans | None = None
) -> tuple[float, Tensor | None]:
    """Compute the cross-entropy of the next tokens, and its gradient.

    Args:
        head: Maps hidden states to logits.
        hidden: Final hidden states [N, e].
        ids: Token ids [N].
        gradient: Whether to compute the gradient.
        spans: Ranges of the tokens whose prediction counts. None: all tokens but the first.

    Returns:
        The mean loss per counted token, and the gradient of the sum with respect to `hidden`, or
        None without `gradient`.
    """
    targets = ids.cpu()

    def compute_loss(logits: Tensor, piece: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets[piece + 1].to(logits.device), reduction="sum")

    return sum_pieces(head, hidden, predicted_of(spans, len(ids)), compute_loss, gradient)


def compute_divergence(
    head: Head, hidden: Tensor, teacher: Tensor, gradient: bool = True, spans: Spans | None = None
) -> tuple[float, Tensor | None]:
    """Compute KL(teacher ‖ student) of the next-token distributions, and its gradient.

    Args:
        head: Maps hidden states to logits, for both models.
        hidden: Final hidden states [N, e] of the student.
        teacher: Final hidden states [N, e] of the teacher.
        gradient: Whether to compute the gradient.
        spans: Ranges of the tokens whose prediction counts. None: all N predictions, including
            the one after the last token, which needs no target.

    Returns:
        The mean in nats per counted token, and the gradient of the sum with respect to `hidden`,
        or None without `gradient`.
    """
    counted = torch.arange(len(hidden)) if spans is None else predicted_of(spans, len(hidden))

    def compute_loss(logits: Tensor, piece: Tensor) -> Tensor:
        with torch.no_grad():
            target = head(teacher[piece]).log_softmax(-1)
        student = logits.log_softmax(-1)
        return F.kl_div(student, target, reduction="sum", log_target=True)

    return sum_pieces(head, hidden, counted, compute_loss, gradient)


def sum_pieces(
    head: Head,
    hidden: Tensor,
    counted: Tensor,
    compute_loss: Callable[[Tensor, Tensor], Tensor],
    gradient: bool,
) -> tuple[float, Tensor | None]:
    """Sum a loss over tokens, piece by piece, so that only one piece's logits are in memory.

    Args:
        head: Maps hidden states to logits.
        hidden: Final hidden states [N, e].
        counted: Positions of the counted tokens, [R].
        compute_loss: Called with logits [piece, V] and their positions; returns their summed loss.
        gradient: Whether to compute the gradient.

    Returns:
        The mean loss per counted token, and the gradient of the sum with respect to `hidden`, or
        None.
    """
    hidden = hidden.detach()
    gradients = torch.zeros_like(hidden) if gradient else None
    total = 0.0
    for piece in counted.split(head.piece):
        part = hidden[piece].float().requires_grad_(gradient)
        loss = compute_loss(head(part), piece)
        if gradients is not None:
            gradients[piece] = torch.autograd.grad(loss, part)[0].to(gradients.dtype)
        total += loss.item()
    return total / len(counted), gradients


def predicted_of(spans: Spans | None, length: int) -> Tensor:
    """Return the positions whose next token counts, int64. None: all positions but the last."""
    spans = ((1, length),) if spans is None else spans
    # The token at position t is predicted at position t - 1; the first token is never predicted.
    return torch.cat([torch.arange(max(start, 1) - 1, stop - 1) for start, stop in spans])


def in_float32(call: HostCall) -> HostCall:
    """Return a call with float32 queries, keys and values, without their graph."""
    tensors = {name: getattr(call, name).detach().float() for name in ("query", "key", "value")}
    return replace(call, **tensors)


@contextmanager
def attention_hooks(model: nn.Module, on_gradient: OnGradient) -> Iterator[None]:
    """Call `on_gradient` for every patched attention layer while the block runs."""

    def watch_output(_, arguments, output, name: str):
        call, _, stock = arguments
        # None means that the layer leaves the work to its own attention. That output counts then,
        # and it must pass through this hook to get a gradient.
        out = stock() if output is None else output[0]
        if out.requires_grad:
            # A hook that refers to its own tensor is never freed, and neither is the layer's call.
            plain = out.detach()
            out.register_hook(lambda gradient: on_gradient(name, call, plain, gradient))
        return out, None if output is None else output[1]

    with ExitStack() as handles:
        for name, hyper in patched_layers(model):
            hook = partial(watch_output, name=name)
            handles.enter_context(hyper.register_forward_hook(hook))
        yield


@contextmanager
def freeze_parameters(model: PreTrainedModel) -> Iterator[None]:
    """Compute gradients of activations only, not of parameters, while the block runs."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    # Without trainable parameters, autograd records nothing unless the embeddings ask for it.
    hook = model.get_input_embeddings().register_forward_hook(require_gradient)
    with hook, torch.enable_grad():
        for name in trained:
            model.get_parameter(name).requires_grad_(False)
        try:
            yield
        finally:
            # Look parameters up by name: offloading replaces the parameter objects.
            for name in trained:
                model.get_parameter(name).requires_grad_(True)


def require_gradient(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    """Forward hook that makes a module's output require a gradient."""
    return output.requires_grad_()


@contextmanager
def checkpoint_layers(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, but recompute each layer's activations on the way back.

    Families without `GradientCheckpointingLayer` keep all their activations.
    """
    layers: list[Any] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    before = [(layer, layer.gradient_checkpointing, vars(layer).get(FUNCTION)) for layer in layers]
    with evaluation_mode(model):
        for layer in layers:
            # Transformers checkpoints only in training mode. Set it for this module only, not for
            # its children, so that dropout stays off.
            layer.training = True
            layer.gradient_checkpointing = True
            setattr(layer, FUNCTION, partial(checkpoint, use_reentrant=True))
        try:
            yield
        finally:
            for layer, enabled, function in before:
                layer.gradient_checkpointing = enabled
                if function is None:
                    delattr(layer, FUNCTION)
                else:
                    setattr(layer, FUNCTION, function)
