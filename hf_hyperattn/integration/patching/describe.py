"""Report a model's attention layers and patches, as a dict that prints as a table.

`describe` is for models; `list_mechanisms` is for the installed mechanisms.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

import model_patches

from ...config.registry import MECHANISMS
from ...mechanisms.base import Host
from ...utils.readable import can_read
from ..attention.hosts import NUMBER
from ..attention.hyper import active_hyper, patched_hosts, unwrap_hyper
from ..attention.stock import HYPER_DOT, OURS, PATCHED, RUNNING, stock_name
from .attach import all_hosts
from .patch import base_model, route_families


class Description(dict):
    """A dict that prints as a table.

    Rows that only differ in the number of their layer are printed as one.
    """

    def __str__(self) -> str:
        rows = fold_rows([(host["name"], _format_row(host)) for host in self["hosts"]])
        lines = _format_table(
            [["attention layer", "family", "heads", "kind", "patched", "added", "gates"], *rows],
            rule=True,
        )
        for host in self["hosts"]:
            lines += _format_heads(host)
        lines.append(
            f"{self['model']}: {self['patched']} of {len(self['hosts'])} attention layers patched "
            f"({self['mode'] or 'none'}), "
            f"{self['parameters_added']:,} parameters added to {self['parameters']:,}"
        )
        # Facts that do not fit into the table: inactive patches, unusual base implementations,
        # names.
        off = sorted(
            {h["attn_implementation"] for h in self["hosts"] if h["mechanisms"] and not h["active"]}
        )
        if off:
            lines.append(
                f"not active: the patched layers run attn_implementation={off[0]!r}, without what was added"
            )
        beneath = sorted({h["beneath"] for h in self["hosts"] if h["beneath"]} - {"sdpa"})
        lines += [f"beneath: what is not changed is computed by {name!r}" for name in beneath]
        running = {h["attn_implementation"] for h in self["hosts"]}
        by_name = sorted(running & (OURS - {PATCHED, RUNNING} | {HYPER_DOT}))
        lines += [f"by name: attention is {name!r}" for name in by_name]
        return "\n".join(lines)

    __repr__ = __str__


def _format_row(host: dict[str, Any]) -> tuple[str, ...]:
    """Return the table cells of an attention layer, without its name."""
    gates = [
        f"{n} offloaded" if g is None else f"{n} {g[0]:.3g} to {g[1]:.3g}"
        for n, g in host["gates"].items()
    ]
    return (
        host["family"],
        f"{host['heads']}/{host['kv_heads']}",
        host["kind"],
        " + ".join(host["mechanisms"]),
        str(host["parameters_added"]),
        ", ".join(gates),
    )


def fold_rows(rows: list[tuple[str, tuple[str, ...]]]) -> list[list[str]]:
    """Join rows of one stack with equal cells: "model.layers.0-19.self_attn (20)".

    Args:
        rows: Pairs of a name and the cells of the row.

    Returns:
        One row per group: the joined name, then the cells.
    """
    # Names that are equal without their layer number belong to one stack.
    groups: dict[tuple, list[str]] = {}
    for name, cells in rows:
        groups.setdefault((NUMBER.sub("*", name, count=1), cells), []).append(name)
    return [[_join_names(names), *cells] for (_, cells), names in groups.items()]


def _join_names(names: list[str]) -> str:
    """Return one name for several that differ in their layer number."""
    match = NUMBER.search(names[0])
    if len(names) == 1 or match is None:
        return names[0]
    numbers = [int(NUMBER.search(name)[0]) for name in names]  # type: ignore[index]
    # Runs of neighbours become spans: 0, 1, 2, 5 is "0-2,5".
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    spans = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, stops, strict=True))
    return f"{names[0][: match.start()]}{spans}{names[0][match.end() :]} ({len(names)})"


def _format_table(rows: list[list[str]], rule: bool = False) -> list[str]:
    """Return lines with aligned columns, and "-" in empty cells.

    Args:
        rule: Whether to draw a line below the first row.
    """
    cells = [[cell or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells[1:1] = [["-" * w for w in widths]] if rule else []
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _format_heads(host: dict[str, Any]) -> list[str]:
    """Return the lines with the values of a layer's heads; [] if they were not requested."""
    values = host.get("by_head", {})
    if not values:
        return []
    rows = [[host["name"], *map(str, range(host["heads"]))]]
    for name, by_head in values.items():
        cells = ["offloaded"] if by_head is None else [f"{value:.3g}" for value in by_head]
        rows.append([f"  {name}", *cells])
    # A space fills short rows, since `_format_table` writes "-" into empty cells.
    width = host["heads"] + 1
    return _format_table([row + [" "] * (width - len(row)) for row in rows])


def describe(model: nn.Module, heads: bool = False) -> Description:
    """Report a model's attention layers and what is patched into them.

    Args:
        model: A Transformers model, patched or not. PEFT wrappers are allowed.
        heads: Also report the learned parameters of every head.

    Returns:
        A dict, ready for JSON, that prints as a table:

        - ``model``: name of the model class.
        - ``mode``: ``"blend"``, ``"replace"``, both joined by " and ", or None if nothing is
          patched.
        - ``mechanisms``: configs of the patched mechanisms, without duplicates.
        - ``patched``: number of patched attention layers.
        - ``parameters``, ``parameters_added``: parameters of the base model, and those added by
          patches.
        - ``hosts``: one dict per attention layer with ``name``, ``family``, ``heads``,
          ``kv_heads``, ``kind`` ("causal", "bidirectional" or "cross"), ``attn_implementation``,
          ``beneath`` (base implementation of a patched layer, else None), ``mechanisms``,
          ``active`` (whether a call runs them), ``parameters_added`` and ``gates`` (lowest and
          highest value of each gate, None if it is offloaded). With ``heads=True`` also
          ``by_head``: one value per head for every parameter that has one.

    Example:
        >>> ha.patch_model(model, ha.ConeConfig(), layers="last-third")
        >>> print(ha.describe(model))
        attention layer                    family  heads  kind    patched  added  gates
        ---------------------------------  ------  -----  ------  -------  -----  ----------------
        model.layers.0-19.self_attn (20)   llama   9/3    causal  -        0      -
        model.layers.20-29.self_attn (10)  llama   9/3    causal  cone     27     cone.gate 0 to 0
        LlamaForCausalLM: 10 of 30 attention layers patched (blend), 270 parameters added to 134,515,008
    """
    base = base_model(model)
    hypers = [unwrap_hyper(host.hyper) for _, host in patched_hosts(base)]
    modes = sorted({hyper.config.mode for hyper in hypers})
    mechanisms = [m.to_dict() for hyper in hypers for m in hyper.mechanisms()]
    # Families served by `model_patches` have attention layers only while they are routed.
    newly_routed = route_families(base)
    try:
        hosts = [_describe_host(module, host, heads) for _, module, host in all_hosts(base)]
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


def _describe_host(module: nn.Module, host: Host, heads: bool) -> dict[str, Any]:
    """Return the facts of one attention layer; see `describe`."""
    hyper = active_hyper(module._modules.get("hyper"))
    parameters = dict(hyper.named_parameters()) if hyper else {}
    gates = {name: p for name, p in parameters.items() if name.endswith("gate")}
    implementation = getattr(host.config, "_attn_implementation", None)
    kind = "causal" if host.is_causal else "bidirectional"
    facts = {
        "name": host.name,
        "family": getattr(host.config, "model_type", "") or type(module).__name__,
        "heads": host.heads,
        "kv_heads": host.kv_heads,
        "kind": "cross" if host.is_cross else kind,
        "attn_implementation": implementation,
        "beneath": stock_name(host.config) if hyper and host.config is not None else None,
        "mechanisms": [n for n, _ in hyper.named_children()] if hyper else [],
        "active": hyper is not None and implementation == RUNNING,
        "parameters_added": sum(p.numel() for p in parameters.values()),
        "gates": {
            n: (g.min().item(), g.max().item()) if can_read(g) else None for n, g in gates.items()
        },
    }
    if heads:
        # Offloaded parameters have no values to read.
        facts["by_head"] = {
            name: p.tolist() if can_read(p) else None
            for name, p in parameters.items()
            if p.shape == (host.heads,)
        }
    return facts


def list_mechanisms() -> list[dict]:
    """List the installed mechanisms as dicts.

    Returns:
        One dict per mechanism: name, stage, paper, names for `attn_implementation`, functions, and
            options with their help.
    """
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
