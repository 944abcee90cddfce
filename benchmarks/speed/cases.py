"""What is measured: cases (shape, type, direction), jobs (an operation computed in one way on a case), their order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from .operations import OPERATIONS

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
DIMS = (16, 32, 64, 96, 128, 256)
KINDS = ("forward", "training", "decode")
MODEL_KINDS = ("prefill", "decode", "encode")
#: By dtype: the largest error against float64, as a share of the largest exact number, of output and of gradients.
TOLERANCE = {"float32": (2e-4, 2e-3), "bfloat16": (3e-2, 6e-2), "float16": (3e-2, 6e-2)}
HALF = ("float32", "bfloat16")
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Case:
    """One call of attention. `training` is forward and backward; `decode` one query against `length` keys."""

    kind: str
    length: int
    batch: int = 1
    heads: int = 8
    dim: int = 64
    causal: bool = False
    dtype: str = "float32"
    threads: int = 1
    device: str = "cpu"

    @property
    def key(self) -> str:
        """The case in one line; the same in all result files."""
        shape = f"{self.batch}x{self.heads}x{self.length}x{self.dim}"
        place = f"{self.threads}t" if self.device == "cpu" else self.device
        return (
            f"{self.kind} {shape} {'causal' if self.causal else 'full'} {SHORT[self.dtype]} {place}"
        )

    @property
    def pairs(self) -> int:
        """Elements of the matrix of logits."""
        return self.batch * self.heads * self.length * (1 if self.kind == "decode" else self.length)


@dataclass(frozen=True)
class Job:
    """An operation computed in one way on a case; or a whole model with attention by one name."""

    subject: str
    way: str
    case: Case

    @property
    def key(self) -> str:
        """The name of the row in the results."""
        return f"{self.subject} | {self.way} | {self.case.key}"


def shape(kind: str, length: int, **rest) -> Case:
    """A case with as many sequences and heads as its length leaves time for."""
    batch, heads = {512: (4, 8), 8192: (1, 4)}.get(length, (1, 8) if length < 8192 else (1, 2))
    return Case(kind, length, **{"batch": batch, "heads": heads} | rest)


def jobs(
    ways: dict[str, list[str]], models: dict[str, list[str]], device: str, full: bool
) -> list[Job]:
    """All jobs, the most important first and none twice.

    Args:
        ways: for each operation how it can be computed here, the way that counts first.
        models: for each model the names of attention that it is run with.
        device: "cpu" or "cuda".
        full: whether to sweep everything, or what matters most.
    """
    return list(dict.fromkeys(_cpu(ways, models, full) if device == "cpu" else _gpu(ways, full)))


def _cpu(ways, models, full) -> Iterator[Job]:
    best = {name: found[:1] for name, found in ways.items()}
    table = [name for name in OPERATIONS if OPERATIONS[name].limits]
    for threads in (1, 2):
        for length in (2048, 512, 8192):
            for kind in ("forward", "training"):
                yield from _of(best, table, shape(kind, length, threads=threads))
        for kind in ("forward", "training"):
            yield from _of(best, ["umbral"], shape(kind, 2048, dtype="bfloat16", threads=threads))
        yield from _of(best, table, Case("decode", 8192, threads=threads))
        for kind in MODEL_KINDS:
            for model, names in models.items():
                yield from _of_model(model, names, kind, threads)
    for kind in ("forward", "training"):
        yield from _of(ways, list(OPERATIONS), shape(kind, 2048))
    yield from _of(best, list(OPERATIONS), Case("training", 8192))  # memory at 8 heads
    for length in (512, 2048):
        for kind in ("forward", "training"):
            yield from _of(best, list(OPERATIONS), shape(kind, length, causal=True))
            yield from _of(best, list(OPERATIONS), shape(kind, length, dtype="bfloat16"))
    yield from _of(ways, ["umbral", "dot"], Case("decode", 8192))
    yield from _of(ways, ["umbral", "dot"], Case("decode", 512))
    for dim in DIMS:
        for kind in ("forward", "training"):
            yield from _of(best, ["umbral", "geodesic"], shape(kind, 2048, dim=dim, heads=4))
    for length in LENGTHS:
        yield from _of(best, ["umbral", "dot"], shape("forward", length))
        yield from _of(best, ["umbral", "dot"], shape("training", length))
    if full:
        yield from everything(ways, {"threads": (1, 2)})


def gpu_case(kind: str, length: int, dim: int, causal: bool) -> Case:
    """16k tokens and 2,048 numbers a token, as FlashAttention's own benchmark has it."""
    return Case(kind, length, 16384 // length, 2048 // dim, dim, causal, "bfloat16", device="cuda")


def _gpu(ways, full) -> Iterator[Job]:
    best = {name: found[:1] for name, found in ways.items()}
    table = [name for name in OPERATIONS if OPERATIONS[name].limits.get("cuda bfloat16")]
    axes = itertools.product((2048, 8192, 512), (64, 128), (True, False), KINDS[:2])
    cases = [gpu_case(kind, length, dim, causal) for length, dim, causal, kind in axes]
    for case in cases:
        yield from _of(best, table, case)
    for case in cases:
        yield from _of(ways if case.length == 2048 else best, list(OPERATIONS), case)
    yield from _of(ways, list(OPERATIONS), Case("decode", 8192, dtype="bfloat16", device="cuda"))
    if full:
        yield from everything(ways, {"device": ("cuda",)}, heads=16)


def everything(ways, places: dict, heads=None) -> Iterator[Job]:
    """Each axis swept with the others as they usually are: hours, where all combinations would take days."""
    given = {"ways": ways, "places": places, "heads": heads}
    yield from sweep(**given, causal=(False, True))
    yield from sweep(**given, dims=DIMS, lengths=(2048,), causal=(False, True), dtypes=HALF)
    yield from sweep(**given, lengths=(512, 2048, 8192), batches=(4, 16))
    yield from sweep(**given, dtypes=("bfloat16",), causal=(False, True))


def sweep(
    ways,
    places: dict,
    operations=None,
    lengths=LENGTHS,
    dims=(64,),
    batches=(None,),
    kinds=KINDS,
    causal=(False,),
    dtypes=("float32",),
    heads=None,
) -> Iterator[Job]:
    """Operations in every way over all combinations; `places` gives the threads or the device, None what is usual."""
    ((place, values),) = places.items()
    axes = itertools.product(lengths, dims, batches, dtypes, causal, kinds, values)
    for length, dim, batch, dtype, direction, kind, value in axes:
        given = {
            "batch": batch,
            "heads": heads,
            "dim": dim,
            "dtype": dtype,
            "causal": direction,
            place: value,
        }
        if not (kind == "decode" and direction):
            given = {name: x for name, x in given.items() if x is not None}
            yield from _of(ways, operations or list(OPERATIONS), shape(kind, length, **given))


def _of(ways, names, case: Case) -> Iterator[Job]:
    for name in names:
        for way in ways.get(name, []):
            if OPERATIONS[name].can(way, case.kind):
                yield Job(name, way, case)


def _of_model(model: str, names: list[str], kind: str, threads: int) -> Iterator[Job]:
    from .models import MODELS

    if kind in MODELS[model].kinds:
        for name in names:
            yield Job(model, name, MODELS[model].case(kind, threads))
