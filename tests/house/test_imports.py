"""What `import optax_boost` gives, with and without Flax."""

import json
import os
import subprocess
import sys

import pytest

STATEMENTS = (
  "optax_boost.nnx",
  "optax_boost.linen",
  "import optax_boost.nnx",
  "import optax_boost.linen",
)
# Flax is hidden while the statements run, none of which imports anything before it fails.
CODE = """
import importlib.util, json, sys, optax_boost

report = {"flax is imported": "flax" in sys.modules, "keras": hasattr(optax_boost, "keras")}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "flax" else find(name)
for statement in json.loads(sys.argv[1]):
  try:
    exec(statement)
  except Exception as error:
    report[statement] = f"{type(error).__name__}: {error}"
importlib.util.find_spec = find
functions = optax_boost.nnx.make_train_step, optax_boost.linen.split_loss
report["modules"] = [function.__module__ for function in functions]
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
  """What a fresh process finds: it takes seconds to import JAX."""
  paths = [os.environ.get("PYTHONPATH", ""), os.getcwd()]
  result = subprocess.run(
    [sys.executable, "-c", CODE, json.dumps(STATEMENTS)],
    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


def test_flax_forms_are_imported_at_their_first_use(report):
  assert not report["flax is imported"]
  assert not report["keras"]
  assert report["modules"] == ["optax_boost.nnx._train_step", "optax_boost.linen._loss"]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_an_error_without_flax_names_the_package_to_install(report, statement):
  error, name = report[statement], statement.removeprefix("import ")
  assert error.startswith(f"ImportError: `{name}` needs Flax")
  assert "pip install 'optax-boost[flax]'" in error
