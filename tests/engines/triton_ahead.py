"""Compiles the kernels that a call would launch, for chips that are not there."""

import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from hf_hyperattn.engines import DistanceTerm, Options
from hf_hyperattn.engines.score import parse_score_key
from hf_hyperattn.engines.serialize import OperatorCall
from hf_hyperattn.engines.triton import launch


@dataclass(frozen=True)
class Built:
    """A kernel for a chip: bytes of shared memory of a program; a thread's registers, and its bytes outside them."""

    kernel: str
    capability: int
    config: tuple
    shared: int
    registers: int
    spilled: int
    ptx: str


def call(
    spec,
    d=64,
    dv=None,
    dtype=torch.bfloat16,
    heads=4,
    kv_heads=2,
    length=2048,
    queries=None,
    **options,
):
    """A call on tensors that are never read; `options` are those of `Options`, and the extra "seed"."""
    queries, new = (
        queries or length,
        lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype),
    )
    terms = parse_score_key(spec)
    measures = any(isinstance(term, DistanceTerm) for term, *_ in terms)
    factored = measures and "on_product" not in spec
    count = lambda kind: sum(getattr(term, kind) for term, *_ in terms)
    gates = sum(gated for _, gated, _ in terms)
    extras = {
        name: options.pop(name) for name in ("mask", "bias", "sinks", "seed") if name in options
    }
    if factored:
        extras |= {"query_factor": new(1, heads, queries), "key_factor": new(1, kv_heads, length)}
    return launch.TritonCall(
        OperatorCall(
            query=new(1, heads, queries, d, dtype=dtype),
            key=new(1, kv_heads, length, d, dtype=dtype),
            value=new(1, kv_heads, length, dv or d, dtype=dtype),
            row=[new(1, heads, queries) for _ in range(count("rows"))],
            column=[new(1, kv_heads, length) for _ in range(count("columns"))],
            head=[new(heads) for _ in range(count("heads") + gates)],
            extras=extras,
            terms=terms,
            score_key=spec,
            width=d - ("umbral" in spec and factored),
            scale=1.0 if factored else d**-0.5,
            options=Options(**{"is_causal": True, **options}),
        )
    )


@contextmanager
def compiling(monkeypatch, capabilities, every=True):
    """Within, launched kernels are compiled and collected in the list this gives, not run; all their configs, or the
    first of each.
    """
    built = []

    def build(kernel, *args, grid, warmup, **named):
        for capability in capabilities:
            built.append(compiled(kernel, capability, args, named))

    def tuned(kind, tried, run):
        for config in tried if every else tried[:1]:
            run(config)

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", build)
        patch.setattr(launch, "run_tuned", tuned)
        yield built


def compiled(kernel, capability, args, named):
    """As `JITFunction.run` does it for the chip that is there."""
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    named = named | {"debug": False, "instrumentation_mode": ""}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **named)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, named, bound, specialization, options
    )
    made = triton.compile(
        ASTSource(kernel, signature, constexprs, attrs), target=target, options=options.__dict__
    )
    config = tuple(named.get(name) for name in ("BM", "BN", "num_warps", "num_stages"))
    numbers = made.metadata.shared, *usage(made.asm["cubin"])
    return Built(kernel.__name__, capability, config, *numbers, made.asm["ptx"])


def usage(cubin):
    """Registers of a thread, and the bytes that it keeps outside them."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return tuple(int(re.search(rf"{what}:(\d+)", said)[1]) for what in ("REG", "STACK"))


def backward(made):
    """Launch the backward kernels of a call, with gradients of everything."""
    shape = made.query.shape[:3]
    out = torch.empty(*shape, made.dv)
    launch.backward(
        made, torch.empty_like(out), out, torch.empty(2, *shape), needs_all(made.operator_call)
    )


def needs_all(call):
    """That all of an operator's tensors want a gradient."""
    numbers = {name: [True] * len(getattr(call, name)) for name in ("row", "column", "head")}
    return replace(call, **numbers, extras=dict.fromkeys(call.extras, True))
