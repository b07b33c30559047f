"""Sphinx settings; `make docs` builds strictly, so that a broken reference fails."""

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
exclude_patterns = ["build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more than the types
napoleon_use_ivar = True
