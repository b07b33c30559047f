"""CONTRIBUTING.md's example: applied to a copy of the repository, the new method is complete."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import optax_boost
from tests.contract import test_contract
from tests.house import pages

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = re.search(
  r"````diff\n(.*?)````", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
)[1]
METHOD = "bound_entries"
FILE = f"optax_boost/_methods/_{METHOD}.py"
# Tests outside of tests/house whose one case looks at every row of the registry.
OF_ALL_ROWS = (
  "test_registry",
  "test_every_argument_of_a_public_function_has_a_kind",
  "test_the_page_has_the_metrics_of_every_step",
  "test_the_other_fields_that_the_page_names",
)
# Files and tests of tests/house that run the code of other methods, so the copy can't change their
# outcome: programs of other pages, examples, benchmarks. And this file, which would start itself
# again.
UNTOUCHED_FILES = (
  "adding_a_method",
  "command_lines",
  "demo",
  "demo_large_batch",
  "evidence_runs",
  "files",
  "finetune_example",
  "gpu_benchmark",
  "imports",
  "pins",
  "tree",
  "warnings",
  "xla_table",
)
UNTOUCHED = (
  "(test_dist and not host)",  # `host` is in the name of a test that reads the package's imports
  "follows_the_definition",  # of finite entries: one test for each of the other methods
  "test_its_blocks_run_from_top_to_bottom",
  "test_names_and_arguments_in_the_code_of_a_page_exist",
  "test_readme_block_runs",
  "test_the_built_wheel_trains_and_does_not_import_flax",
  "test_the_code_of_a_page_runs",
  "test_the_momentum_of_sgperm_leaves_out_what_is_counted",
)
# A file has cases of a new method if it reads the registry or the public names. Other files are not
# collected: their imports would take as long as the tests.
READS_ALL_METHODS = re.compile(r"\bregistry\b|\b__all__\b")
# Every test that has the new method among its cases, wherever it is, and what looks at all methods.
SELECTED = " or ".join([METHOD, *OF_ALL_ROWS, f"(house and not ({' or '.join(UNTOUCHED)}))"])
TOOLS = ROOT / ".venv-tools" / "bin"


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


def files_with_the_method(folder):
  """The test files that can have the new method among their cases, and the method's own file."""
  files = [
    path
    for path in sorted((folder / "tests").rglob("test_*.py"))
    if (
      path.stem.removeprefix("test_") not in UNTOUCHED_FILES
      if path.parent.name == "house"
      else READS_ALL_METHODS.search(path.read_text(encoding="utf-8"))
    )
  ]
  return [str(path.relative_to(folder)) for path in [*files, folder / FILE]]


def run(folder, *command):
  """Runs a command in a folder, whose package Python imports."""
  result = subprocess.run(
    command,
    cwd=folder,
    env=os.environ | {"PYTHONPATH": str(folder)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
  return result.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
  """A copy of the repository with the example applied, as CONTRIBUTING.md tells to do it."""
  folder = tmp_path_factory.mktemp("copy") / "repository"
  # Without what tools have made, but with mypy's cache, which takes three quarters off its time.
  made = shutil.ignore_patterns(
    *(".git", ".venv*", ".pytest_cache", ".ruff_cache", ".jax_cache", "__pycache__", "*.egg-info"),
    *("build", "dist", "out"),
  )
  shutil.copytree(ROOT, folder, ignore=made)
  # The tests of an sdist run beside an installed package.
  package = pathlib.Path(optax_boost.__file__).parent
  shutil.copytree(package, folder / "optax_boost", ignore=made, dirs_exist_ok=True)
  apply(folder)
  run(folder, sys.executable, "docs/card_tables.py")
  return folder


def test_the_example_is_one_file_one_export_one_row_one_card_and_one_line():
  assert [file for file, _ in changes()] == [
    "CHANGELOG.md",
    f"docs/cards/{METHOD}.md",
    "optax_boost/__init__.py",
    FILE,
    "tests/contract/registry.py",
  ]


def test_the_new_card_has_a_line_in_the_table_of_all_methods(copy):
  index = (copy / "docs" / "index.md").read_text(encoding="utf-8")
  assert f"| [`{METHOD}`](cards/{METHOD}.md) | Sometimes" in index


def test_every_test_that_can_see_the_new_method_passes(copy):
  printed = run(
    copy,
    *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-vv"),
    "--assert=plain",  # to rewrite the asserts of new files takes seconds
    *("-k", SELECTED),
    *files_with_the_method(copy),
  )
  # All columns of the contract, and the doctest.
  columns = set(re.findall(rf"test_contract.py::(test_\w+)\[.*{METHOD}", printed))
  every = re.findall(
    r"@every_(?:row|factory)\n(?:@.*\n)*def (test_\w+)", inspect.getsource(test_contract)
  )
  assert columns >= set(every)
  assert FILE in printed


# Of the copy, since it has all pages and one more.
def test_all_pages_and_the_new_one_build_without_a_warning(copy, tmp_path):
  pytest.importorskip("furo")
  run(copy, *pages.CHECK, "-d", str(tmp_path / "trees"), str(copy / "docs"), str(tmp_path / "out"))


@pytest.mark.skipif(not TOOLS.exists(), reason="needs what `make lint type` installs")
def test_the_example_passes_the_linter_and_the_type_checker(copy):
  run(copy, TOOLS / "ruff", "check", "--no-cache", ".")
  run(copy, TOOLS / "ruff", "format", "--no-cache", "--check", ".")
  run(copy, TOOLS / "mypy")
