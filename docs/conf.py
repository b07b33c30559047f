"""Sphinx settings; `make docs` builds strictly, so that a broken reference fails."""

import pathlib
import re

import optax_boost

project = "optax_boost"
author = "The optax_boost authors"
release = version = optax_boost.__version__
extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.mathjax",
  "sphinx.ext.napoleon",
]
html_theme = "furo"
html_title = "optax_boost"
html_static_path = ["_static"]
html_css_files = ["layout.css"]
html_show_sourcelink = False
exclude_patterns = ["build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more than the types
napoleon_attr_annotations = False  # likewise
napoleon_use_ivar = True
napoleon_use_rtype = False  # the text before a colon in Returns is no type
html_show_copyright = False
toc_object_entries_show_parents = "hide"

RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
INCLUDE = """
(results-{0})=
```{{include}} ../benchmarks/results/{0}.md
:heading-offset: 1
:relative-images:
```
"""


def hide_tuple_fields(app, what, name, obj, skip, options):
  """Leaves out the fields of named tuples, which say "Alias for field number 0"."""
  return skip or type(obj).__name__ == "_tuplegetter"


def link(app, docname, source):
  """Makes links that hold in the repository hold in the pages, which lie elsewhere."""
  text = source[0]
  if docname == "results":
    text += "".join(INCLUDE.format(path.stem) for path in sorted(RESULTS.glob("*.md")))
  text = re.sub(r"\]\([./]*benchmarks/results/(\w+)\.md\)", r"](#results-\1)", text)
  names = re.search(r"^- \*\*API:\*\* .*", text, re.MULTILINE)
  if names and docname.startswith("cards/"):
    text = text.replace(names[0], re.sub(r"`(.+?)`", r"{py:obj}`\1 <optax_boost.\1>`", names[0]), 1)
  source[0] = text


def setup(app):
  """Connects the two functions above."""
  app.connect("autodoc-skip-member", hide_tuple_fields)
  app.connect("source-read", link)
