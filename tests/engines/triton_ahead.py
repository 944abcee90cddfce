"""Compiles the kernels that a call would launch, for chips that are not there."""

import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.language import target_info
from triton.runtime.jit import JITFunction, create_function_from_signature

from hf_hyperattn.engines import DistanceTerm, Options
from hf_hyperattn.engines.score import parse_score_key
from hf_hyperattn.engines.selected import SUMMARIES, HeadRule, flatten_rules, shapes_of_choice
from hf_hyperattn.engines.serialize import OperatorCall
from hf_hyperattn.engines.triton import launch, selected

#: Kinds of machine instructions, by how their names begin.
KINDS = {
    "special functions": ("MUFU",),
    "products": ("HGMMA", "HMMA", "WGMMA"),
    "float": ("FFMA", "FMUL", "FADD", "FMNMX", "FSETP", "FSEL", "FSET", "F2F"),
    "memory": (
        "LD",
        "ST",
        "UTMA",
        "UBLK",
        "SHFL",
        "BAR",
        "SYNCS",
        "WARPGROUP",
        "DEPBAR",
        "WARPSYNC",
    ),
}


@dataclass(frozen=True)
class Built:
    """A kernel that was compiled for a chip.

    Args:
        kernel: The name of the Triton function.
        capability: Of the chip, 80 or 90, or the name of AMD's.
        config: Rows and columns of a tile, warps, stages.
        shared: Bytes of shared memory of a program.
        registers: Of a thread.
        spilled: Bytes that a thread keeps outside its registers (stack).
        ptx: What Triton wrote; for AMD's chips their assembly.
        loops: The machine instructions of each innermost loop, in order.
        careful: Whether it runs for near pairs alone.
    """

    kernel: str
    capability: int
    config: tuple
    shared: int
    registers: int
    spilled: int
    ptx: str
    loops: tuple[tuple[str, ...], ...]
    careful: bool

    @property
    def main_loop(self) -> tuple[str, ...]:
        """The loop over the tiles of which everything is seen, the first long one; the loop with edges follows."""
        return next((loop for loop in self.loops if len(loop) > SHORT_LOOP), ())

    def per_pair(self, count: int) -> float:
        """Return a number of instructions of the main loop as a number for each pair and thread."""
        rows, columns, warps, _ = self.config
        return count * 32 * warps / (rows * columns)

    def kinds(self) -> dict[str, float]:
        """Return the instructions of the main loop for each pair, by kind."""
        counts = dict.fromkeys((*KINDS, "other"), 0)
        for name in self.main_loop:
            kind = next((k for k, begin in KINDS.items() if name.startswith(begin)), "other")
            counts[kind] += 1
        return {kind: self.per_pair(count) for kind, count in counts.items()}

    @property
    def warps_that_fit(self) -> int:
        """How many warps run on a multiprocessor at once, by registers and by shared memory."""
        warps = self.config[2]
        registers = -(-self.registers // 8) * 8 * 32  # of a warp; given out in units of 256
        programs = min(REGISTERS // (registers * warps), MOST_WARPS // warps)
        if self.shared:
            programs = min(programs, SHARED[self.capability] // (self.shared + 1024))
        return programs * warps


#: Shorter loops are those over single numbers.
SHORT_LOOP = 100
#: Of a multiprocessor: registers, warps, and bytes of shared memory.
REGISTERS, MOST_WARPS, SHARED = 65536, 64, {80: 164 * 1024, 90: 228 * 1024}


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
def compiling(monkeypatch, capabilities, every=True, careful=True):
    """Within, launched kernels are compiled and collected in the list this gives, not run; all their configs, or the
    first of each; with or without the second run for near pairs.
    """
    built = []

    def build(kernel, *args, grid, warmup, **named):
        if named.get("CAREFUL") and not careful:
            return
        for capability in capabilities:
            built.append(compiled(kernel, capability, args, named))

    def tuned(kind, tried, run):
        for config in tried if every else tried[:1]:
            run(config)

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", build)
        patch.setattr(launch, "run_tuned", tuned)
        yield built


def target_of(chip):
    """The target of a chip: NVIDIA's by their capability, AMD's by their name."""
    return GPUTarget("cuda", chip, 32) if isinstance(chip, int) else GPUTarget("hip", chip, 64)


def compiled(kernel, capability, args, named):
    """As `JITFunction.run` does it for the chip that is there; of AMD's chips nothing is counted."""
    target = target_of(capability)
    backend = make_backend(target)
    named = named | {"debug": False, "instrumentation_mode": ""}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*args, **named)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, named, bound, specialization, options
    )

    def current_target():
        return target

    current_target.__triton_builtin__ = True
    # Kernels that ask which chip there is get this one.
    with mock.patch.object(target_info, "current_target", current_target):
        made = triton.compile(
            ASTSource(kernel, signature, constexprs, attrs), target=target, options=options.__dict__
        )
    config = tuple(named.get(name) for name in ("BM", "BN", "num_warps", "num_stages"))
    careful = bool(named.get("CAREFUL"))
    if target.backend == "hip":
        shared, code = made.metadata.shared, made.asm["amdgcn"]
        return Built(kernel.__name__, capability, config, shared, 0, 0, code, (), careful)
    registers, spilled = read_usage(made.asm["cubin"])
    return Built(
        kernel=kernel.__name__,
        capability=capability,
        config=config,
        shared=made.metadata.shared,
        registers=registers,
        spilled=spilled,
        ptx=made.asm["ptx"],
        loops=find_loops(run_tool("nvdisasm", "-c", cubin=made.asm["cubin"])),
        careful=careful,
    )


def run_tool(name, *options, cubin):
    """Return what a program of NVIDIA's that comes with Triton says of a kernel."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_usage(cubin):
    """Return the registers of a thread, and the bytes that it keeps outside them."""
    said = run_tool("cuobjdump", "-res-usage", cubin=cubin)
    return tuple(int(re.search(rf"{what}:(\d+)", said)[1]) for what in ("REG", "STACK"))


def find_loops(listing):
    """Return the names of the instructions of each innermost loop, in the order of the listing.

    A loop begins at a label and ends at a branch back to it; an innermost one holds no other.
    """
    labels, names, spans = {}, [], []
    for line in listing.splitlines():
        label = re.match(r"^(\.L_[\w.]+):", line)
        if label:
            labels[label[1]] = len(names)
            continue
        found = re.match(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)([^;]*);", line)
        if found is None:
            continue
        names.append(found[1])
        target = re.search(r"\.L_[\w.]+", found[2]) if found[1].startswith("BRA") else None
        if target and target[0] in labels:
            spans.append((labels[target[0]], len(names)))
    holds = lambda outer, inner: outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]
    innermost = [span for span in spans if not any(holds(span, other) for other in spans)]
    return tuple(tuple(names[first:last]) for first, last in innermost)


def listed(
    page,
    d=64,
    chunk=16,
    length=2048,
    heads=4,
    kv_heads=2,
    dtype=torch.bfloat16,
    gradients=True,
    summaries=0,
):
    """Launch the kernels for listed keys, on tensors that are never read.

    With summaries they are called as HSA calls them: each chunk lists some, and there is a bias.
    """
    by = SUMMARIES if summaries else 0
    rules = [HeadRule(128, 4, page=page, chunk=chunk, top=8, by=by)] * heads
    queries = length - summaries
    shapes = shapes_of_choice(rules, queries, length)
    chosen = torch.full((1, sum(chunks * most for chunks, most in shapes)), -1, dtype=torch.int32)
    q = torch.empty(1, heads, queries, d, dtype=dtype)
    k, v = (torch.empty(1, kv_heads, length, d, dtype=dtype) for _ in "kv")
    bias = torch.empty(1, heads, length) if summaries else None
    spans, offset = [summaries, length], summaries
    numbers = list(flatten_rules(tuple(rules)))
    settings = numbers, spans, offset, d**-0.5, 0.0, 0, summaries, None, bias
    out, lse = selected.compute_attention(q, k, v, chosen, *settings)
    if gradients:
        selected.compute_gradients(out, out, lse, q, k, v, chosen, *settings)


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
