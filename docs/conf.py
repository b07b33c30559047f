"""Sphinx settings; `make docs` builds strictly, so that a broken reference fails."""

import html
import math
import os
import pathlib
import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
import jax
import optax
from PIL import Image
from sphinx.util import logging
from sphinx.util.typing import stringify_annotation
from sphinx.writers.html5 import HTML5Translator

import optax_boost

project = "optax_boost"
author = "The optax_boost authors"
release = version = optax_boost.__version__
extensions = [
  "myst_nb",
  "sphinx.ext.autodoc",
  "sphinx.ext.intersphinx",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "sphinx_copybutton",
  "sphinx_design",
]
# Machines without a way out build the pages, too, with no links to others' pages.
intersphinx_mapping = (
  {
    "jax": ("https://docs.jax.dev/en/latest/", None),
    "optax": ("https://optax.readthedocs.io/en/latest/", None),
    "flax": ("https://flax.readthedocs.io/en/latest/", None),
    "orbax": ("https://orbax.readthedocs.io/en/latest/", None),
  }
  if "READTHEDOCS" in os.environ
  else {}
)
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_math_renderer = "mathml"  # browsers show it without a script from elsewhere
pygments_dark_style = "github-dark"  # the theme's own underlines modules and classes, like links
html_title = f"optax_boost {release}"
html_static_path = ["_static"]
html_css_files = ["layout.css"]
html_show_sourcelink = False
exclude_patterns = ["build", "reference/README.md"]  # the latter is for readers of the repository
myst_enable_extensions = ["colon_fence"]  # tabs around blocks of code
myst_heading_anchors = 3
# `make docs` executes the notebooks; other builds show the outputs that they store.
nb_execution_mode = "force" if "READTHEDOCS" in os.environ else "off"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_merge_streams = True
nb_render_markdown_format = "myst"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_attr_annotations = False  # likewise
napoleon_use_ivar = True
napoleon_use_rtype = False  # the text before a colon in Returns is no type
html_show_copyright = False
toc_object_entries_show_parents = "hide"

SMALLEST_TEXT = 9  # pixels of a screen, in a picture as it is shown
PHONE = 60  # characters side by side in a table that fits a phone of 390 pixels
SCREEN = 350  # pixels of a phone for a picture
FIRST = 22  # characters of the first column, whose text goes on in the next line
LONG = 24  # characters of code in a table that stay in one line
FIGURE = re.compile(r"[-+]?[\d.,e-]+( ± [\d.e-]+)?( %)?")  # in a table; stays in one line
RESULTS = pathlib.Path(__file__).parent.parent / "benchmarks" / "results"
# The page of a table of benchmarks/results.
RESULT = """(results-{0})=
```{{include}} ../../benchmarks/results/{0}.md
:relative-images:
```
"""


def hide_tuple_fields(app, what, name, obj, skip, options):
  """Leaves out the fields of named tuples, which say "Alias for field number 0"."""
  return skip or type(obj).__name__ == "_tuplegetter"


# The names that JAX and optax have for these unions, longest first.
UNIONS = {
  stringify_annotation(union, "smart"): name
  for union, name in (
    (optax.Params, "ArrayTree"),
    (optax.ScalarOrSchedule, "optax.ScalarOrSchedule"),
    (jax.typing.ArrayLike, "jax.typing.ArrayLike"),
    (jax.typing.DTypeLike, "jax.typing.DTypeLike"),
  )
}
# `<class 'jax.numpy.float32'>`, `<function zeros at 0x7f>`, `<factory>`
DEFAULT = re.compile(
  r"<(?:class|function) '?([\w.]+?)(?:\.<locals>\.\w+)?'?(?: at \w+)?>"
  r"|<(?:factory|[\w.]+ object[^>]*)>"
)


def shorten(app, what, name, obj, options, signature, result):
  """Writes unions of types by the name that JAX or optax gives them, and defaults as in code."""
  for union, short in UNIONS.items():
    signature, result = (text and text.replace(union, short) for text in (signature, result))
  # A signature that isn't Python would be shown as it is, with the marks of Sphinx.
  return signature and DEFAULT.sub(lambda default: default[1] or "...", signature), result


def write_results(app):
  """Writes a page for each table of benchmarks/results into docs/results, which git ignores."""
  folder = pathlib.Path(app.srcdir) / "results"
  folder.mkdir(exist_ok=True)
  for page in folder.glob("*.md"):
    if not (RESULTS / page.name).exists():
      page.unlink()
  for path in RESULTS.glob("*.md"):
    page = folder / path.name
    if not page.exists():
      page.write_text(RESULT.format(path.stem), encoding="utf-8")


def link(app, docname, source):
  """Makes links that hold in the repository hold in the pages, which lie elsewhere."""
  text = source[0]
  text = re.sub(r"\]\([./]*benchmarks/results/(\w+)\.md\)", r"](#results-\1)", text)
  names = re.search(r"^- \*\*API:\*\* .*", text, re.MULTILINE)
  if names and docname.startswith("cards/"):
    text = text.replace(names[0], re.sub(r"`(.+?)`", r"{py:obj}`\1 <optax_boost.\1>`", names[0]), 1)
  source[0] = text


def show_picture(translator, node):
  """Shows a picture at a width where its text can be read, in a box that scrolls, as a link."""
  start, file = len(translator.body), translator.builder.srcdir / node["uri"]
  HTML5Translator.visit_image(translator, node)
  if file.suffix == ".png":
    with Image.open(file) as image:
      # A notebook's picture doesn't say how large its text is: Matplotlib's 10 points.
      default = image.info.get("dpi", (72, 72))[0] * 10 / 72
      text = float(image.info.get("smallest text, px", default))
      width = math.ceil(image.width * min(1, SMALLEST_TEXT / text))
    style = f'<img style="min-width: {width}px"'
    shown = "".join(translator.body[start:]).strip().replace("<img", style)
    kind = "picture wide" if width > SCREEN else "picture"
    translator.body[start:] = [f'<a class="{kind}" href="{node["uri"]}">{shown}</a>']


def arrange_tables(app, doctree, docname):
  """Gives cells their column's heading, with which a phone shows wide tables as lists of rows."""
  for table in doctree.findall(nodes.table):
    heads, rows = (
      [row for group in table.findall(kind) for row in group] for kind in (nodes.thead, nodes.tbody)
    )
    cells = list(table.findall(nodes.entry))
    if len(heads) != 1 or any("morecols" in cell or "morerows" in cell for cell in cells):
      continue
    labels = [cell.astext() for cell in heads[0]]
    columns = [[cell.astext() for cell in column] for column in zip(*rows, strict=True)]
    widths = [
      max(map(len, [*texts, *label.split()])) for label, texts in zip(labels, columns, strict=True)
    ]
    if min(widths[0], FIRST) + sum(widths[1:]) + 2 * len(widths) > PHONE:
      table["classes"].append("rows")
    for row in rows:
      for label, cell in zip(labels, row, strict=True):
        cell["label"] = label if label.endswith("?") or not label else f"{label}:"
        if not cell.astext():
          cell["classes"].append("empty")
        elif FIGURE.fullmatch(cell.astext()):
          cell["classes"].append("figure")
    for code in table.findall(nodes.literal):
      wrap_long(code)


def wrap_long(code):
  """Lets long code in a table go on in the next line after a space, a slash or a parenthesis."""
  text = code.astext()
  if len(text) > LONG:
    code["classes"].append("long")
    parts = re.split(r"(?<=[(/])(?=\w)", text)
    code.children = []
    for part in parts:
      code += [nodes.raw("", "<wbr>", format="html")] * bool(code.children) + [nodes.Text(part)]


# In `0.5 ± 0.1 %` and in `[0.4, 0.6]`.
INSIDE_FIGURE = re.compile(r"(?<=\d) (?=[±%])|(?<=±) (?=\d)|(?<=\d,) (?=[-\d.]+\])")


def keep_figures_whole(app, doctree, docname):
  """Keeps a figure with its spread, interval and sign of percent in one line."""
  for text in list(doctree.findall(nodes.Text)):
    if not isinstance(text.parent, (nodes.literal, nodes.math, nodes.FixedTextElement, nodes.raw)):
      text.parent.replace(text, nodes.Text(INSIDE_FIGURE.sub("\N{NO-BREAK SPACE}", text)))


def show_math(translator, node):
  """Writes a formula as MathML, with the commands of TeX that docutils knows."""
  block = isinstance(node, nodes.math_block)
  # On a phone the parts of a block go on in the next line.
  parts = node.astext().split(r"\qquad") if block else [node.astext()]
  try:
    parts = [latex2mathml.tex2mathml(part, as_block=block) for part in parts]
  except MathError as error:
    logging.getLogger(__name__).warning("formula: %s", error, location=node)
  shown = "</span> <span>".join(parts)
  translator.body.append(f'<div class="formula"><span>{shown}</span></div>' if block else shown)
  raise nodes.SkipNode


ROLES = {
  nodes.table: "table",
  nodes.thead: "rowgroup",
  nodes.tbody: "rowgroup",
  nodes.row: "row",
  nodes.entry: "cell",
}


def show_part(translator, node):
  """Writes a part of a table with its role, which some browsers drop if CSS makes it a block."""
  start, role = len(translator.body), ROLES[type(node)]
  getattr(HTML5Translator, f"visit_{node.tagname}")(translator, node)
  if role == "cell" and isinstance(node.parent.parent, nodes.thead):
    role = "columnheader"
  label = f' data-label="{html.escape(node["label"])}"' if node.get("label") else ""
  tag = "".join(translator.body[start:])
  translator.body[start:] = [re.sub(r"<(t\w+)", rf'<\1 role="{role}"{label}', tag, count=1)]


def setup(app):
  """Connects the functions above."""
  app.connect("builder-inited", write_results)
  app.connect("autodoc-process-signature", shorten)
  app.connect("autodoc-skip-member", hide_tuple_fields)
  app.connect("source-read", link)
  app.connect("doctree-resolved", arrange_tables)
  app.connect("doctree-resolved", keep_figures_whole)
  app.add_html_math_renderer("mathml", (show_math, None), (show_math, None))
  for kind in ROLES:
    depart = getattr(HTML5Translator, f"depart_{kind.__name__}")
    app.add_node(kind, override=True, html=(show_part, depart))
  app.add_node(nodes.image, override=True, html=(show_picture, HTML5Translator.depart_image))
