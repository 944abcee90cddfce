"""The base class of layers that change the attention score: cone, hyperbolic, HyPE and `@ha.score`.

Read `ScoreLayer.forward` to see how a score is blended with the model's own or replaces it, per
head, and when a layer that changes nothing is skipped. Read `PointSpace.score` to see how the numbers
of cone and hyperbolic attention reach the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..engines import Options, attention
from ..engines.score import (
    READERS,
    TERMS,
    Numbers,
    PairScore,
    Points,
    ScoreTerm,
    VectorReader,
    dot_score,
    upcast_for_grad,
)
from ..utils.readable import can_read
from ..utils.torch_private import is_wrapped
from .base import Host, HostCall, MechanismLayer, Plan

#: A starting value.
Start = TypeVar("Start", bound=Tensor | float)


def attend_in_space(
    space: Any, query: Tensor, key: Tensor, value: Tensor, options: Options, backend: str
) -> Tensor:
    """Compute attention with the score of a space, for a function's call.

    Args:
        space: Object with a method `score`, see `ScoreLayer`.
        query: Queries [B, H, N, d].
        key: Keys [B, Hkv, M, d].
        value: Values [B, Hkv, M, dv].
        options: Masks and the rest.
        backend: "auto", or the name of an engine.

    Returns:
        Outputs [B, H, N, dv] in the query's dtype.
    """
    # Gradients of half-precision inputs are summed in float32, and rounded once.
    score = space.score(upcast_for_grad(query), upcast_for_grad(key))
    out, _ = attention(score, value, options, backend=backend)
    return out.to(query.dtype)


class ScoreLayer(MechanismLayer):
    """A mechanism's score S_m inside an attention layer with the score S.

    Blend computes S + g·S_m, with g = 0 at the start. Replace computes S_m.

    Parameters, each [H] and 0 at the start: `gate` g (blend only), and one `log_<name>` for each
    name in `learned`. The current number is the config's value · exp(log_<name>).

    Subclasses set a function `space(*numbers)`. Each number is a tensor [H], or the config's number
    if the layer has no parameters. The result has a method
    `score(query, key, scale=None, gate=None, capped=False)`, which returns a `PairScore` of one
    term. With `scale`, the term reads the attention layer's product, scale · q·k. Without, it reads
    a product of its own features.
    """

    honours_heads = True
    mixes_heads = False
    mixes_queries = False

    #: Numbers of the config that each query head learns.
    learned: tuple[str, ...] = ()
    #: Parameters that are all zero when the layer changes nothing.
    gates: tuple[str, ...] = ("gate",)
    #: Whether `make_space(call, dtype)` is called instead of `space`, for a score that reads more
    #: of the call than vectors.
    reads_call = False

    space: Callable
    make_space: Callable
    gate: nn.Parameter | None

    def __init__(
        self, config, host: Host | None, mode: str = "replace", heads: tuple[int, ...] | None = None
    ):
        super().__init__(config, host, mode, heads)
        for name in self.gates:
            setattr(self, name, self.per_head(host) if mode == "blend" else None)
        for name in self.learned:
            setattr(self, f"log_{name}", self.per_head(host))

    def forward(self, plan: Plan) -> Plan:
        gate, call = self.gate, plan.call
        # Skip a layer whose gates are all zero, but not while a graph is recorded: it runs again
        # later, when they may be different.
        if gate is not None and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
            # The usual parameter is recognised without the slower `can_read`, because this runs in
            # every decoding step. For the same reason one gate needs no `identical`.
            plain = type(gate) is nn.Parameter and not gate.is_meta and not is_wrapped(gate)
            # A gate of 0 still has a gradient, so a layer that trains is not skipped.
            quiet = not torch.is_grad_enabled() or not self.needs_gradient()
            if (
                quiet
                and (plain or can_read(gate))
                and not gate.any()
                and (len(self.gates) == 1 or self.identical())
            ):
                return plan
        query, key, score = call.query, call.key, plan.score
        dtype = torch.float64 if torch.float64 in (query.dtype, key.dtype) else torch.float32
        # Gradients of half-precision vectors are summed in float32 first, see `upcast_for_grad`.
        if torch.is_grad_enabled() and dtype not in (query.dtype, key.dtype):
            query, key = upcast_for_grad(query), upcast_for_grad(key)
            # Make the plain dot product again from these vectors. An engine computes one product
            # for all terms, so all must read the same tensors, where their gradients are added.
            if (
                len(score.terms) == 1
                and score.raw_query is call.query
                and score.raw_key is call.key
            ):
                score = dot_score(query, key, call.scale)
        # `read_numbers` and `compute_number`, written out to save a call in every decoding step.
        numbers = []
        for name in self.learned:
            start, log = getattr(self.config, name), getattr(self, f"log_{name}")
            numbers.append(start if log is None else start * torch.exp(log.to(dtype)))
        space = self.make_space(call, dtype) if self.reads_call else self.space(*numbers)
        # Replace in all heads: the score stands alone and may use its own features.
        if gate is None and self.heads is None:
            return replace(plan, score=space.score(query, key))
        whole = gate is not None and self.heads is None
        weight = gate.to(dtype) if whole else self.gate_heads(gate, call, dtype)  # type: ignore[union-attr]
        assert weight is not None
        # A term that replaces the model's own in some heads gets its softcap there.
        added = space.score(query, key, call.scale, weight, self.mode == "replace")
        if self.mode == "replace":
            score = score.weighted(1 - weight)
        return replace(plan, score=replace(score, terms=(*score.terms, *added.terms)))

    def gate_heads(self, gate: Tensor | None, call: HostCall, dtype: torch.dtype) -> Tensor | None:
        """Return the weight of the mechanism in each head, 0 in heads that are not patched.

        Args:
            gate: Gate of each head [H]; None: 1.
            call: Call of the attention layer.
            dtype: Dtype of the result.

        Returns:
            [H], or None if the weight is 1 everywhere.
        """
        mask = self.head_mask(call)
        if gate is None:
            weight = mask
        else:
            weight = gate if mask is None else gate * mask
        return None if weight is None else weight.to(dtype)

    def read_numbers(self, dtype: torch.dtype) -> list[Tensor | float]:
        """Return the current values of the learned numbers.

        Args:
            dtype: Dtype of the tensors.

        Returns:
            A tensor [H] each, or the config's number if the layer has no parameters.
        """
        return [self.compute_number(n, getattr(self.config, n), dtype) for n in self.learned]

    def compute_number(self, name: str, start: Start, dtype: torch.dtype) -> Start | Tensor:
        """Return the current value of a learned number, its start times exp(log).

        Args:
            name: Name of the number.
            start: Its starting value.
            dtype: Dtype of the tensor.
        """
        log = getattr(self, f"log_{name}")
        return start if log is None else start * torch.exp(log.to(dtype))

    def make_start(self, start: tuple[float, ...], call: HostCall, dtype: torch.dtype) -> Tensor:
        """Return starting values as a tensor for the heads of a call.

        Args:
            start: One number, or one per query head of the attention layer.
            call: Call of the attention layer.
            dtype: Dtype of the tensor.
        """
        values = torch.tensor(start, dtype=dtype, device=call.query.device)
        # The config counts all heads. Learned parameters are sliced for the rank already.
        return call.slice_rank(values) if len(start) > 1 else values

    def needs_gradient(self) -> bool:
        """Return whether any parameter requires a gradient."""
        return any(p.requires_grad for p in self.parameters())

    def identical(self) -> bool:
        gates = (getattr(self, name) for name in self.gates)
        return self.mode == "blend" and not any(bool(g.any()) for g in gates if g is not None)


@dataclass(eq=False)
class PointVectors:
    """Queries and keys as points, for one call. Subclasses compute what engines read.

    Args:
        query: Queries [B, H, N, d], unscaled.
        key: Keys [B, Hkv, M, d], unscaled.
        space: Settings and parameters of the score.
        scale: As in `PointSpace.score`.
    """

    query: Tensor
    key: Tensor
    space: Any
    scale: float | None

    #: As in `ScoreTerm`.
    linear_features: ClassVar[Any] = None

    def compute_statistics(self) -> Numbers:
        """Return the numbers that the term reads besides the product."""
        raise NotImplementedError

    def compute_features(self) -> tuple[Tensor, Tensor]:
        """Return the points, [B, H, N, p] and [B, Hkv, M, p], in the working dtype."""
        raise NotImplementedError

    def compute_logits(self) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        return self.space.compute_logits(self.query, self.key)

    def make_points(self) -> Points:
        """Return the points between which distances are measured."""
        return Points(*self.compute_features())


class PointSpace:
    """Base of the settings and parameters of a score that reads the distances of points.

    A point is a vector times a factor.
    """

    #: Class of the queries and keys of one call.
    vectors: ClassVar[type[PointVectors]]
    #: Fields that are parameters of the definition, which layers learn.
    learned: ClassVar[tuple[str, ...]]

    @property
    def term(self) -> str:
        """Name of the term that reads the product of points.

        The term with the suffix "_on_product" reads the product of the attention layer's vectors.
        """
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[Tensor | float, ...]:
        """Values of `learned`: numbers, or tensors [H] or [1]."""
        return tuple(getattr(self, name) for name in self.learned)

    def make_reader(self, dim: int) -> VectorReader:
        """Return the reader of the term's statistics, for vectors of `dim` numbers."""
        raise NotImplementedError

    def get_scale(self, dim: int) -> float:
        """Return the factor of vectors of `dim` numbers before they become points. Default: 1."""
        return 1.0

    def compute_logits(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the dense logits [B, H, N, M] from the definition."""
        raise NotImplementedError

    def read_parameters(self, dtype: torch.dtype, device: Any) -> list[Tensor]:
        """Return the parameters as tensors, all [H] or all [1]."""
        tensors = [
            x.to(dtype=dtype, device=device).reshape(-1)
            if isinstance(x, Tensor)
            else torch.full((1,), x, dtype=dtype, device=device)
            for x in self.parameters
        ]
        return list(torch.broadcast_tensors(*tensors))

    def score(
        self,
        query: Tensor,
        key: Tensor,
        scale: float | None = None,
        gate: Tensor | None = None,
        capped: bool = False,
    ) -> PairScore:
        """Return the score of queries and keys.

        Args:
            query: Queries [B, H, N, d], unscaled.
            key: Keys [B, Hkv, M, d], unscaled.
            scale: If given, the score reads the layer's product scale · q·k. None (default): it
                reads the product of the points.
            gate, capped: As in `ScoreTerm`.
        """
        dim = query.shape[-1]
        vectors = self.vectors(query=query, key=key, space=self, scale=scale)
        reader = self.make_reader(dim)
        term = ScoreTerm(
            term=TERMS[self.term if scale is None else f"{self.term}_on_product"],
            definition=vectors.compute_logits,
            gate=gate,
            statistics=vectors.compute_statistics,
            capped=capped,
            linear_features=vectors.linear_features,
            reader=reader,
            points=vectors.make_points,
        )
        if scale is not None:
            return PairScore(raw_query=query, raw_key=key, terms=(term,), scale=scale)
        left_out = READERS[reader.name].left_out
        return PairScore(
            raw_query=query,
            raw_key=key,
            terms=(term,),
            scale=self.get_scale(dim),
            width=dim - left_out if left_out else None,
            make_features=vectors.compute_features,
        )
