"""What is accepted on purpose, by callable, argument and label, with the reason."""

import functools

import jax
import optax

from tests import registry
from tests.bad_input import problem

_OBSERVES = "it hands gradients on as they are; the optimizer behind it decides what it takes"
_STATELESS = "it has no state and looks at none"
_ANY_TREE = "it maps over the gradients alone; params only name the leaves' axes"
_INNER = "params and gradients are handed to the inner optimizer, which decides what it takes"


@functools.cache
def on_purpose() -> dict[tuple[str, str, str], str]:
  without_state = [
    name
    for name in (
      "centralize",
      "layerwise_decay",
      *(row.factory for row in registry.ROWS if row.bad_values is not None),
    )
    if jax.eval_shape(problem.make(name).init, problem.PARAMS) == optax.EmptyState()
  ]
  return {
    ("freeze_layers", "updates", "integers"): _OBSERVES,
    ("freeze_layers", "updates", "bools"): _OBSERVES,
    ("record_trajectory", "updates", "integers"): _OBSERVES,
    ("record_trajectory", "updates", "bools"): _OBSERVES,
    **{
      (name, argument, label): _ANY_TREE
      for name in without_state
      for argument in ("updates", "params")
      for label in ("other tree", "leaf missing", "other shape")
    },
    **{
      (name, "state", label): _STATELESS
      for name in without_state
      for label in ("None", "empty", "number", "params", "Adam's", "the state's fields")
    },
    **{
      ("switch_after", argument, label): _INNER
      for argument in ("updates", "params")
      for label in ("other tree", "leaf missing", "other shape")
    },
    **{
      ("accumulate", "params", label): _INNER
      for label in ("other tree", "leaf missing", "other shape")
    },
  }
