"""Trees, states and extra arguments that no transformation takes, for every public factory."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import registry
from tests.bad_input import accepted
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import refusals
from tests.bad_input.kinds import Bad

PARAMS, GRADS = problem.PARAMS, problem.GRADS
LEAVES = {
  "text leaves": Bad(jax.tree.map(lambda p: "a", PARAMS), TypeError, "leaf"),
  "Python floats": Bad(jax.tree.map(lambda p: 1.0, PARAMS), TypeError, "leaf"),
  "integers": Bad(jax.tree.map(lambda p: p.astype(int), PARAMS), TypeError, "leaf"),
  "bools": Bad(jax.tree.map(lambda p: p > 0, PARAMS), TypeError, "leaf"),
  "functions": Bad(jax.tree.map(lambda p: len, PARAMS), TypeError, "leaf"),
  "keys": Bad(jax.tree.map(lambda p: jax.random.key(0), PARAMS), TypeError, "leaf"),
}
TREES = {
  "other tree": Bad({"other": jnp.ones(2)}, ValueError, "gradients|updates|params"),
  "leaf missing": Bad({"conv": GRADS["conv"]}, ValueError, "gradients|updates|params"),
  "other shape": Bad(
    jax.tree.map(lambda p: jnp.ones(7), PARAMS), ValueError, "gradients|updates|params|leaf"
  ),
}
STATES = {
  "None": Bad(None, TypeError, "state"),
  "empty": Bad((), TypeError, "state"),
  "number": Bad(3, TypeError, "state"),
  "params": Bad(PARAMS, TypeError, "state"),
  "Adam's": Bad(optax.adam(0.1).init(PARAMS), TypeError, "state"),
  "the state's fields": Bad(tuple(optax.trace(0.9).init(PARAMS)), TypeError, "state"),
}
# Of the extra arguments that a method calls or reads itself.
TO_A_VECTOR = Bad(lambda params, **_: jnp.ones(2), TypeError)
EXTRA = {
  ("dim_reduce", "value"): {
    "None": Bad(None, ValueError),
    "text": Bad("a", TypeError),
    "vector": Bad(jnp.ones(2), (TypeError, ValueError)),
  },
  ("dim_reduce", "value_fn"): {
    "None": Bad(None, ValueError),
    "number": Bad(3, TypeError),
    "to a vector": TO_A_VECTOR,
    "to None": Bad(lambda params, **_: None, TypeError),
    "to text": Bad(lambda params, **_: "a", TypeError),
    "to a pair": Bad(lambda params, **_: (jnp.ones([]), None), TypeError),
    "to a complex number": Bad(lambda params, **_: 1j, TypeError),
  },
  ("svrg", "grad_fn"): {
    "None": Bad(None, ValueError),
    "number": Bad(3, TypeError),
    "to another tree": Bad(lambda params: {"other": jnp.ones(2)}, ValueError),
    "to None": Bad(lambda params: None, ValueError),
  },
  ("svrg", "full_grad_fn"): {
    "None": Bad(None, ValueError),
    "number": Bad(3, TypeError),
    "to another tree": Bad(lambda params: {"other": jnp.ones(2)}, ValueError),
  },
  ("accumulate", "weight"): {
    "text": Bad("a", TypeError),
    "vector": Bad(jnp.ones(2), (TypeError, ValueError)),
    "complex": Bad(1j, TypeError),
    "bool": Bad(True, TypeError),
    "10**400": Bad(kinds.HUGE, ValueError),
  },
  ("sgperm", "partitions"): {
    "other tree": Bad({"other": jnp.ones(2)}, ValueError),
    "text": Bad("a", (TypeError, ValueError)),
    "floats": Bad(GRADS, (TypeError, ValueError)),
    "twice the same": Bad(
      jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int32), PARAMS), ValueError
    ),
  },
}
NEEDS_PARAMS = {row.factory for row in registry.ROWS if row.needs_params}


def calls(factory: str) -> Iterator[tuple[str, Any, Bad]]:
  """Names, functions of the bad value and the bad values."""
  tx = problem.make(factory)
  state = None

  def update(updates: Any = GRADS, state: Any = None, params: Any = PARAMS, **extra: Any) -> Any:
    if factory != "adasum":
      return tx.update(updates, state, params, **{**problem.extra_args(), **extra})
    # Its axis must be bound before it looks at anything else.
    mapped = jax.vmap(
      lambda u: tx.update(u, state, params), axis_name="batch", axis_size=2, in_axes=None
    )
    return mapped(updates)

  for label, bad in LEAVES.items():
    yield f"init: {label}", tx.init, bad
  state = tx.init(PARAMS)
  for label, bad in LEAVES.items():
    # Leaves without a shape may be refused for that.
    either = bad._replace(error=(TypeError, ValueError))
    yield f"updates: {label}", lambda value: update(value, state), either
  for label, bad in TREES.items():
    yield f"updates: {label}", lambda value: update(value, state), bad
  for label, bad in TREES.items():
    yield f"params: {label}", lambda value: update(state=state, params=value), bad
  for label, bad in STATES.items():
    yield f"state: {label}", lambda value: update(state=value), bad
  if factory in NEEDS_PARAMS:
    bad = Bad(None, ValueError, "params")
    yield "params: None", lambda value: update(state=state, params=value), bad
  for (method, argument), bad_values in EXTRA.items():
    if method == factory:
      for label, bad in bad_values.items():
        mention = bad.mention or argument
        yield (
          f"{argument}: {label}",
          lambda value, name=argument: update(state=state, **{name: value}),
          bad._replace(mention=mention),
        )


@pytest.mark.parametrize("factory", problem.FACTORIES)
def test_trees_and_states_of_others_are_refused(factory):
  complaints = {}
  for name, call, bad in calls(factory):
    found = refusals.complaint(lambda call=call, bad=bad: call(bad.value), bad, name)
    if (factory, *name.split(": ")) in accepted.on_purpose():
      assert found == refusals.ACCEPTED, f"{name} is refused, but listed as accepted: {found}"
    elif found:
      complaints[name] = found
  assert not complaints, "\n".join(f"{name}: {text}" for name, text in complaints.items())


def test_a_loss_that_returns_no_scalar_is_refused():
  bad_losses = {
    "vector": lambda params, batch: jnp.ones(2),
    "None": lambda params, batch: None,
    "text": lambda params, batch: "loss",
    "a pair without has_aux": lambda params, batch: (jnp.ones([]), None),
    "number": lambda params, batch: 1.0,
    "integer": lambda params, batch: jnp.ones([], int),
    "complex": lambda params, batch: jnp.ones([], complex),
    "bool": lambda params, batch: jnp.ones([], bool),
  }
  for label, loss_fn in bad_losses.items():
    step = optax_boost.make_train_step(loss_fn, problem.SGD)
    bad = Bad(loss_fn, TypeError, "`loss_fn`")
    state = step.init(PARAMS)
    found = refusals.complaint(lambda: step(state, problem.X), bad, label)  # noqa: B023
    assert not found, f"{label}: {found}"


def test_params_that_numpy_made_are_arrays():
  """NumPy's arrays are accepted everywhere."""
  params = jax.tree.map(np.asarray, PARAMS)
  for factory in problem.FACTORIES:
    problem.make(factory).init(params)
