"""The tables against the installed Transformers: nothing is left out, nothing is there for no reason."""

import re
from collections import Counter

import pytest
import transformers

import model_patches
from model_patches import __main__ as page
from model_patches.census import CALL, model_types, modelling_files, state
from model_patches.table import FILES

from .support import NEWEST

OTHER_CALLS = (
    "scaled_dot_product_attention(",
    "multi_head_attention_forward(",
    "nn.MultiheadAttention(",
)

# Classes that compute attention by themselves in an older supported Transformers, and no longer in the newest one.
ONLY_IN_OLDER = {"Inkling2BlockAttentionResidual"}


def test_every_model_type_is_accounted_for():
    states = {model_type: state(model_type) for model_type in model_types()}
    assert [model_type for model_type, found in states.items() if found == "unknown"] == []
    assert not model_patches.REFUSED.keys() & model_patches.FAMILIES.keys()
    if NEWEST:
        assert not {*model_patches.REFUSED, *model_patches.FAMILIES} - states.keys()
        assert Counter(states.values())["routed"] > 440


def test_families_name_files_that_exist():
    for model_type, (stem, file) in model_patches.FAMILIES.items():
        text = modelling_files()[f"modeling_{stem}"]
        routes = model_patches.family(model_type).ROUTES
        assert any(re.search(rf"^class {name}\(", text, re.MULTILINE) for name in routes), (
            stem,
            file,
        )


def own_attention(text):
    """Classes of a modelling file, with their bases, that compute attention without calling the interface."""
    for source in re.split(r"^(?=class )", text, flags=re.MULTILINE)[1:]:
        name, bases = re.match(r"class (\w+)(?:\(([^)]*)\))?", source).groups()
        source = re.split(r"^(?=def |@|[A-Z_]+ = )", source, flags=re.MULTILINE)[0]
        multiplies = re.search("matmul|einsum|bmm|@", source)
        scores = re.search("Atte?n", name) and "softmax(" in source and multiplies
        if CALL not in source and (scores or any(call in source for call in OTHER_CALLS)):
            yield name, set(re.split(r"[,\s]+", bases or ""))


def test_parts_that_stay_stock_are_named():
    """In families that call the interface, every other attention class is routed, or listed with a reason."""
    staying = set()
    for stem, text in modelling_files().items():
        file = FILES.get(stem.removeprefix("modeling_"))
        if CALL not in text and file is None:
            continue
        routes = model_patches.routes_of(file) if file else {}
        staying |= {
            name for name, bases in own_attention(text) if not routes.keys() & {name, *bases}
        }
    if NEWEST:
        assert staying == model_patches.STAYING.keys() - ONLY_IN_OLDER
    else:
        assert staying <= model_patches.STAYING.keys()


def test_dicts_of_names_are_known():
    """Where a class is picked by `config._attn_implementation` in `__init__`, a custom name fails there."""
    stems = {
        stem.removeprefix("modeling_")
        for stem, text in modelling_files().items()
        if re.search(r"_ATTENTION_CLASSES\[", text)
    }
    known = {
        "bark",
        "data2vec_vision",
        "deepseek_ocr2",
        "falcon",
        "git",
        "gpt_neo",
        "gptj",
        "sam",
        "sam_hq",
        "superglue",
        "unlimited_ocr",
    }
    assert stems <= known


@pytest.mark.parametrize(
    "model_type, name", [("falcon", "eager"), ("sam_vision_model", "eager"), ("bloom", None)]
)
def test_construct_as(model_type, name):
    assert model_patches.construct_as(model_type) == name


def test_reasons_complete_a_sentence():
    for reason in {*model_patches.REFUSED.values()}:
        assert re.match(r"(its|it) [a-z]", reason) and not reason.endswith(".")


def test_page_is_current():
    """docs/families.md is what `python -m model_patches` prints."""
    with open("docs/families.md", encoding="utf-8") as file:
        text = file.read()
    if f"Transformers {transformers.__version__}" in text:
        assert text == page.page()
