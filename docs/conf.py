"""The site of the documentation: `make docs` builds it, and fails on any warning.

Pages are the Markdown files of this folder; the reference of the API is made from docstrings.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_hyperattn import address  # noqa: E402

project = "hf_hyperattn"
author = "The hf_hyperattn authors"
copyright = author  # noqa: A001  Sphinx's word
version = release = address.VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
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


def setup(app):
    """Escape bars outside of code, which reStructuredText takes for substitutions."""

    def escape(app, what, name, obj, options, lines):
        for i, line in enumerate(lines):
            parts = line.split("`")
            parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
            lines[i] = "`".join(parts)

    app.connect("autodoc-process-docstring", escape)
