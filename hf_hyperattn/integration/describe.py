"""What is in a model and what is done to it, as a dict and as a table."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from torch import nn

import model_patches

from ..mechanisms.base import Host
from ..readable import can_read
from ..registry import MECHANISMS
from .attach import all_hosts
from .checkpoint_config import inner, patched_hosts
from .hyper_adapter import active_hyper
from .patching import base_model, route_families
from .stock import HYPER_DOT, OURS, PATCHED, RUNNING, stock_name

#: The number of a layer in the name of a module.
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Description(dict):
    """A plain dict that prints as a table; rows that are equal but for the number of their layer are one."""

    def __str__(self) -> str:
        rows = folded([(host["name"], _row(host)) for host in self["hosts"]])
        lines = _table(
            [["host", "family", "heads", "kind", "patched", "added", "gates"], *rows], rule=True
        )
        for host in self["hosts"]:
            lines += _by_head(host)
        lines.append(
            f"{self['model']}: {self['patched']} of {len(self['hosts'])} hosts patched ({self['mode'] or 'none'}), "
            f"{self['parameters_added']:,} parameters added to {self['parameters']:,}"
        )
        off = sorted(
            {h["attn_implementation"] for h in self["hosts"] if h["mechanisms"] and not h["active"]}
        )
        if off:
            lines.append(
                f"not active: the patched hosts run attn_implementation={off[0]!r}, without what was added"
            )
        beneath = sorted({h["beneath"] for h in self["hosts"] if h["beneath"]} - {"sdpa"})
        lines += [f"beneath: what is not changed is computed by {name!r}" for name in beneath]
        by_name = sorted(
            {h["attn_implementation"] for h in self["hosts"]}
            & (OURS - {PATCHED, RUNNING} | {HYPER_DOT})
        )
        lines += [f"by name: attention is {name!r}" for name in by_name]
        return "\n".join(lines)

    __repr__ = __str__


def _row(host: dict[str, Any]) -> tuple[str, ...]:
    """What the table says of a host, besides its name."""
    gates = [
        f"{n} offloaded" if g is None else f"{n} {g[0]:.3g} to {g[1]:.3g}"
        for n, g in host["gates"].items()
    ]
    heads, mechanisms = f"{host['heads']}/{host['kv_heads']}", " + ".join(host["mechanisms"])
    return (
        host["family"],
        heads,
        host["kind"],
        mechanisms,
        str(host["parameters_added"]),
        ", ".join(gates),
    )


def folded(rows: list[tuple[str, tuple[str, ...]]]) -> list[list[str]]:
    """Rows of a name and cells, those of one stack with equal cells as one: model.layers.0-19.self_attn (20)."""
    groups: dict[tuple, list[str]] = {}
    for name, cells in rows:
        groups.setdefault((NUMBER.sub("*", name, count=1), cells), []).append(name)
    return [[_joined(names), *cells] for (_, cells), names in groups.items()]


def _joined(names: list[str]) -> str:
    """One name for several that differ in the number of their layer."""
    match = NUMBER.search(names[0])
    if len(names) == 1 or match is None:
        return names[0]
    numbers = [int(NUMBER.search(name)[0]) for name in names]  # type: ignore[index]
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))
    return f"{names[0][: match.start()]}{spans}{names[0][match.end() :]} ({len(names)})"


def _table(rows: list[list[str]], rule: bool = False) -> list[str]:
    """Lines with aligned columns, "-" for an empty cell; with a rule below the first."""
    cells = [[cell or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells[1:1] = [["-" * w for w in widths]] if rule else []
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _by_head(host: dict[str, Any]) -> list[str]:
    """The values of a host's heads, where they were asked for."""
    values = host.get("by_head", {})
    head = [[host["name"], *map(str, range(host["heads"]))]] if values else []
    rows = [
        [f"  {n}", *(["offloaded"] if v is None else [f"{x:.3g}" for x in v])]
        for n, v in values.items()
    ]
    return (
        _table([row + [" "] * (host["heads"] + 1 - len(row)) for row in head + rows])
        if values
        else []
    )


def describe(model: nn.Module, heads: bool = False) -> Description:
    """Report a model's attention layers and what is patched into them.

    Args:
        model: A Transformers model, patched or not. PEFT wrappers are allowed.
        heads: Also report the learned parameters of every head.

    Returns:
        A dict, ready for JSON, that prints as a table:

        - ``model``: name of the model class.
        - ``mode``: ``"blend"``, ``"replace"``, both joined by " and ", or None if nothing is patched.
        - ``mechanisms``: configs of the patched mechanisms, without duplicates.
        - ``patched``: number of patched attention layers.
        - ``parameters``, ``parameters_added``: parameters of the base model, and those added by patches.
        - ``hosts``: one dict per attention layer with ``name``, ``family``, ``heads``, ``kv_heads``, ``kind``
          ("causal", "bidirectional" or "cross"), ``attn_implementation``, ``beneath`` (base implementation of a patched
          layer, else None), ``mechanisms``, ``active`` (whether a call runs them), ``parameters_added`` and ``gates``
          (lowest and highest value of each gate, None if it is offloaded). With ``heads=True`` also ``by_head``: one
          value per head for every parameter that has one.

    Example:
        >>> ha.patch_model(model, ha.ConeConfig(), layers="last-third")
        >>> print(ha.describe(model))
        host                               family  heads  kind    patched  added  gates
        ---------------------------------  ------  -----  ------  -------  -----  ----------------
        model.layers.0-19.self_attn (20)   llama   9/3    causal  -        0      -
        model.layers.20-29.self_attn (10)  llama   9/3    causal  cone     27     cone.gate 0 to 0
        LlamaForCausalLM: 10 of 30 hosts patched (blend), 270 parameters added to 134,515,008
    """
    base = base_model(model)
    hypers = [inner(host.hyper) for _, host in patched_hosts(base)]
    modes = sorted({hyper.config.mode for hyper in hypers})
    mechanisms = [m.to_dict() for hyper in hypers for m in hyper.mechanisms()]
    newly_routed = route_families(base)  # a served family has hosts only while it is routed
    try:
        hosts = [_host(module, host, heads) for _, module, host in all_hosts(base)]
    finally:
        if newly_routed:
            model_patches.unserve(base)
    added = sum(host["parameters_added"] for host in hosts)
    return Description(
        model=type(base).__name__,
        mode=" and ".join(modes) or None,
        mechanisms=[m for i, m in enumerate(mechanisms) if m not in mechanisms[:i]],
        patched=sum(bool(host["mechanisms"]) for host in hosts),
        parameters=sum(p.numel() for p in base.parameters()) - added,
        parameters_added=added,
        hosts=hosts,
    )


def _host(module: nn.Module, host: Host, heads: bool) -> dict[str, Any]:
    hyper = active_hyper(module._modules.get("hyper"))
    gates = {n: p for n, p in hyper.named_parameters() if n.endswith("gate")} if hyper else {}
    implementation = getattr(host.config, "_attn_implementation", None)
    facts = {
        "name": host.name,
        "family": getattr(host.config, "model_type", "") or type(module).__name__,
        "heads": host.heads,
        "kv_heads": host.kv_heads,
        "kind": "cross" if host.is_cross else "causal" if host.is_causal else "bidirectional",
        "attn_implementation": implementation,
        "beneath": stock_name(host.config) if hyper and host.config is not None else None,
        "mechanisms": [n for n, _ in hyper.named_children()] if hyper else [],
        "active": hyper is not None and implementation == RUNNING,
        "parameters_added": sum(p.numel() for p in hyper.parameters()) if hyper else 0,
        "gates": {
            n: (g.min().item(), g.max().item()) if can_read(g) else None for n, g in gates.items()
        },
    }
    if heads:
        each = (
            {n: p for n, p in hyper.named_parameters() if p.shape == (host.heads,)} if hyper else {}
        )
        facts["by_head"] = {n: p.tolist() if can_read(p) else None for n, p in each.items()}
    return facts


def list_mechanisms() -> list[dict]:
    """Every mechanism: name, stage, paper, names for `attn_implementation`, and its options with their help."""
    return [
        {
            "name": m.name,
            "stage": m.stage,
            "paper": m.paper,
            "attn_implementation": list(m.names),
            "functions": list(m.functions),
            "options": {f.name: f.metadata.get("help", "") for f in fields(m.config)},
        }
        for m in MECHANISMS.values()
    ]
