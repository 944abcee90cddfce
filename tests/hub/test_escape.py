"""Strings from a stranger's config.json stay strings: no link, no tag, no table cell, no second header."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hub_cards
from hub_cards.escape import code, literal, text

from .metadata import card_errors, read_header
from .samples import ADAPTER, RESULT, SPEC

markdown_it = pytest.importorskip(
    "markdown_it", reason="markdown-it-py (it comes with rich) reads the cards"
)
READER = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
HOSTILE = [
    "cone\n---\nlicense: mit\n---\n# Owned",
    "x](https://evil.example) [y",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a | b | c",
    "`` ` ``` `",
    "{{ 7 * 7 }}{% raw %}",
    "\u202edrowssap\u200b\x00\x1b[31m",
    "![i](http://evil.example/i.png)",
    "--> <!--",
    "key: [unclosed",
    "&lt;b&gt;",
    "\\| \\` \\",
    "x" * 5000,
]


def shape(card) -> dict:
    """What a reader of the card sees as structure: headings, links, HTML, cells per row."""
    tokens = READER.parse(card.text)
    inline = [child for token in tokens for child in token.children or []]
    tags = {child.content for child in inline if child.type == "html_inline"}
    return {
        "headings": sum(token.type == "heading_open" for token in tokens),
        "links": {child.attrs["href"] for child in inline if child.type == "link_open"},
        "images": sum(child.type == "image" for child in inline),
        "tags": tags - {"<code>", "</code>"},
        "blocks": sum(token.type == "html_block" for token in tokens),
        "cells": sum(token.type in ("td_open", "th_open") for token in tokens),
    }


def cards(value: str, place: str):
    """A model card and an adapter card with ``value`` in one place."""
    spec = json.loads(json.dumps(SPEC))
    if place == "mechanism":
        spec["mechanisms"][0]["mechanism"] = value
    elif place == "setting":
        spec["mechanisms"][0]["variant"] = value
    elif place == "setting name":
        spec["mechanisms"][0][value] = 1
    elif place == "host":
        spec["hosts"] = [value]
    elif place in ("mode", "heads"):
        spec[place] = value
    adapter = ADAPTER | ({"target_modules": [value]} if place == "adapter" else {})
    about = {"cone": {}, "toy": {}}
    result = RESULT | (
        {"dataset": value, "machine": value, "notes": value} if place == "result" else {}
    )
    facts = {"results": [result], "about": about, "tags": [value] if place == "tag" else []}
    yield hub_cards.render_model_card(spec, "org/base", "mit", **facts)
    yield hub_cards.render_adapter_card(spec, "org/base", "mit", adapter=adapter, **facts)


def check(value: str, place: str) -> None:
    for card, plain in zip(cards(value, place), cards("harmless", place), strict=True):
        assert card_errors(str(card)) == []
        header, expected = read_header(str(card)), read_header(str(plain))
        assert header.keys() == expected.keys() and header["license"] == "mit"
        seen, wanted = shape(card), shape(plain)
        assert seen == wanted
        assert not seen["links"] and not seen["images"] and not seen["tags"]


PLACES = [
    "mechanism",
    "setting",
    "setting name",
    "host",
    "mode",
    "heads",
    "adapter",
    "result",
    "tag",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_string_changes_nothing_but_its_own_place(value, place):
    check(value, place)


@settings(max_examples=60, deadline=None)
@given(
    value=st.text(min_size=1, max_size=40).filter(lambda s: s.strip()),
    place=st.sampled_from(PLACES[1:6]),
)
def test_any_string_changes_nothing_but_its_own_place(value, place):
    check(value, place)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_text_code_and_literals_show_one_line(value):
    for made in (text(value), code(value), literal(value)):
        assert "\n" not in made and "\r" not in made
    assert isinstance(json.loads(literal(value)), str)
    (inline,) = [t for t in READER.parse("x " + text(value)) if t.type == "inline"]
    assert {child.type for child in inline.children} <= {"text", "text_special"}
