"""A compiled step's own Python does not depend on the model."""

import jax
import pytest

from benchmarks import calls


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older JAX flattens in Python")
@pytest.mark.parametrize("name", calls.optimizers(2))
def test_a_warm_call_calls_as_many_functions_for_three_layers_as_for_two(name):
  steps = ("first call", "warm call")
  two, three = (calls.step_calls(calls.optimizers(n)[name], n, steps) for n in (2, 3))
  assert two["warm call"] == three["warm call"]
  # The count sees layers where there is work for each of them; the loss of a plain optimizer is
  # called as it is.
  first_of_two, first_of_three = (counts["first call"].functions.total() for counts in (two, three))
  assert first_of_two < first_of_three or name == "adamw"
