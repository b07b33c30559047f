"""The house: imports run one way, Flax is optional, and the built wheel is what works."""

import ast
import functools
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

import optax_boost

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "optax_boost"
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
  return str(path.relative_to(PACKAGE))


every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)

FLAX = {"nnx", "linen"}
# What each room, folder or file, at the package's top may import beside itself.
_SHARED = {"_foundation", "_trace", "_form"}
_TOP = {*_SHARED, "_methods", "_step", "_sequences", "_train_step"}
ROOMS = {
  "_foundation": set(),
  "_trace": {"_foundation"},
  "_form": {"_foundation"},
  "_step": _SHARED,
  "_methods": {*_SHARED, "_step"},
  "_sequences": {"_foundation", "_trace"},
  "_train_step": {*_SHARED, "_step"},  # no method
  "_levels": _TOP,
  "_race": _TOP,
  **dict.fromkeys(FLAX, _TOP),
}
# Rooms whose parts never import each other, but for what they share.
_OF_THE_STEP = {
  *("_addition", "_device_sums", "_state", "_slots", "_kept_leaves", "_nesting", "_run", "_wrapper")
}
APART = {"_methods": {"_layer_arguments"}, "_step": _OF_THE_STEP}
# Rooms whose docstring lists the modules in an order: each may import those before it.
ORDERED = (
  *("_foundation", "_trace", "_form", "_step", "_sequences"),
  *("_train_step", "_levels", "_race", "nnx", "linen"),
)


@functools.cache
def imported(path):
  """The modules that a file imports, but not those for its types alone."""
  names = set()
  program = ast.parse(path.read_text(encoding="utf-8"))
  typing = [
    n for n in program.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
  ]
  program.body = [node for node in program.body if node not in typing]
  for node in ast.walk(program):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def ours(path):
  """The modules of ours that a file imports, as tuples of a room and what is in it."""
  names = [name.split(".") for name in imported(path)]
  return {tuple(parts[1:]) for parts in names if parts[0] == "optax_boost"}


def room(path):
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def parts_imported(path):
  """The parts of a file's own room that it imports; an empty name for the room itself."""
  return {(*rest, "")[0] for name, *rest in ours(path) if name == room(path)}


@functools.cache
def listed(name):
  """The modules that the docstring of a room lists, in order."""
  text = ast.get_docstring(ast.parse((PACKAGE / name / "__init__.py").read_text(encoding="utf-8")))
  return re.findall(r"^  (_\w+)  ", text[text.index("The modules, each") :], re.MULTILINE)


IN_ORDER = [
  path
  for name in ORDERED
  for module in listed(name)
  if (path := PACKAGE / name / f"{module}.py").exists()
]


def test_every_room_has_its_place():
  assert {room(path) for path in MODULES} == {"__init__", *ROOMS}


@every_module
def test_imports_run_one_way_between_rooms(path):
  assert () not in ours(path), "nothing in the package may import the root that is importing it"
  if room(path) != "__init__":
    assert {name for name, *_ in ours(path)} <= {room(path), *ROOMS[room(path)]}


@pytest.mark.parametrize("name", ORDERED)
def test_the_docstring_of_a_room_lists_its_modules(name):
  modules = {path.stem for path in (PACKAGE / name).glob("*.py")}
  folders = {path.parent.name for path in (PACKAGE / name).glob("*/__init__.py")}
  assert {"__init__", *listed(name)} == modules | folders


@pytest.mark.parametrize("path", IN_ORDER, ids=name_of)
def test_imports_run_one_way_inside_of_a_room(path):
  order = listed(room(path))
  assert parts_imported(path) <= set(order[: order.index(path.stem)])


@every_module
def test_methods_and_wrappers_never_import_each_other(path):
  if room(path) in APART:
    part = path.relative_to(PACKAGE).parts[1].removesuffix(".py")
    assert parts_imported(path) <= {part, *APART[room(path)]}


@every_module
def test_only_the_public_api_of_optax_is_used(path):
  assert not re.search(
    r"optax\._src|from optax import _src|jax\._src", path.read_text(encoding="utf-8")
  )


@every_module
def test_flax_is_imported_in_two_packages_only(path):
  uses = any(name.split(".")[0] == "flax" for name in imported(path))
  assert uses == (room(path) in FLAX and path.name != "__init__.py")


# Where meshes are made in the tests. Elsewhere a mesh of more devices than there are would fail
# instead of skipping its test; the last two are programs that choose how many devices they have.
MAKE_MESHES = {"meshes.py", "contract/processes.py", "xla/checks.py"}


def test_tests_make_their_meshes_in_one_place():
  folder = ROOT / "tests"
  found = {
    path.relative_to(folder).as_posix()
    for path in folder.rglob("*.py")
    if re.search(r"\bmake_mesh\(|\bMesh\(", path.read_text(encoding="utf-8"))
  }
  assert found == MAKE_MESHES


def run_python(code, folder, **environment):
  result = subprocess.run(
    [sys.executable, "-c", code],
    cwd=folder,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  folder = tmp_path_factory.mktemp("wheel")
  subprocess.run(
    [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
    cwd=ROOT,
    check=True,
    capture_output=True,
  )
  (path,) = folder.glob("*.whl")
  return path


def test_the_built_wheel_holds_the_package_and_its_types(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  expected = {str(path.relative_to(ROOT)) for path in MODULES} | {"optax_boost/py.typed"}
  assert expected <= names
  assert not any(name.startswith(("tests", "benchmarks", "examples")) for name in names)


def test_no_module_bears_the_name_of_a_public_function():
  modules = {room(path) for path in MODULES}
  assert not modules & set(optax_boost.__all__)


def test_the_built_wheel_trains_and_does_not_import_flax(wheel):
  code = """
import sys, optax_boost, jax.numpy as jnp
step = optax_boost.make_train_step(lambda p, b: jnp.sum((p["w"] - b) ** 2), optax_boost.lars(0.1))
state = step.init({"w": jnp.ones((2, 2))})
state, metrics = step(state, 3.0)
assert "flax" not in sys.modules
print(optax_boost.__version__, optax_boost.__file__, float(metrics["loss"]))
"""
  version, file, loss = run_python(code, wheel.parent, PYTHONPATH=str(wheel)).split()
  assert version == optax_boost.__version__
  assert str(wheel) in file
  assert float(loss) == 16.0
