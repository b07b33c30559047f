"""`make dist`: every extra is installed and run, and what a user would meet is told."""

import ast
import functools
from importlib import metadata
import json
import pathlib
import re
import sys
import tomllib
import zipfile

import pytest

import optax_boost
from tests import dist

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = pathlib.Path(optax_boost.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.fixture
def environment(tmp_path):
  return dist.Environment(pathlib.Path(sys.executable), ROOT, tmp_path)


def test_every_extra_has_something_to_run():
  assert set(dist.CHECKS) == {dist.CORE, *EXTRAS}
  assert all(dist.CHECKS.values())


def test_every_example_runs_with_the_extra_for_examples():
  examples = {path.name for path in (ROOT / "examples").glob("[!_]*.py")}
  assert {f"examples/{name}" for name in examples} == set(map(str, dist.CHECKS["examples"]))


PROGRAMS = [c for checks in dist.CHECKS.values() for c in checks if isinstance(c, dist.Program)]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_the_pages_have_the_programs(program):
  assert "optax_boost" in program.code(ROOT)


def test_a_page_without_the_program_is_named():
  with pytest.raises(ValueError, match=r"README.md has no block of Python below \*\*Haiku\*\*"):
    dist.Program("README.md", "Haiku").code(ROOT)
  with pytest.raises(ValueError, match=r"README.md \(Plain JAX\) has no 'torch'; correct"):
    dist.Program("README.md", "Plain JAX", replaced={"torch": ""}).code(ROOT)


def page(tmp_path, code):
  (tmp_path / "page.md").write_text(f"```python\n{code}\n```\n", encoding="utf-8")
  return tmp_path / "page.md"


def test_a_program_that_fails_is_named_with_its_error(environment, tmp_path):
  program = dist.Program(str(page(tmp_path, "import no_such_package")))
  with pytest.raises(dist.Failure) as failure:
    program.run(environment)
  assert re.match(r".*page.md failed with status 1\n", str(failure.value))
  assert str(failure.value).endswith("No module named 'no_such_package'")


def test_a_program_that_does_not_print_what_it_should_fails(environment, tmp_path):
  quiet = dist.Program(str(page(tmp_path, "print('no bar')")), prints="it/s]")
  with pytest.raises(dist.Failure, match=r"page.md has run, but printed no 'it/s\]'"):
    quiet.run(environment)
  quiet._replace(prints="no bar").run(environment)
  with pytest.raises(dist.Failure, match="AssertionError"):
    quiet._replace(prints="", then="assert False\n").run(environment)


def test_a_skipped_test_counts_as_missing_only_if_no_test_may_be_skipped(environment, tmp_path):
  (tmp_path / "test_it.py").write_text("import pytest\npytest.skip('no', allow_module_level=True)")
  command = dist.Command("tests", ("-m", "pytest", "-rs", "-p", "no:cacheprovider", "{folder}"))
  command = command._replace(arguments=(*command.arguments, "-c", "{source}/pyproject.toml"))
  passing = tmp_path / "test_other.py"
  passing.write_text("def test_it():\n  pass\n")
  command.run(environment)
  with pytest.raises(dist.Failure, match="tests left out some of its tests:"):
    command._replace(skips=False).run(environment)


def test_programs_see_neither_the_repository_nor_settings_of_python(environment, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", str(ROOT))
  code = "import os, sys; print('PYTHONPATH' in os.environ, os.getcwd(), os.environ['OUT'])"
  command = dist.Command("it", ("-c", code), variables={"OUT": "{folder}/out"})
  printed = dist.execute("it", [sys.executable, "-c", code], environment.folder, OUT="out")
  assert printed.split() == ["False", str(environment.folder), "out"]
  command.run(environment)


def wheel(path, **files):
  path.parent.mkdir(exist_ok=True)
  with zipfile.ZipFile(path, "w") as archive:
    for name, text in files.items():
      archive.writestr(name, text)
  return path


def test_wheels_with_different_files_are_told_apart(tmp_path):
  first = wheel(tmp_path / "1" / "a.whl", same="x", changed="y", gone="z")
  same = wheel(tmp_path / "2" / "a.whl", same="x", changed="y", gone="z")
  dist.compare(first, same, "of a clone")
  other = wheel(tmp_path / "3" / "a.whl", same="x", changed="w", new="")
  with pytest.raises(dist.Failure) as failure:
    dist.compare(first, other, "of a clone")
  assert str(failure.value).splitlines() == [
    "compared with a.whl, the wheel of a clone",
    "  lacks gone",
    "  also has new",
    "  has another changed",
  ]


def test_an_sdist_that_is_unpacked_in_a_repository_is_refused(tmp_path):
  (tmp_path / ".git").mkdir()
  with pytest.raises(dist.Failure, match=r"unpacked in a repository, .*; set TMPDIR to another"):
    dist.check_builds(tmp_path / "a.whl", tmp_path / "sdist" / "optax_boost", tmp_path)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["flex"], "unknown extra 'flex'; choose from core, flax, host, "),
    (["--dist", "nowhere"], "nowhere must hold one *.whl; it has 0: `make dist` builds"),
  ],
)
def test_a_wrong_argument_is_named(capsys, arguments, message):
  with pytest.raises(SystemExit):
    dist.main(arguments)
  assert message in capsys.readouterr().err


def declared(extra):
  """The packages of an extra in pyproject.toml, and of the extras that it includes."""
  names = set()
  for requirement in EXTRAS[extra] if extra else PROJECT["dependencies"]:
    name, extras = re.match(r"([\w-]+)(?:\[(.*?)\])?", requirement).groups()
    if name == PROJECT["name"]:
      names |= set().union(*map(declared, extras.split(",")))
    else:
      names.add(normal(name))
  return names | (declared("") if extra else set())


def normal(name):
  return name.lower().replace("_", "-")


def codes(paths):
  """The Python of files and notebooks, by path."""
  for path in paths:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
      cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
      text = "\n".join("".join(cell["source"]) for cell in cells).replace("%matplotlib inline", "")
    yield path, text


def imported(text):
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield node.module.partition(".")[0]


FLAX = [path for name in ("nnx", "linen") for path in (PACKAGE / name).rglob("*.py")]
BENCHMARKS = [p for p in (ROOT / "benchmarks").rglob("*.py") if "peers" not in p.parts]
# What an extra is for, and packages that it may have from elsewhere.
FILES = {
  # Only who has written checkpoints with Orbax gets there.
  "host,race": ([p for p in PACKAGE.rglob("*.py") if p not in FLAX], {"orbax-checkpoint"}),
  "flax": (FLAX, set()),
  "examples": ((ROOT / "examples").glob("*.py"), set()),
  "devices": ((ROOT / "benchmarks" / "devices").glob("*.py"), set()),
  # IPython comes with the kernel that runs notebooks.
  "docs": (
    [*(ROOT / "docs").glob("*.py"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")],
    {"ipython"},
  ),
  # For the tests of one extra more.
  "test": ([*BENCHMARKS, *(ROOT / "tests").rglob("*.py")], {"playwright"}),
}


# It reads the files of every installed package.
packages_distributions = functools.cache(metadata.packages_distributions)


@pytest.mark.parametrize("extras", FILES)
def test_extras_name_every_package_that_their_files_import(extras):
  files, elsewhere = FILES[extras]
  distributions = packages_distributions()
  named = elsewhere.union(*map(declared, extras.split(",")))
  ours = {path.stem for path in (ROOT / "examples").glob("*.py")}
  ours |= {"optax_boost", "benchmarks", "tests", *sys.stdlib_module_names}
  missing = {
    f"{path.name} imports {name}"
    for path, text in codes(files)
    for name in set(imported(text)) - ours
    if not named & set(map(normal, distributions.get(name, [name])))
  }
  assert not missing, f"add the packages to {extras} in pyproject.toml"
