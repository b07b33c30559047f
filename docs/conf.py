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
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
exclude_patterns = ["build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say more than the types
napoleon_use_ivar = True
napoleon_attr_annotations = False  # likewise
napoleon_use_rtype = False  # what stands before a colon in Returns is no type
html_show_copyright = False


def setup(app):
  """Leaves out the fields of named tuples, which say "Alias for field number 0"."""

  def skip(app, what, name, obj, skip, options):
    return skip or type(obj).__name__ == "_tuplegetter"

  app.connect("autodoc-skip-member", skip)
