"""Every Python block of the docs runs, in order, page by page; every page is linked."""

import ast
import inspect
import json
import operator
import pathlib
import re
import runpy

import pytest

import optax_boost
import optax_boost.linen
import optax_boost.nnx
from tests.house import pages

DOCS = pathlib.Path(__file__).parents[2] / "docs"
# `build` and `results` are made with the pages.
MADE = {"build", "results"}
PAGES = sorted(p for p in DOCS.rglob("*.md") if not MADE & set(p.relative_to(DOCS).parts))
CARDS = sorted(p for p in (DOCS / "cards").glob("*.md") if p.name != "index.md")
FORMS = ("NNX", "Linen", "JAX", "Equinox")

# tests/house/test_migration.py and tests/sgperm/test_sgperm.py run these, and read what comes out.
RUN_ELSEWHERE = ("mindspore.md", "sgperm.md")
RUN = {
  f"{page.relative_to(DOCS)}" + (f"-{form}" if form else ""): blocks
  for page in PAGES
  if page.parent.name != "migrating" or page.name not in RUN_ELSEWHERE
  for form, blocks in pages.programs(page).items()
  if blocks
}
# `make test` runs the first form of each page, and all forms of the quick start.
FIRST = {program.rpartition(".md")[0]: program for program in reversed(RUN)}


def test_a_tab_and_the_blocks_outside_of_tabs_are_a_separate_program(tmp_path):
  page = tmp_path / "page.md"
  block = "```python\n{}\n```\n"
  tab = ":::{{tab-item}} {}\n:sync: {}\n" + block + ":::\n"
  tabs = tab.format("NNX", "nnx", "b") + tab.format("JAX", "jax", "c")
  page.write_text(block.format("a") + f"::::{{tab-set}}\n{tabs}::::\n" + block.format("d"))
  assert pages.programs(page) == {"NNX": ["a\n", "b\n", "d\n"], "JAX": ["a\n", "c\n", "d\n"]}


@pytest.mark.parametrize(
  "program",
  [
    program
    if program in FIRST.values() or program.startswith("quickstart")
    else pytest.param(program, marks=pytest.mark.slow)
    for program in RUN
  ],
)
def test_the_code_of_a_page_runs(program):
  namespace = {}
  for code in RUN[program]:
    exec(compile(code, program, "exec"), namespace)


@pytest.mark.parametrize("program", RUN)
def test_names_and_arguments_in_the_code_of_a_page_exist(program):
  tree = ast.parse("".join(RUN[program]))
  modules = {}
  for node in tree.body:
    if isinstance(node, ast.Import | ast.ImportFrom):
      exec(ast.unparse(node), modules)

  def found(node):
    """The function or module that a dotted name of the imports stands for; None for other code."""
    if isinstance(node, ast.Name):
      return modules.get(node.id)
    owner = found(node.value) if isinstance(node, ast.Attribute) else None
    return getattr(owner, node.attr) if inspect.ismodule(owner) else None

  for node in ast.walk(tree):
    function = found(node.func) if isinstance(node, ast.Call) else found(node)
    if isinstance(node, ast.Call) and getattr(function, "__module__", "").startswith("optax_boost"):
      inspect.signature(function).bind_partial(**{k.arg: None for k in node.keywords if k.arg})


SETS = re.compile(r"^::::\{tab-set\}\n(.*?)^::::$", re.MULTILINE | re.DOTALL)
TABS = re.compile(r"^:::\{tab-item\} (.*)\n:sync: (.*)\n", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_tabs_switch_together(page):
  text = page.read_text(encoding="utf-8")
  sets = [TABS.findall(tabs) for tabs in SETS.findall(text)]
  assert sum(map(len, sets)) == text.count("{tab-item}")
  for tabs in sets:
    assert set(tabs) <= {(form, form.lower()) for form in FORMS}


HEADINGS = (
  "When to use it, and when not",
  "Code",
  "Knobs",
  "Cost",
  "Distributed",
  "Composes with",
  "Measured",
  "Differences from the original",
  "References",
)


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.stem)
def test_a_card_says_all_that_a_card_must(card):
  text = card.read_text(encoding="utf-8")
  found = re.findall("^## (.*)$", text, re.MULTILINE)
  assert not set(HEADINGS) - set(found)


README = DOCS.parent / "README.md"
# A figure has two digits, a point or an exponent. Names (`ResNet-50`) and powers don't count; what
# stands after ± or in an interval belongs to the figure before it.
_FIGURE = re.compile(r"(?<![\w.#^*/-])(?:\d[\d,]*[.\d]\d*(?:e[+-]?\d+)?|\de[+-]?\d+)(?!\w)")
_NOT_PROSE = re.compile(
  r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|^ *\|.*$|\[\d{4}\.\d{5}\]|± [\d.]+|\[[\d., ]+\]",
  re.MULTILINE | re.DOTALL,
)


def figures(text):
  """The figures of each paragraph or item, without code, links and tables."""
  return [_FIGURE.findall(part) for part in re.split(r"\n\s*\n|\n(?=- )", _NOT_PROSE.sub("", text))]


def test_figures_are_counted_without_names_tables_and_intervals():
  text = (
    "ResNet-50 at L + 1: 0.58 [0.50, 0.62] or 1e-6, not 97.3 ± 0.2 % of `x[10]`.\n- 1,024\n| 99 |"
  )
  assert figures(text) == [["0.58", "1e-6", "97.3"], ["1,024"]]


@pytest.mark.parametrize("card", CARDS, ids=lambda p: p.stem)
def test_a_card_has_at_most_one_figure_a_paragraph_before_its_measurements(card):
  above, measured, _ = card.read_text(encoding="utf-8").partition("\n## Measured\n")
  assert measured
  assert not [found for found in figures(above) if len(found) > 1], "move them below 'Measured'"


def test_readme_is_one_screen_before_its_first_program():
  above, program, _ = README.read_text(encoding="utf-8").partition("```python")
  assert program
  text = re.sub(r"!\[[^]]*\]\([^)]*\)|\]\([^)]*\)|[`*|#\[]|---", " ", above)
  assert len(text.split()) <= 180
  assert len(re.findall(r"\b\d[\d.,]*", text)) <= 8
  assert above.index("![") < above.index("|")


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda p: str(p.relative_to(DOCS.parent)))
def test_a_relative_link_leads_to_a_file(page):
  links = re.findall(r"\]\((?!https://|#)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
  missing = [link for link in links if not (page.parent / link).exists()]
  assert not missing


def test_the_reference_has_every_public_name_once():
  reference = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.md"))
  documented = re.findall(r"^\.\. auto\w+:: (\S+)", reference, re.M)
  public = {f"optax_boost.{name}" for name in optax_boost.__all__}
  for module in (optax_boost.nnx, optax_boost.linen):
    public |= {f"{module.__name__}.{name}" for name in module.__all__}
  assert sorted(documented) == sorted(public)


def test_readme_and_pages_have_the_parts_that_the_cards_headers_make():
  for path, expected in runpy.run_path(str(DOCS / "card_tables.py"))["pages"]().items():
    assert path.is_file(), f"no {path}: run `python docs/card_tables.py`"
    assert path.read_text(encoding="utf-8") == expected, f"{path}: run `python docs/card_tables.py`"


def test_the_page_for_choosing_has_the_wishes_of_the_tables_in_their_order():
  script = runpy.run_path(str(DOCS / "card_tables.py"))
  text = (DOCS / "choosing.md").read_text(encoding="utf-8")
  bold = re.findall(r"^- \*\*(.*?)\*\*", text, re.MULTILINE)
  assert bold == [script["caption"](wish) for wish in script["WISHES"]]


@pytest.mark.parametrize(
  "page", [README, DOCS / "index.md", DOCS / "choosing.md"], ids=lambda p: p.stem
)
def test_no_cell_of_a_table_is_longer_than_25_words(page):
  text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
  cells = re.findall(r"(?<=\|)[^|\n]+(?=\|)", text)
  assert cells
  assert not [cell for cell in cells if len(cell.split()) > 25]


def test_a_card_without_a_header_is_refused_with_the_form_it_needs(tmp_path):
  script = runpy.run_path(str(DOCS / "card_tables.py"))
  (tmp_path / "method.md").write_text("# `method`\n\n**Verdict:** helps.\n", encoding="utf-8")
  with pytest.raises(ValueError, match=r"method.md must begin with its header"):
    script["read_cards"](tmp_path)


@pytest.mark.parametrize(
  "rows",
  ["", "| `count` | `skip_spikes` | int32, steps | none |", "| `count` | method | int32: a | b |"],
)
def test_metrics_in_another_form_are_refused_with_the_form_they_need(tmp_path, rows):
  script = runpy.run_path(str(DOCS / "card_tables.py"))
  text = (DOCS / "cards" / "average_params.md").read_text(encoding="utf-8")
  (row,) = re.findall(r"\| `average_params/snapshot_count` .*\n", text)
  (tmp_path / "method.md").write_text(text.replace(row, rows and f"{rows}\n"), encoding="utf-8")
  with pytest.raises(ValueError, match=r"method.md: the section 'Metrics' must be a table"):
    script["read_cards"](tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_a_picture_has_a_description_for_readers_who_cannot_see_it(page):
  for text in re.findall(r"!\[(.*?)\]\(", page.read_text(encoding="utf-8"), re.DOTALL):
    assert len(text) > 20


def documented_objects():
  """The public objects, and the methods and properties of the classes among them."""
  for module in (optax_boost, optax_boost.nnx, optax_boost.linen):
    for name in module.__all__:
      yield name, getattr(module, name)
      if inspect.isclass(getattr(module, name)):
        own = vars(getattr(module, name)).items()
        yield from ((f"{name}.{member}", value) for member, value in own if member[0] != "_")


MATH = re.compile(r":math:`([^`]*)`|^( *)\.\. math::\n((?:\2  .*\n)+)", re.MULTILINE)


def test_docutils_knows_the_tex_of_every_formula():
  latex2mathml = pytest.importorskip("docutils.utils.math.latex2mathml")
  formulas = [
    (name, inline or block)
    for name, value in documented_objects()
    for inline, _, block in MATH.findall(getattr(value, "__doc__", None) or "")
  ]
  assert len(formulas) > 30
  for name, formula in formulas:
    try:
      latex2mathml.tex2mathml(formula)
    except Exception as error:
      raise AssertionError(f"{name}: {formula}") from error
    # It reads `12` and `(` as the parts of `\frac12 (`.
    assert not re.search(r"frac[^{]|[_^]\d\w", formula), f"{name}: {formula}: write braces"


def test_the_description_of_a_property_has_no_colon_before_which_sphinx_reads_a_type():
  properties = [(name, value) for name, value in documented_objects() if type(value) is property]
  assert properties
  assert not [name for name, value in properties if ":" in value.__doc__.partition("\n")[0]]


def test_the_first_line_about_a_result_has_no_colon_before_which_sphinx_reads_a_type():
  for name, value in documented_objects():
    found = re.search(r"\n *Returns:\n(.*)", getattr(value, "__doc__", None) or "")
    # Sphinx reads the colons of a role as its own.
    text = re.sub(r":\w+:`[^`]*`|``[^`]*``", "", found[1]) if found else ""
    assert ":" not in text, f"{name}: {text}"


def test_every_transformation_has_a_card():
  from tests.contract import registry

  cards = "".join(card.read_text(encoding="utf-8") for card in CARDS)
  missing = {name for name in registry.public_factories() if f"`{name}" not in cards}
  assert not missing - {"scale_by_lars_trust_ratio"}


@pytest.mark.parametrize("name", ["mxnet", "horovod", "sgperm"])
def test_a_migration_table_names_existing_functions_only(name):
  page = (DOCS / "migrating" / f"{name}.md").read_text(encoding="utf-8")
  for row in re.findall(r"^\|[^|]*\|([^|]*)\|", page, re.MULTILINE):
    for used in re.findall(r"`([a-z_]+)\(", row):
      assert hasattr(optax_boost, used), used


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_has_the_outputs_of_its_code_and_nothing_of_the_machine(path):
  pytest.importorskip("nbclient")
  notebook = json.loads(path.read_text(encoding="utf-8"))
  codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
  renew = f"run `make notebooks NOTEBOOKS={path.stem}`"
  code_hash = runpy.run_path(str(DOCS / "run_notebooks.py"))["code_hash"]
  assert notebook["metadata"].get("outputs_of") == code_hash(notebook), renew
  assert [cell["execution_count"] for cell in codes] == list(range(1, len(codes) + 1)), renew
  assert all(cell["outputs"] for cell in codes if "print(" in "".join(cell["source"])), renew
  outputs = [output for cell in codes for output in cell["outputs"]]
  assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"], renew
  pictures = [o["data"].pop("image/png") for o in outputs if "image/png" in o.get("data", {})]
  assert pictures
  assert path.stat().st_size < 100_000
  assert not re.search(r"(?<![\w.])/\w+/|site-packages|0x[0-9a-f]{6}|\d ms\b", json.dumps(outputs))
  assert not any(cell["metadata"].get("execution") for cell in codes)


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_names_public_functions_only(path):
  cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
  codes = [cell for cell in cells if cell["cell_type"] == "code"]
  code = "\n".join("".join(cell["source"]) for cell in codes)
  assert "# %pip install " in "".join(codes[0]["source"])
  nodes = list(ast.walk(ast.parse(code.replace("%matplotlib inline", ""))))
  used = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
  for name in filter(re.compile(r"optax_boost\.[\w.]+$").match, used):
    assert operator.attrgetter(name.partition(".")[2])(optax_boost) is not None
