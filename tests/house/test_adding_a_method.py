"""CONTRIBUTING.md's example: applied to a copy of the repository, the new method is complete."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import optax_boost

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = re.search(
  r"````diff\n(.*?)````", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
)[1]
METHOD = "bound_entries"
# A few columns of the new row, and the tests that ask for a row, a card, a line or a place.
RUN = (
  f"tests/contract/test_contract.py::test_acts[{METHOD}]",
  f"tests/contract/test_contract.py::test_takes_extra_arguments_it_does_not_know[{METHOD}]",
  f"tests/contract/test_contract.py::test_refuses_integer_leaves[{METHOD}]",
  f"tests/contract/bad_input/test_bad_input.py::test_a_bad_value_is_refused_by_its_argument[{METHOD}]",
  f"tests/contract/bad_input/test_bad_input.py::test_params_of_another_kind_are_refused[{METHOD}]",
  "tests/contract/bad_input/test_bad_input.py::test_every_argument_of_a_public_function_has_a_kind",
  "tests/contract/test_registry.py",
  "tests/house/test_docs.py::test_every_transformation_has_a_card",
  "tests/house/test_docs.py::test_the_reference_has_every_public_name_once",
  f"tests/house/test_docs.py::test_a_card_says_all_that_a_card_must[{METHOD}]",
  f"tests/house/test_docs.py::test_the_code_of_a_page_runs[cards/{METHOD}.md]",
  "tests/house/test_docs.py::test_readme_and_pages_have_the_parts_that_the_cards_headers_make",
  "tests/house/test_readme.py::test_the_map_names_every_folder_of_the_package_and_every_file_but_the_methods_own",
  f"optax_boost/_{METHOD}.py",
)


def changes():
  """By file, the hunks of the example: lists of lines with a space or a plus before each."""
  parts = re.split(r"^--- .*\n\+\+\+ b/(.*)\n", EXAMPLE, flags=re.MULTILINE)[1:]
  for file, text in zip(parts[::2], parts[1::2], strict=True):
    yield file, [hunk.splitlines() for hunk in re.split(r"^@@ .*\n", text, flags=re.MULTILINE)[1:]]


def apply(folder):
  """Adds the lines of the example, each hunk beside its context, wherever that is now."""
  for file, hunks in changes():
    path = folder / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for hunk in hunks:
      added = "".join(f"{line[1:]}\n" for line in hunk if line.startswith("+"))
      context = [line[1:] for line in hunk if line.startswith(" ")]
      if not context:
        text += added
        continue
      before, after = context
      place = text.find(f"{before}\n{after}\n")
      assert place >= 0, f"CONTRIBUTING.md: {file} has no longer {before!r} before {after!r}"
      place += len(before) + 1
      text = text[:place] + added + text[place:]
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
  """The parts of the repository that the example needs."""
  shutil.copytree(pathlib.Path(optax_boost.__file__).parent, tmp_path / "optax_boost")
  leave_out = shutil.ignore_patterns("golden", "build", "__pycache__")
  for folder in ("tests", "docs"):
    shutil.copytree(ROOT / folder, tmp_path / folder, ignore=leave_out)
  for folder in ("examples", "benchmarks"):
    (tmp_path / folder).mkdir()
  for file in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"):
    shutil.copy(ROOT / file, tmp_path)
  return tmp_path


def test_the_example_is_one_file_one_export_one_row_one_card_and_one_line():
  assert [file for file, _ in changes()] == [
    "CHANGELOG.md",
    f"docs/cards/{METHOD}.md",
    "optax_boost/__init__.py",
    f"optax_boost/_{METHOD}.py",
    "tests/contract/registry.py",
  ]


def test_the_example_passes_what_asks_for_a_complete_method(copy):
  apply(copy)
  environment = os.environ | {"PYTHONPATH": str(copy)}
  for command in (["docs/card_tables.py"], ["-m", "pytest", "-p", "no:cacheprovider", *RUN]):
    result = subprocess.run(
      [sys.executable, *command],
      cwd=copy,
      env=environment,
      capture_output=True,
      text=True,
      check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
  assert f"| [`{METHOD}`](docs/cards/{METHOD}.md) | Sometimes" in (copy / "README.md").read_text(
    encoding="utf-8"
  )
