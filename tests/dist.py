"""Installs what would be uploaded, as users do, and runs it: `make dist`.

First the sdist, unpacked outside of the repository, must build the wheel again without git. Then
the wheel is installed into an empty environment, alone and with each extra of pyproject.toml, and
runs what the extra is for: programs of README and the pages, examples, benchmarks and tests, all of
the sdist. The sdist's copy of the package is removed first, so the installed one is imported.
"""

import argparse
from collections.abc import Mapping, Sequence
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import NamedTuple
import venv
import zipfile

from tests.house import pages

ROOT = pathlib.Path(__file__).parents[1]
NAME = "optax_boost"
CORE = "core"  # the package without extras
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Failure(Exception):
  """What a user would have met."""


class Environment(NamedTuple):
  """A place to run programs in.

  Attributes:
    python: the environment's interpreter.
    source: the unpacked sdist, without the package.
    folder: where programs run and write.
    workers: how many processes the whole suite of tests may use.
  """

  python: pathlib.Path
  source: pathlib.Path
  folder: pathlib.Path
  workers: int = 1


class Program(NamedTuple):
  """A program of a page.

  Attributes:
    page: the page's path in the sdist.
    form: its tab, or README's words in bold above the block; None if the page has no tabs.
    replaced: texts of the program, each of which it must have, and what to put in their places.
    then: code to run after it.
    prints: what must be among its output, where the program would pass without the extra.
  """

  page: str
  form: str | None = None
  replaced: Mapping[str, str] = {}
  then: str = ""
  prints: str = ""

  def __str__(self) -> str:
    return self.page + (f" ({self.form})" if self.form else "")

  def code(self, source: pathlib.Path) -> str:
    """The text of the program."""
    page = source / self.page
    if self.page == "README.md":
      text = pages.block_below(page, str(self.form))
    else:
      text = "\n".join(pages.programs(page)[self.form])
    for old, new in self.replaced.items():
      if old not in text:
        raise ValueError(f"{self} has no {old!r}; correct tests/dist.py")
      text = text.replace(old, new)
    return text + self.then

  def run(self, environment: Environment) -> None:
    """Runs the program, or raises `Failure`."""
    path = environment.folder / "program.py"
    path.write_text(self.code(environment.source), encoding="utf-8")
    printed = execute(str(self), [environment.python, path], environment.folder)
    if self.prints not in printed:
      raise Failure(f"{self} has run, but printed no {self.prints!r}")


class Command(NamedTuple):
  """A command of Python.

  Attributes:
    name: for people.
    arguments: of the interpreter; `{source}`, `{folder}` and `{workers}` are the environment's.
    variables: of its environment, likewise.
    in_source: whether it runs in the sdist's folder, whose `tests` and `benchmarks` it imports.
    skips: whether tests may be skipped.
    shown: whether its output goes to the terminal.
  """

  name: str
  arguments: tuple[str, ...]
  variables: Mapping[str, str] = {}
  in_source: bool = False
  skips: bool = True
  shown: bool = False

  def __str__(self) -> str:
    return self.name

  def run(self, environment: Environment) -> None:
    """Runs the command, or raises `Failure`."""
    fields = environment._asdict()
    variables = {name: value.format(**fields) for name, value in self.variables.items()}
    command = [environment.python, *(each.format(**fields) for each in self.arguments)]
    folder = environment.source if self.in_source else environment.folder
    printed = execute(self.name, command, folder, shown=self.shown, **variables)
    if not self.skips and " skipped" in printed:
      raise Failure(f"{self} left out some of its tests:\n{printed.strip()}")


def example(name: str, *arguments: str) -> Command:
  """A short run of an example."""
  return Command(f"examples/{name}", (f"{{source}}/examples/{name}", *arguments))


def module(name: str, *arguments: str) -> Command:
  """A module of the sdist, run as a program."""
  return Command(name, ("-m", name, *arguments), in_source=True)


def suite(*arguments: str, **options) -> Command:
  """Tests of the sdist."""
  return Command("tests", ("-m", "pytest", "-rs", *arguments), in_source=True, **options)


BUILD_PAGES = Command(
  "the pages", ("-m", "sphinx", "-W", "-q", "-b", "html", "{source}/docs", "{folder}/html")
)
WITHOUT_FLAX = """
try:
  optax_boost.nnx
except ImportError as error:
  assert "pip install 'optax-boost[flax]'" in str(error), error
else:
  raise AssertionError("Flax came without the extra")
"""
COMPILED = """
from optax_boost._methods._sgperm import _host_search
assert _host_search._compiled.cache_info().currsize, "the search on the host was not compiled"
"""
OPTIMIZED = {"XLA_FLAGS": "--xla_backend_optimization_level=3"}
WHEEL_TESTS = "--ignore=tests/house/test_architecture.py"  # of the package's sources

# What each extra is for. Where the package can do without it, `then` or `prints` shows that it was
# used.
CHECKS: dict[str, tuple[Program | Command, ...]] = {
  CORE: (
    Program("README.md", "Plain JAX", then=WITHOUT_FLAX),
    Program("docs/quickstart.md", "JAX"),
  ),
  "flax": (
    Program("README.md", "Flax NNX"),
    Program("README.md", "Flax Linen"),
    Program("docs/quickstart.md", "NNX"),
    Program("docs/quickstart.md", "Linen"),
  ),
  "host": (Program("docs/migrating/sgperm.md", then=COMPILED),),
  "race": (
    Program(
      "docs/cards/race.md",
      "JAX",
      replaced={"progress=False": "progress=True"},
      then="result.plot().savefig('race.png')\n",
      prints="100%|",  # of the progress bar
    ),
  ),
  "examples": (
    example("demo.py", "--steps=16", "--tuning-steps=8"),
    example("large_batch.py", "--methods=sgd,lars", "--epochs=1", "--seeds=1"),
    example("auto_boost_resnet.py", "--levels=O1", "--epochs=1", "--seeds=1"),
    example("half_precision.py", "--epochs=1", "--seeds=1"),
    example("sgperm.py", "--methods=rank", "--epochs=1", "--seeds=1"),
    example("adasum_processes.py", "--devices=2", "--steps=2", "--every=1"),
    # These programs train for minutes at least; they need the extra for their imports.
    example("finetune.py", "--help"),
    example("tune.py", "--help"),
    example("tune_demo.py", "--help"),
  ),
  "devices": (module("benchmarks.devices", "--chip=h100", "--chip=v5e-8", "lars"),),
  "docs": (BUILD_PAGES,),
  "browser": (
    Command("playwright", ("-c", "import playwright.sync_api")),
    *(
      (
        BUILD_PAGES,
        suite(
          *("-m", "slow", "tests/house/test_browser.py"),
          variables={"DOCS_BUILD": "{folder}/html"},
          skips=False,
        ),
      )
      if CHROMIUM
      else ()
    ),
  ),
  "trainers": (suite("-m", "not slow", "tests/trainers/test_packages.py", skips=False),),
  "test": (
    suite("-m", "optimized", WHEEL_TESTS, "tests", variables=OPTIMIZED, shown=True),
    suite(
      *("-n", "{workers}", "--dist", "loadfile", "-m", "not slow and not optimized"),
      *(WHEEL_TESTS, "tests"),
      shown=True,
    ),
  ),
}


def execute(
  name: str,
  command: Sequence[str | pathlib.Path],
  folder: pathlib.Path,
  *,
  shown: bool = False,
  **variables: str,
) -> str:
  """Runs a command in a folder, without settings that lead Python to the repository.

  Returns:
    What it printed, on both outputs; nothing if that is shown.

  Raises:
    Failure: it failed; the last lines of its output say why.
  """
  environ = os.environ | {"MPLBACKEND": "Agg"} | variables
  for setting in ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"):
    environ.pop(setting, None)
  output = None if shown else subprocess.PIPE
  done = subprocess.run(
    command, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT, check=False
  )
  printed = (done.stdout or b"").decode(errors="replace")
  if done.returncode:
    last = "\n".join(printed.strip().splitlines()[-25:])
    raise Failure(f"{name} failed with status {done.returncode}\n{last}".rstrip())
  return printed


def contents(wheel: pathlib.Path) -> dict[str, int]:
  """The files of a wheel, with a checksum for each."""
  with zipfile.ZipFile(wheel) as archive:
    return {entry.filename: entry.CRC for entry in archive.infolist()}


def compare(wheel: pathlib.Path, other: pathlib.Path, origin: str) -> None:
  """Raises `Failure` if two wheels have different files; `origin` says where the other is from."""
  ours, theirs = contents(wheel), contents(other)
  differences = [
    *(f"  lacks {name}" for name in sorted(ours.keys() - theirs.keys())),
    *(f"  also has {name}" for name in sorted(theirs.keys() - ours.keys())),
    *(f"  has another {n}" for n in sorted(ours.keys() & theirs.keys()) if ours[n] != theirs[n]),
  ]
  if differences:
    raise Failure("\n".join([f"compared with {wheel.name}, the wheel {origin}", *differences]))


def build(source: pathlib.Path, out: pathlib.Path, origin: str, **variables: str) -> pathlib.Path:
  """Builds a wheel from a folder, in a folder of its own."""
  command = [sys.executable, "-m", "build", "--wheel", "--outdir", out, source]
  execute(f"to build the wheel {origin}", command, source, **variables)
  (wheel,) = out.glob("*.whl")
  return wheel


def check_builds(wheel: pathlib.Path, source: pathlib.Path, work: pathlib.Path) -> None:
  """The sdist builds the same wheel without git, and the repository does, as from a clone."""
  tracked = [folder for folder in source.resolve().parents if (folder / ".git").exists()]
  if tracked:
    raise Failure(f"the sdist was unpacked in a repository, {tracked[0]}; set TMPDIR to another")
  (work / "no programs").mkdir()
  origin = "of the sdist, without git,"
  compare(wheel, build(source, work / "1", origin, PATH=str(work / "no programs")), origin)
  origin = "of the repository"
  compare(wheel, build(ROOT, work / "2", origin), origin)


def check_extra(
  extra: str, wheel: pathlib.Path, source: pathlib.Path, work: pathlib.Path, workers: int
) -> None:
  """Installs the wheel with an extra into an empty environment, and runs what the extra is for.

  Prints a line, and removes the environment.

  Raises:
    Failure: with the extra's name.
  """
  home = work / extra
  environment = Environment(home / "bin" / "python", source, home / "folder", workers)
  start = time.perf_counter()
  try:
    venv.create(home, with_pip=True)
    environment.folder.mkdir()
    # Not compiled, since that takes longer than the rest; programs compile what they import.
    pip, what = [environment.python, "-m", "pip"], f"{wheel}[{extra}]" if extra != CORE else wheel
    execute("pip install", [*pip, "install", "--quiet", "--no-compile", what], environment.folder)
    execute("pip check", [*pip, "check"], environment.folder)
    code = f"import {NAME}; assert {NAME}.__file__.startswith({str(home)!r}), {NAME}.__file__"
    where = f"import {NAME} from what was installed"
    execute(where, [environment.python, "-c", code], environment.folder)
    installed = time.perf_counter()
    for check in CHECKS[extra]:
      check.run(environment)
  except Failure as failure:
    raise Failure(f"{extra}: {failure}") from None
  finally:
    shutil.rmtree(home, ignore_errors=True)
  end = time.perf_counter()
  names = ", ".join(map(str, CHECKS[extra]))
  seconds = f"installed in {installed - start:4.0f} s, ran in {end - installed:4.0f} s"
  print(f"{extra:9} {seconds}: {names}", flush=True)


def unpack(sdist: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Unpacks an sdist; the one folder in it."""
  with tarfile.open(sdist) as archive:
    archive.extractall(folder, filter="data")
  (source,) = folder.iterdir()
  return source


def main(arguments: Sequence[str] | None = None) -> int:
  """Checks the builds and the extras; returns 1 after the first failure."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("extras", nargs="*", help=f"of pyproject.toml, or {CORE}; default: all")
  parser.add_argument("--dist", type=pathlib.Path, default=ROOT / "dist", help="default: dist")
  parser.add_argument("--workers", type=int, default=2, help="processes of the tests; default: 2")
  options = parser.parse_args(arguments)
  for extra in options.extras:
    if extra not in CHECKS:
      parser.error(f"unknown extra '{extra}'; choose from {', '.join(CHECKS)}")
  files = {kind: list(options.dist.glob(f"*{kind}")) for kind in (".whl", ".tar.gz")}
  for kind, found in files.items():
    if len(found) != 1:
      parser.error(f"{options.dist} must hold one *{kind}; it has {len(found)}: `make dist` builds")
  if importlib.util.find_spec("build") is None:
    parser.error("needs the package `build`, which `make dist` installs")
  wheel, sdist = (found[0].resolve() for found in files.values())
  with tempfile.TemporaryDirectory(prefix="dist-") as name:
    work = pathlib.Path(name).resolve()
    try:
      start = time.perf_counter()
      source = unpack(sdist, work / "sdist")
      check_builds(wheel, source, work)
      seconds = time.perf_counter() - start
      print(f"{len(contents(wheel))} files in the wheel, built thrice: {seconds:.0f} s", flush=True)
      shutil.rmtree(source / NAME)
      for extra in options.extras or CHECKS:
        check_extra(extra, wheel, source, work, options.workers)
    except Failure as failure:
      print(f"make dist: {failure}", file=sys.stderr)
      return 1
  return 0


if __name__ == "__main__":
  sys.exit(main())
