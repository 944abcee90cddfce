"""Two result files compared: which ratios to SDPA are worse beyond their noise, which shares of the peak smaller."""

from __future__ import annotations

LEAST = 0.05  # smaller changes are not told, however steady they are


def slowdowns(base: dict[str, dict], rows: dict[str, dict]) -> list[str]:
    """A line for each row of both files that is slower now, or cannot be measured any more.

    Slower is a row whose lower quartile lies above the upper one of the base, and whose median is 5 % higher.
    """
    found = []
    for key, old in base.items():
        new = rows.get(key)
        if new is None or old["status"] != "ok":
            continue
        if new["status"] != "ok":
            found.append(f"{key}: {old['median']:.2f} -> {new['status']}")
        elif new["q1"] > old["q3"] and new["median"] > (1 + LEAST) * old["median"]:
            found.append(
                f"{key}: {old['median']:.2f} ({old['q1']:.2f} to {old['q3']:.2f}) -> "
                f"{new['median']:.2f} ({new['q1']:.2f} to {new['q3']:.2f})"
            )
    return found


def lost_shares(base: dict[str, dict], rows: dict[str, dict]) -> list[str]:
    """A line for each row of both whose share of what a core multiplies is 5 % smaller now."""
    shared = [
        (key, old["share"], rows[key]["share"])
        for key, old in base.items()
        if "share" in old and key in rows
    ]
    return [
        f"{key}: {old:.1%} -> {new:.1%} of the peak"
        for key, old, new in shared
        if new < (1 - LEAST) * old
    ]


def summary(base: dict[str, dict], rows: dict[str, dict]) -> tuple[str, bool]:
    """What to print, and whether anything has become slower."""
    shared = len(base.keys() & rows.keys())
    found = slowdowns(base, rows)
    lines = [f"{shared} rows in both files, {len(found)} slower beyond their noise", *found]
    return "\n".join(lines), bool(found)
