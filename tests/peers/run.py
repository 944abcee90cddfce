"""`make peers`: the suites of Transformers and PEFT on stock and on patched models; resumable; writes docs/peers.md.

Every part (a suite, a family or method, a mechanism) is one run of pytest, kept in a cache folder named after the
versions and the sources. Exit status 1 where a test fails on a patched model that passes on the stock one, and
`expected.json` does not say why it must.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

from .source import FOLDER

ROOT = Path(__file__).parents[2]
PARTS = {
    "transformers": ("llama", "gpt2", "bert", "vit", "whisper"),
    "peft": (
        "LoRA",
        "DoRA",
        "rsLoRA",
        "PiSSA",
        "AdaLoRA",
        "IA3",
        "VeRA",
        "LoHa",
        "LoKr",
        "OFT",
        "LN tuning",
        "prompt",
    ),
}
MECHANISMS = (
    "cone",
    "hyperbolic",
    "hype",
    "hsa",
    "head_fusion",
    "talking_heads",
    "mkl",
    "trilinear",
)
ABOUT = """\
How many of the tests of Transformers and PEFT that pass on a stock model also pass on a patched one? All but those
listed [below](#what-must-fail), each with its reason. `make peers` ran the tests and wrote this page. It fails if
another test fails.

- **Transformers**: the common tests, on tiny models of five families that patch themselves when they are built. Tests
  of generation are left out. Tests of exporters are not in Transformers' archive: they run if `TRANSFORMERS_SOURCE`
  names a checkout, which was not tried.
- **PEFT**: the common tests, method by method, on a patched Llama.
- All added parameters are moved away from their start.
- Families and methods without a row, and cells with –, were not run."""
#: Test -> why it cannot pass on a patched model; a key may end in a mechanism or a part, after a space.
EXPECTED: dict[str, str] = json.loads((Path(__file__).parent / "expected.json").read_text())


def fingerprint() -> str:
    digest = hashlib.sha256(
        " ".join(version(name) for name in ("torch", "transformers", "peft")).encode()
    )
    digest.update(
        repr([os.environ.get(name) for name in ("TRANSFORMERS_SOURCE", "PEFT_SOURCE")]).encode()
    )
    for folder in ("hf_hyperattn", "model_patches", "tests/peers"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.name != "run.py":
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def outcomes(suite: str, part: str, mechanism: str, folder: Path) -> dict[str, str]:
    """Test -> "passed", "failed" or "skipped", of one run of pytest or of an earlier one."""
    kept = folder / f"{suite} {part} {mechanism}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    print(f"{suite}, {part}, {mechanism}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "report.xml"
        line = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"tests/peers/{suite}_suite.py",
            f"--junitxml={report}",
        ]
        line += [
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "-k",
            "Test_" + re.sub(r"\W", "_", part),
        ]
        line += ["--override-ini", "addopts=--import-mode=importlib", "--timeout", "300"]
        environment = {"HYPERATTN_PEERS": mechanism, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
        )
        if not report.is_file():
            raise RuntimeError(
                f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        found: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            now = (
                "failed"
                if kinds & {"failure", "error"}
                else "skipped"
                if "skipped" in kinds
                else "passed"
            )
            name = case.get("name") or ""
            found[name] = (
                "failed" if "failed" in (now, found.get(name)) else now
            )  # a row for every subtest
    if not found:
        raise RuntimeError(f"no test ran: {done.stdout[-2000:]}")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found, indent=1))
    return found


def is_cached(suite: str, part: str, mechanism: str, folder: Path) -> bool:
    """Whether a part was run before."""
    return (folder / f"{suite} {part} {mechanism}.json").is_file()


def short(test: str) -> str:
    """The name of a test without its parameters; of PEFT's, of which it is one."""
    name, _, parameter = test.partition("[")
    return parameter.rstrip("]") if name == "test" else name


def reason(test: str, part: str, mechanism: str) -> str | None:
    """Why a test must fail on a patched model; None where it should pass."""
    name = short(test)
    return next(
        (
            EXPECTED[key]
            for key in (f"{name} {mechanism}", f"{name} {part}", name)
            if key in EXPECTED
        ),
        None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", default="transformers,peft")
    parser.add_argument(
        "--parts", default="", help="families and methods, by commas (default: all)"
    )
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS))
    parser.add_argument(
        "--cached", action="store_true", help="write the page from earlier runs; run nothing"
    )
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "peers.md")
    options = parser.parse_args()
    folder, new, rows, notes = FOLDER / "results" / fingerprint(), [], {}, {}
    mechanisms = options.mechanisms.split(",")
    for suite in options.suites.split(","):
        for part in [p for p in PARTS[suite] if not options.parts or p in options.parts.split(",")]:
            if options.cached and not any(
                is_cached(suite, part, mechanism, folder) for mechanism in mechanisms
            ):
                continue
            stock = outcomes(suite, part, "stock", folder)
            for mechanism in mechanisms:
                if options.cached and not is_cached(suite, part, mechanism, folder):
                    rows.setdefault(suite, {}).setdefault(part, []).append("–")
                    continue
                patched = outcomes(suite, part, mechanism, folder)
                failed = [
                    t
                    for t, o in stock.items()
                    if o == "passed" and patched.get(t, "missing") != "passed"
                ]
                for test in failed:
                    why = reason(test, part, mechanism)
                    new += (
                        []
                        if why
                        else [
                            f"{suite}, {part}, {mechanism}: {test} {patched.get(test, 'is missing')}"
                        ]
                    )
                    notes.setdefault(why or "**new**", set()).add(short(test))
                passed = sum(o == "passed" for o in stock.values())
                rows.setdefault(suite, {}).setdefault(part, []).append(
                    f"{passed - len(failed)}/{passed}"
                )
    options.report.write_text(page(mechanisms, rows, notes))
    print("\n".join(new) or "nothing fails that passes on stock models, but for what is expected")
    return 1 if new else 0


def page(mechanisms: list[str], rows: dict, notes: dict) -> str:
    """docs/peers.md."""
    lines = [
        "# Tests of Transformers and PEFT",
        "",
        ABOUT,
        "",
        ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft")) + ".",
    ]
    for suite, parts in rows.items():
        head = "family" if suite == "transformers" else "method"
        lines += [
            "",
            f"## {suite.replace('peft', 'PEFT').replace('transformers', 'Transformers')}",
            "",
        ]
        lines += [f"| {head} | {' | '.join(mechanisms)} |", "| --- |" + " --- |" * len(mechanisms)]
        lines += [f"| {part} | {' | '.join(cells)} |" for part, cells in parts.items()]
    lines += ["", "## What must fail", ""]
    for why, tests in sorted(notes.items()):
        lines.append(f"- {', '.join(f'`{t}`' for t in sorted(tests))}: {why}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
