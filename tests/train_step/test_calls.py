"""A compiled step's own Python does not depend on the model."""

import jax
import pytest

from benchmarks import calls


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older JAX flattens in Python")
@pytest.mark.parametrize("name", calls.optimizers(2))
def test_a_warm_call_calls_as_many_functions_for_six_layers_as_for_two(name):
  two = calls.step_calls(calls.optimizers(2)[name], 2)
  six = calls.step_calls(calls.optimizers(6)[name], 6)
  assert two["warm call"] == six["warm call"]
  # The count sees layers where there is work for each of them; the loss of a plain optimizer is
  # called as it is.
  first_of_two, first_of_six = (counts["first call"].functions.total() for counts in (two, six))
  assert first_of_two < first_of_six or name == "adamw"
