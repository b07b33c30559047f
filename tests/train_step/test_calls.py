"""A compiled step's own Python does not depend on the model."""

import jax
import pytest

from benchmarks import calls


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older JAX flattens in Python")
def test_a_warm_call_calls_as_many_functions_for_six_layers_as_for_two():
  two, six = (calls.step_calls(layers) for layers in (2, 6))
  assert two["warm call"] == six["warm call"]
  # The count sees layers where there is work for each of them.
  assert two["first call"].functions.total() < six["first call"].functions.total()
