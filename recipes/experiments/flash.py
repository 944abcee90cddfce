"""HyPE and flash kernels: what the bias costs and loses as columns of Q and K, evaluated in the kernel, and as a mask.

A bias error is the largest |bias - float64| over the causal pairs of a query at the end and one in the middle. Columns
are multiplied here as the kernels do it: entries in the dtype, products and sums in float32. An output error is
through the kernel itself, against float64 attention on the same rounded inputs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hf_hyperattn.engines import available_engines
from hf_hyperattn.functional import hype_attention, hype_bias

from .store import Experiment

SETTINGS = {
    "dtypes": ["float32", "bfloat16", "float16"],
    "lengths": [512, 2048, 8192],
    # Few at 8,192 because of the mask and of float64 attention, which store every pair.
    "heads": {"512": 8, "2048": 8, "8192": 2},
    "dim": 64,
    "seed": 0,
    "rounds": 4,
}
#: Ways to compute it that are not engines of ours.
PLAIN, MASK = "two plain columns", "mask"
#: Those whose bias error is measured.
BIAS_WAYS = ("in the kernel", "columns", PLAIN, MASK)
#: Names of the engines in the tables.
WAYS = {
    "columns": "sdpa",
    "tiles (blockwise)": "blockwise",
    "tiles (C++)": "cpu",
    "tiles (Triton)": "triton",
}


def runs(settings: dict, found: dict) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Bias errors, then times and output errors on the CPU, and on the GPU where there is one."""
    for length in settings["lengths"]:
        yield f"bias, L = {length}", functools.partial(bias_errors, length, settings["dtypes"])
    for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        for dtype in settings["dtypes"]:
            for length in settings["lengths"]:
                yield (
                    key_of(device, dtype, length),
                    functools.partial(measure, settings, device, dtype, length),
                )


def key_of(device: str, dtype: str, length: int) -> str:
    """The name of a run."""
    return f"{device}, {dtype}, L = {length}"


def bias_errors(length: int, dtypes: list[str]) -> dict:
    """The largest error for slope 1 at mu = 1/L: by the way of computing, and by the dtype."""
    mu, tau = torch.tensor([1.0 / length]), torch.tensor([float(length)])
    keys = torch.arange(length, dtype=torch.float64)
    queries = keys[[length // 2, length - 1]]
    visible = keys[None, :] <= queries[:, None]
    exact = hype_bias(queries, keys, mu=mu.double(), tau=tau.double(), form="sinh")[0, 0]

    def error(bias: Tensor) -> float:
        # What is the same for a whole row does not reach the attention, and columns may leave it out.
        off = (bias.double() - exact) - (bias.double() - exact).gather(1, queries.long()[:, None])
        return off[visible].abs().max().item()

    found: dict[str, dict[str, float]] = {}
    for name in dtypes:
        dtype = getattr(torch, name)
        left, right = columns_of_the_engine(length, mu, tau, dtype)
        found[name] = {
            "columns": error(product(left[queries.long()], right)),
            PLAIN: error(product(*plain_columns(queries, keys, mu, tau, dtype))[0]),
            MASK: error(exact.to(dtype)),
            # Engines compute in float32 whatever the inputs are.
            "in the kernel": error(
                hype_bias(queries.float(), keys.float(), mu=mu, tau=tau, form="sinh")[0, 0]
            ),
        }
    return found


class Recorder(TorchFunctionMode):
    """Keeps what is handed to SDPA, and hands back the value instead of computing."""

    query = key = scale = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.query, self.key, self.scale = args[0], args[1], kwargs["scale"]
        return args[2]


def columns_of_the_engine(
    length: int, mu: Tensor, tau: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two [L, c] whose product is the bias: what `backend="sdpa"` hands to the kernel where q and k are zero."""
    zeros = torch.zeros(1, 1, length, 8, dtype=dtype)
    with Recorder() as seen:
        hype_attention(zeros, zeros, zeros, is_causal=True, mu=mu, tau=tau, backend="sdpa")
    return seen.query[0, 0].float() * seen.scale, seen.key[0, 0]


def plain_columns(queries: Tensor, keys: Tensor, mu: Tensor, tau: Tensor, dtype: torch.dtype):
    """The construction of the paper: tau/2 · (e^(mu(j-i)) - e^(-mu(j-i))) as two columns a side, [H, L, 2]."""
    x, y = mu[:, None] * queries, mu[:, None] * keys
    half = tau[:, None] / 2
    left = torch.stack([half * torch.exp(-x), -half * torch.exp(x)], -1)
    right = torch.stack([torch.exp(y), torch.exp(-y)], -1)
    return left.to(dtype), right.to(dtype)


def product(left: Tensor, right: Tensor) -> Tensor:
    """The bias that columns give, [..., N, M] in float32."""
    return left.float() @ right.float().mT


def slopes_of(heads: int) -> Tensor:
    """ALiBi's slopes, [H]."""
    return torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)])


def ways(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Every way to compute causal attention with HyPE's bias, and SDPA without it."""
    heads, length, dim = q.shape[1:]
    mu = torch.full((heads,), 1.0 / length, device=q.device)
    tau = slopes_of(heads).to(q.device) * length
    at = torch.arange(length, device=q.device, dtype=torch.float64)

    bias = hype_bias(at.float(), at.float(), mu=mu, tau=tau, form="sinh").to(q.dtype)
    mask = bias.masked_fill_(torch.ones_like(bias, dtype=torch.bool).triu_(1), -torch.inf)

    def by_plain_columns() -> Tensor:
        left, right = plain_columns(at, at, mu, tau * dim**0.5, q.dtype)
        wide = [torch.cat([a, b[None]], -1) for a, b in ((q, left), (k, right))]
        out = scaled_dot_product_attention(*wide, pad(v, (0, 2)), is_causal=True, scale=dim**-0.5)
        return out[..., :dim]

    found = {"SDPA, no bias": lambda: scaled_dot_product_attention(q, k, v, is_causal=True)}
    found[MASK] = lambda: scaled_dot_product_attention(
        q, k, v, attn_mask=mask
    )  # made once for all layers
    found[PLAIN] = by_plain_columns
    for name, engine in WAYS.items():
        if engine in available_engines() and (q.is_cuda or engine != "triton"):
            found[name] = functools.partial(
                hype_attention, q, k, v, is_causal=True, mu=mu, tau=tau, backend=engine
            )
    return found


@torch.no_grad()
def measure(settings: dict, device: str, dtype: str, length: int) -> dict:
    """Seconds, their ratio to SDPA, and the output error of every way; ways that refuse the call say why."""
    torch.manual_seed(settings["seed"])
    heads, dim = settings["heads"][str(length)], settings["dim"]
    qkv = [torch.randn(1, heads, length, dim).to(device, getattr(torch, dtype)) for _ in range(3)]
    calls, refused, outputs = {}, {}, {}
    for name, call in ways(*qkv).items():
        try:
            outputs[name] = call()
            calls[name] = call
        except (ValueError, RuntimeError) as error:
            refused[name] = str(error).splitlines()[0]
    seconds = {name: [] for name in calls}
    for _ in range(settings["rounds"]):  # in turns, so that a drift of the machine meets all alike
        for name, call in calls.items():
            seconds[name].append(time_of(call, device))
    base = min(seconds["SDPA, no bias"])
    return {
        "ways": {
            name: {
                "seconds": min(seconds[name]),
                "ratio": min(seconds[name]) / base,
                "error": output_error(outputs[name], *qkv, biased=name != "SDPA, no bias"),
            }
            for name in calls
        },
        "refused": refused,
        "heads": heads,
    }


def time_of(call: Callable, device: str) -> float:
    """Seconds of one call: of this process alone on the CPU, where others may be at work."""
    if device == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def output_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, biased: bool) -> float:
    """The largest difference to float64 attention, head by head."""
    heads, length, dim = q.shape[1:]
    at, worst = torch.arange(length, dtype=torch.float64, device=q.device), 0.0
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    for h, slope in enumerate(slopes_of(heads).tolist()):
        logits = q[0, h].double() @ k[0, h].double().T * dim**-0.5
        if biased:
            logits += hype_bias(at, at, mu=1 / length, tau=slope * length, form="sinh")[0, 0]
        exact = logits.masked_fill_(future, -torch.inf).softmax(-1) @ v[0, h].double()
        worst = max(worst, (out[0, h].double() - exact).abs().max().item())
    return worst


EXPERIMENT = Experiment("flash", SETTINGS, runs)
