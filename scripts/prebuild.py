"""Compiles the kernels of a wheel: `python scripts/prebuild.py FOLDER`. FOLDER holds the package; setup.py calls it.

For each level of the machines that the compiler compiles for (`native.OF_MACHINES`; CXX names a cross compiler) one
library: the engine, and every score that the package's mechanisms make by name, patched and in
chosen heads, one at a time, with and without a softcap. Which these are is seen by running them on a tiny model. Other
compositions are compiled where they are used.
HF_HYPERATTN_PREBUILT, where it names levels or scores ("v3 v4 umbral"), says which of them are compiled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

NAMES = ["cpu_core"]
EXPORTED = "{ global: hyper_*; local: *; };\n"


def recorded() -> dict[str, set[str]]:
    """The readers that each score of the package is used with, by its key."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_hyperattn as ha
    from hf_hyperattn.engines import cpu, dispatch

    cones = [
        ha.ConeConfig(variant=variant, mapping=mapping, squared=squared, clamp_heights=clamp)
        for variant, mapping, squared, clamp in (
            *itertools.product(["umbral"], ["xi", "psi", "expmap"], [True], [False]),
            *itertools.product(["penumbral"], ["xi", "psi", "expmap"], [True, False], [True]),
            *itertools.product(["penumbral"], ["psi"], [True, False], [False]),
        )
    ]
    kinds = itertools.product(("geodesic", "squared_lorentz"), ("einstein", "mean"))
    distances = [
        ha.HyperbolicConfig(distance=distance, aggregation=average) for distance, average in kinds
    ]
    biases = [ha.HypeConfig(form=form, max_length=64) for form in ("sinh", "cosh")]
    mechanisms = [*cones, *distances, *biases]
    found: dict[str, set[str]] = {
        "dot": {""},
        "shared_dot": {""},
    }  # by name alone; of collaborative heads

    def note(score_key: str, capped: bool, reader: str = "") -> None:
        found.setdefault(score_key, {""}).add(reader)

    def run(mechanism, mode: str, heads: list[int] | None) -> None:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
        ha.set_backend(ha.patch_model(model, mechanism, mode=mode, heads=heads), "cpu")
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2].endswith("gate"):
                parameter.data.fill_(0.5)
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            model(ids[:, :1], past_key_values=cache)

    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    ids = torch.arange(8)[None]
    nothing_compiled = (
        patch.object(cpu.library, "load", note),
        patch.object(cpu, "log_once", lambda _: None),
    )
    with nothing_compiled[0], nothing_compiled[1], patch.dict(dispatch.RESOLVED, clear=True):
        for case in itertools.product(mechanisms, ("blend", "replace"), (None, [0])):
            run(*case)
    return found


def compile_level(
    level: str, texts: list[tuple[str, str]], sources: list[Path], made: Path
) -> None:
    """One library of C++ files and of texts, each with the name of the function that it exports."""
    from hf_hyperattn.engines import native

    compile_ = [
        *native.find_compiler(),
        *native.flags_for(native.LEVELS[level][1]),
        "-iquote",
        str(native.PACKAGE),
        "-c",
    ]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "exported")
        script.write_text(EXPORTED)
        calls = [[*compile_, str(source), "-o", f"{folder}/{source.stem}.o"] for source in sources]
        for name, text in texts:
            Path(folder, f"{name}.cpp").write_text(text, encoding="utf-8")
            calls.append(
                [
                    *compile_,
                    f"-Dhyper_score={name}",
                    f"{folder}/{name}.cpp",
                    "-o",
                    f"{folder}/{name}.o",
                ]
            )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda call: subprocess.run(call, check=True), calls))
        objects = [call[-1] for call in calls]
        # the runtime of OpenMP is the one that torch has loaded under this name
        link = ["-shared", "-s", "-fopenmp", f"-Wl,--version-script={script}", "-o", str(made)]
        subprocess.run([*native.find_compiler(), *objects, *link], check=True)


def levels() -> tuple[str, ...]:
    """The levels of the machines that the compiler compiles for.

    Raises:
        RuntimeError: there are none for these machines, or none of those that HF_HYPERATTN_PREBUILT names.
    """
    from hf_hyperattn.engines import native

    asked = subprocess.run(
        [*native.find_compiler(), "-dumpmachine"], capture_output=True, text=True, check=True
    )
    target = asked.stdout.strip()
    machine = target.partition("-")[0]
    if machine not in native.OF_MACHINES or "linux" not in target:
        allowed = ", ".join(native.OF_MACHINES)
        raise RuntimeError(
            f"{native.find_compiler()[0]} compiles for {target}; allowed: Linux on {allowed}"
        )
    found = native.OF_MACHINES[machine]
    asked_for = set(os.environ.get("HF_HYPERATTN_PREBUILT", "").split()) & native.LEVELS.keys()
    if asked_for and not asked_for & set(found):
        others, allowed = " ".join(sorted(asked_for)), ", ".join(found)
        raise RuntimeError(
            f"HF_HYPERATTN_PREBUILT={others}: {native.find_compiler()[0]} cannot; allowed: {allowed}"
        )
    return found


def wish(names: Iterable[str]) -> list[str]:
    """Those of the names that HF_HYPERATTN_PREBUILT names; all where it names none."""
    words = os.environ.get("HF_HYPERATTN_PREBUILT", "").split()
    return [name for name in names if name in words] or list(names)


def main(folder: str) -> None:
    """Write the libraries and their manifest into the package in `folder`."""
    sys.path.insert(0, folder)
    os.environ["HF_HYPERATTN_NATIVE"] = "0"
    from hf_hyperattn.engines import native
    from hf_hyperattn.engines.cpu import library
    from hf_hyperattn.engines.score import TERMS

    assert native.PACKAGE.is_relative_to(Path(folder).absolute()), native.PACKAGE
    found = recorded()
    scores, texts = {}, []
    for score_key, capped in itertools.product(sorted(wish(found)), (False, True)):
        readers = found[score_key]
        name = f"hyper_score_{len(texts)}"
        texts.append((name, library.write_source(score_key, capped, *sorted(readers))))
        for i, reader in enumerate(sorted(readers)):
            scores[library.prebuilt_name(score_key, capped, reader)] = name, i
    # what the libraries are made of: C++, and the Python that C++ is written from
    modules = {sys.modules[type(term).__module__] for term in TERMS.values()} | {library}
    files = [
        *native.PACKAGE.rglob("*.h"),
        *native.PACKAGE.rglob("*.cpp"),
        *native.PACKAGE.glob("engines/*.py"),
    ]
    files += [
        file for module in modules for file in Path(module.__file__).parent.glob("*.py")
    ]  # and their readers
    sources = sorted({file.relative_to(native.PACKAGE).as_posix() for file in files})
    native.PREBUILT.mkdir(exist_ok=True)
    digests = {}
    for level in wish(levels()):
        made = native.PREBUILT / f"{level}.so"
        compile_level(level, texts, [file for file in library.CORE if file.suffix == ".cpp"], made)
        digests[level] = hashlib.sha256(made.read_bytes()).hexdigest()
        print(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB, {len(scores)} scores")
    manifest = {"names": NAMES, "libraries": digests, "sources": sources, "scores": scores}
    manifest["fingerprint"] = native.hash_sources(sources)
    native.MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
