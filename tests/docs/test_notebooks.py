"""The notebooks run from top to bottom, and hold the numbers that they show, with the Python that they were made with.

They take a minute of processor time together: marker `docs`, which `make test-docs` and CI run.
"""

import json
import platform

import pytest

from tests.docs.notebooks import FOLDER, NOTEBOOKS, cells, differences, execute, lend_models

LARGEST = 200_000  # bytes of a notebook, pictures included


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_with_its_outputs(notebook):
    content = json.loads(notebook.read_text(encoding="utf-8"))
    code = [cell for cell, _ in cells(notebook)]
    assert content["nbformat"] == 4 and len({cell["id"] for cell in content["cells"]}) == len(
        content["cells"]
    )
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) > len(code) / 2
    assert notebook.stat().st_size < LARGEST


def test_every_notebook_is_named_in_the_docs():
    page = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) >= 3 and all(f"({path.name})" in page for path in NOTEBOOKS)


@pytest.mark.docs
@pytest.mark.timeout(1800)  # of a minute of processor time, where other work shares the cores
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    real = lend_models(tmp_path)
    made_with = json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["language_info"][
        "version"
    ]
    for cell, printed, figures in execute(notebook, tmp_path):
        source = "".join(cell["source"])
        assert bool(cell["outputs"]) == bool(printed or figures), source
        assert sum("data" in output for output in cell["outputs"]) == len(figures), source
        if (
            real and made_with == platform.python_version()
        ):  # of the real weights, and of the same texts: Python's library
            stored = "".join(line for output in cell["outputs"] for line in output.get("text", ()))
            assert not differences(stored, printed), source


@pytest.mark.parametrize(
    "printed, same",
    [
        ("perplexity 12.57, +1.8% ###", True),
        ("perplexity 12.56, +1.7% ####", True),
        ("perplexity 13.56, +1.7% ###", False),
        ("perplexity 12.56, -1.7% ###", False),
        ("loss 12.56, +1.7% ###", False),
        ("perplexity 12.56", False),
        ("perplexity nan, +1.7% ###", False),
    ],
)
def test_a_stale_output_is_told(printed, same):
    assert bool(differences("perplexity 12.56, +1.7% ###", printed)) != same
    ranking = [f"{n}.5" for n in range(40)]
    assert not differences(" ".join(ranking), " ".join([ranking[1], ranking[0], *ranking[2:]]))
    assert differences(" ".join(ranking), " ".join([*ranking[1:], ranking[0]]))
