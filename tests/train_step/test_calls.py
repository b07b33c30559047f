"""A step's own Python stays short."""

import jax
import pytest

from benchmarks import calls

# Above the figures in CONTRIBUTING.md, for versions of Python and JAX differ.
BOUNDS = {"first call": 1_500, "warm call": 40, "new depth": 1_050}


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older JAX: a warm call takes 193")
def test_a_step_calls_few_functions_of_the_package():
  counted = {name: of_call.functions for name, of_call in calls.step_calls().items()}
  over = {name: own for name, own in counted.items() if own.total() > BOUNDS[name]}
  assert not over, "see `python -m benchmarks.calls`"
