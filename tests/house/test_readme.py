"""Every Python block of the README runs, in order, each in a namespace of its own."""

import pathlib
import re
import tomllib

import pytest

import optax_boost

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = pathlib.Path(optax_boost.__file__).parent
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(code):
  exec(compile(code, "README.md", "exec"), {})


def test_the_page_on_pypi_has_no_relative_links():
  hooks = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"][
    "metadata"
  ]["hooks"]
  page = README
  for rule in hooks["fancy-pypi-readme"]["substitutions"]:
    page = re.sub(rule["pattern"], rule["replacement"], page)
  assert not re.findall(r"\]\((?!https://)[^)]*\)", page)


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAP = re.search(r"## How to find your way\n\n```\n(.*?)```", CONTRIBUTING, re.DOTALL)[1]


def named_in_the_map():
  """The paths in the map: names left of the descriptions, each in the folders that it is below."""
  folders, paths = [], set()
  for line in MAP.splitlines():
    indent, names = re.match(r"( *)((?:[\w.]+(?:/|\.py|\.txt)(?: +|$))*)", line).groups()
    if names:
      # Two spaces for each folder that the line is in.
      folders = folders[: len(indent) // 2]
      paths |= {"".join([*folders, name]) for name in names.split()}
      folders.append(names.split()[0])
  return paths


def test_every_file_that_the_map_names_exists():
  missing = {
    path
    for path in named_in_the_map()
    if not (ROOT / path).exists() and not (PACKAGE.parent / path).exists()
  }
  assert not missing, f"CONTRIBUTING's map names {missing}; correct it"


def test_the_map_names_every_folder_of_the_package_and_every_file_at_its_top():
  files = [path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py")]
  parts = {f"{path.parent}/" for path in files}
  parts |= {str(path) for path in files if str(path.parent) == "optax_boost"}
  missing = parts - named_in_the_map()
  assert not missing, f"CONTRIBUTING's map lacks {missing}; add them"


def test_texts_are_read_as_utf_8_whatever_the_locale_is():
  folders = ("benchmarks", "docs", "examples", "optax_boost", "tests")
  files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
  without = re.compile(r"\.read_text\((?!\s*encoding)")
  assert not [f for f in files if without.search(f.read_text(encoding="utf-8"))]
