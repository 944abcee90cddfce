"""A small tree of nouns in WordNet's format, written for tests."""

from __future__ import annotations

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by\n"


def noun(offset: int, word: str, *parents: int, more: str = "") -> str:
    pointers = "".join(f" @ {p:08d} n 0000" for p in parents) + more
    count = len(parents) + (1 if more else 0)
    return (
        f"{offset:08d} 03 n 01 {word} 0 {count:03d}{pointers} | a gloss with @ 00000000 in it  \n"
    )


def write_nouns(path, fan: int = 3, levels: int = 4) -> dict[str, str | None]:
    """A whole tree with `fan` children a node, in WordNet's format; the parents it means."""
    lines, parents, level, number = [LICENCE, noun(1, "entity")], {"entity.00000001": None}, [1], 1
    for _ in range(levels):
        below = []
        for parent in level:
            for _ in range(fan):
                number += 1
                # a second hypernym and a part, which are not followed
                lines.append(noun(number, "thing", parent, 1, more=" %p 00000001 n 0000"))
                up = "entity" if parent == 1 else "thing"
                parents[f"thing.{number:08d}"] = f"{up}.{parent:08d}"
                below.append(number)
        level = below
    path.write_text("".join(lines), encoding="latin-1")
    return parents
