"""YAML as one expects it: 1e-4 is a number, a key stands once, errors are one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

#: YAML 1.1, which PyYAML reads, takes 1e-4 for a string: it wants a dot and a sign.
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+")


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's numbers, and an error for a key that stands twice."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)  # noqa: S506  a subclass of SafeLoader
    except OSError as error:
        raise ValueError(
            f"--config {path}: {error.strerror}; allowed: a readable YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ValueError(f"--config {path}: holds {type(data).__name__}; allowed: keys and values")
    return data


def read_yaml_value(text: str) -> Any:
    """One value as it would stand in the file."""
    try:
        return yaml.load(text, Loader)  # noqa: S506  a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(
            f"--set ...={text}: not a YAML value: {' '.join(str(error).split())}"
        ) from error
