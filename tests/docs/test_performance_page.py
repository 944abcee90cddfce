"""The first tables of docs/performance.md hold the numbers of the result files."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split("<!-- results -->")[0]
ZEN_4 = "attention-amd-epyc-family-25-model-17-avx512_bf16"
OTHER_EPYC = "attention-amd-epyc"
H100 = "attention-nvidia-h100-80gb-hbm3"
SUBJECTS = {
    "cone, umbral": "umbral",
    "cone, penumbral": "penumbral",
    'dot product + cone (`mode="blend"`)': "blend",
    "HyPE": "hype",
    "squared Lorentz distance": "squared_lorentz",
    "geodesic distance": "geodesic",
    "geodesic distance, Einstein midpoint": "geodesic+einstein",
    "*dot product on our kernel, for comparison*": "dot",
}


def read_rows(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def read_table(heading: str, first_header: str) -> list[list[str]]:
    """Return the cells of the table under `heading` whose first header is `first_header`."""
    section = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(heading + "\n"))
    lines = text[text.index(f"| {first_header} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def find_median(rows: dict, key: str) -> str:
    return f"{rows[key]['median']:.2f}" if key in rows and rows[key]["status"] == "ok" else "–"


def test_attention_on_a_cpu():
    table = read_table("Attention on a CPU", "Score")
    assert {row[0] for row in table} == set(SUBJECTS)
    for label, *cells in table:
        keys = [
            f"{SUBJECTS[label]} | cpu | {kind} 1x8x2048x64 full fp32 1t"
            for kind in ("forward", "training")
        ]
        assert cells == [
            find_median(read_rows(file), key) for file in (ZEN_4, OTHER_EPYC) for key in keys
        ], label


def test_gpu():
    rows = read_rows(H100)
    for label, *cells in read_table("GPU", "Score"):
        found = []
        for kind in ("forward", "training"):
            row = rows[f"{SUBJECTS[label]} | triton | {kind} 8x32x2048x64 causal bf16 cuda"]
            found += [f"{row['median']:.2f}", f"{row['limit']:.2f}"]
        assert cells == found, label


def test_whole_models():
    rows = read_rows(ZEN_4)
    tasks = {
        "SmolLM2-135M, prefill of 2,048 tokens": ("SmolLM2-135M", "prefill 1x9x2048x64 causal"),
        "SmolLM2-135M, one generated token after 2,048": (
            "SmolLM2-135M",
            "decode 1x9x2048x64 causal",
        ),
        "MiniLM-L6, 8 texts of 256 tokens": ("MiniLM-L6", "encode 8x12x256x32 full"),
    }
    for label, *cells in read_table("Whole models", "Model and task"):
        model, task = tasks[label]
        names = ("cone", "cone_penumbral", "hyperbolic", "hype")
        assert cells == [
            find_median(rows, f"{model} | {name} | {task} fp32 1t") for name in names
        ], label


def test_sparse_rules():
    rows = json.loads((RESULTS / "sparse-chosen.json").read_text())["rows"]
    measured = [(f"{r['pairs']:.0%}".replace("%", " %"), f"{r['over_sdpa']:.2f}") for r in rows]
    table = read_table("Whole models", "Task")
    assert len(table) == 4
    for label, *cells in table:
        assert tuple(cells) in measured, label


def test_blockwise_against_the_kernels():
    rows = read_rows(ZEN_4)
    ratios = [
        row["median"] / rows[key.replace("blockwise", "cpu")]["median"]
        for key, row in rows.items()
        if "| blockwise | " in key
        and not key.startswith("dot ")
        and "1x8x2048x64 full fp32 1t" in key
    ]
    text = PAGE.replace("\n", " ")
    assert (
        f"PyTorch takes {min(ratios):.1f} to {max(ratios):.1f} times as long as the kernels" in text
    )
