"""The site of the documentation: `make docs` builds it, and fails on any warning.

Pages are the Markdown files of this folder; the reference of the API is made from docstrings.
"""

import re
import sys
from pathlib import Path

from sphinx.util import logging

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_hyperattn import address  # noqa: E402

project = "hf_hyperattn"
author = "The hf_hyperattn authors"
copyright = author  # noqa: A001  Sphinx's word
version = release = address.VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own underlines the names of modules
html_title = f"hf_hyperattn {version}"
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
copybutton_prompt_text = "$ "

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Docstrings write code between single backticks, and |x| is a norm.
default_role = "literal"


#: The beginning of a list item.
ITEM = re.compile(r"(?:[-+*]|\d+[.)])\s")


def find_cut_sentences(text: str) -> list[tuple[int, str]]:
    """Return number and text of lines that Markdown takes for a comment or a list, though a sentence goes on there.

    A line that begins with % is a comment and vanishes from the page. A line that begins with +, - or a number and
    follows a line of text begins a list; leave a line empty before a list that is meant.
    """
    found, previous, is_code = [], "", False
    for number, line in enumerate(text.splitlines(), 1):
        content, before, above = line.strip(), previous.strip(), previous
        previous = line
        if content.startswith("```"):
            is_code, previous = not is_code, ""
        elif not is_code and content.startswith("%"):
            found.append((number, line))
        elif not is_code and ITEM.match(content) and before:
            is_text = not (ITEM.match(before) or before[0] in "#|<>" or before.endswith(":"))
            if is_text and line.index(content) == above.index(before):
                found.append((number, line))
    return found


#: A figure with a file for dark pages, in the form that GitHub shows by the reader's theme.
PICTURE = re.compile(
    r'<picture>\n  <source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\n'
    r'  <img src="(?P<light>[^"]+)" alt="(?P<alt>[^"]+)">\n</picture>'
)


def replace_pictures(text: str) -> str:
    """Return the page with two images for each `<picture>`, of which the site's theme shows one."""
    image = "```{{image}} {file}\n:alt: {alt}\n:class: only-{theme}\n```"

    def write_images(found: re.Match) -> str:
        return "\n\n".join(
            image.format(file=found[theme], alt=found["alt"], theme=theme)
            for theme in ("light", "dark")
        )

    return PICTURE.sub(write_images, text)


def setup(app):
    """Escape bars outside of code, which reStructuredText takes for substitutions, and prepare the pages."""

    def prepare(app, page, source):
        for number, line in find_cut_sentences(source[0]):
            logger.warning(
                "Markdown cuts a sentence here, at %r: move the first word to the line before",
                line[:40],
                location=(page, number),
            )
        source[0] = replace_pictures(source[0])

    def escape(app, what, name, obj, options, lines):
        for i, line in enumerate(lines):
            parts = line.split("`")
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[i] = "`".join(parts)

    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", escape)
