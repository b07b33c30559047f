"""The house: imports run one way, Flax is optional, and the built wheel is what works."""

import ast
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
# In this order: each may import those before it.
FOUNDATION = [
  "_types",
  "_base",
  "_progress",
  "_arrays",
  "_files",
  "_tree",
  "_own_state",
  "_trace",
  "_masking",
  "_protocol",
  "_leaves",
  "_conditional",
  "_finiteness",
  "_form",
  "_compositions",
  "_order",
  "_driver",
  "_transformation",
  "_apply_gradients",
  "_full_gradient",
]
# The same inside of this package of the foundation.
TRACE = [
  "_jaxpr",
  "_axis_map",
  "_primitives",
  "_leaf_uses",
  "_layer_axes",
  "_flow",
  "_blocks",
  "_layer_groups",
  "_frozen_scans",
]
# Folders whose modules have the names above or below.
ROOMS = {"_foundation", "_form", "_methods", "_wrappers"}
# What may import what of ours: nothing, the foundation, the methods, everything below.
TOP = {"_levels", "_race"}
TRAIN_STEP = "_train_step"
FLAX = {"nnx", "linen"}


def imported(path):
  """The modules that a file imports, by their first two components."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      names |= {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def ours(path):
  """The modules of ours that a file imports."""
  found = set()
  for name in imported(path):
    parts = name.split(".")
    if parts[0] == "optax_boost" and len(parts) > 1:
      found.add(inside_of_rooms(parts[1:]))
  return found


def inside_of_rooms(parts):
  return parts[1] if parts[0] in ROOMS and len(parts) > 1 else parts[0]


def layer(path):
  return inside_of_rooms(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
  name, below = layer(path), ours(path)
  root = imported(path) & {"optax_boost"}
  assert not root, "nothing in the package may import the root that is importing it"
  if name in FOUNDATION:
    assert below <= {*FOUNDATION[: FOUNDATION.index(name)], name}
  elif name == TRAIN_STEP:
    assert below <= {*FOUNDATION, name}, "the train step must know no method"
  elif name in TOP:
    assert not below & (FLAX | {"__init__"})
  elif name not in FLAX | {"__init__"}:
    assert below <= {*FOUNDATION, name}, "a method must not import another"


@pytest.mark.parametrize("name", TRACE)
def test_imports_run_one_way_in_the_analyses_of_a_trace(name):
  imports = [module.split(".") for module in imported(PACKAGE / "_trace" / f"{name}.py")]
  of_ours = [module for module in imports if module[0] == "optax_boost"]
  assert ["optax_boost", "_trace"] not in of_ours
  below = {module[2] for module in of_ours if module[1] == "_trace"}
  assert below <= set(TRACE[: TRACE.index(name)])


def test_the_order_of_the_analyses_is_complete():
  assert {f"{name}.py" for name in ["__init__", *TRACE]} == {
    path.name for path in (PACKAGE / "_trace").glob("*.py")
  }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_public_api_of_optax_is_used(path):
  assert not re.search(
    r"optax\._src|from optax import _src|jax\._src", path.read_text(encoding="utf-8")
  )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_flax_is_imported_in_two_packages_only(path):
  uses = any(name.split(".")[0] == "flax" for name in imported(path))
  assert uses == (layer(path) in FLAX and path.name != "__init__.py")


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
  modules = {layer(path) for path in MODULES}
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
