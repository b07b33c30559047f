"""What `import optax_boost` gives, with and without Flax."""

import os
import subprocess
import sys

import pytest


def run(code):
  paths = [os.environ.get("PYTHONPATH", ""), os.getcwd()]
  env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
  return subprocess.run(
    [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
  )


def test_flax_forms_are_imported_at_their_first_use():
  code = (
    "import sys, optax_boost\n"
    "assert 'flax' not in sys.modules\n"
    "assert not hasattr(optax_boost, 'keras')\n"
    "print(optax_boost.nnx.make_train_step.__module__, optax_boost.linen.split_loss.__module__)"
  )
  result = run(code)
  assert result.stdout.split() == ["optax_boost.nnx._train_step", "optax_boost.linen._adapter"]


@pytest.mark.parametrize("statement", ["optax_boost.{}", "import optax_boost.{}"])
@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_an_error_without_flax_names_the_package_to_install(name, statement):
  code = (
    "import importlib.util, optax_boost\n"
    "find = importlib.util.find_spec\n"
    "importlib.util.find_spec = lambda name: None if name == 'flax' else find(name)\n"
    f"{statement.format(name)}"
  )
  error = run(code).stderr
  assert f"ImportError: `optax_boost.{name}` needs Flax" in error
  assert "pip install 'optax-boost[flax]'" in error
