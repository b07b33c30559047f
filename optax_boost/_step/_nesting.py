"""Refuses a step in a place where another transformation makes its result wrong.

A step computes averages, masters and rounding from the params plus *its* updates, and makes no step
where a batch is left out. So what is around a step must neither change its updates nor act in
skipped steps:

- in a chain a step is the last member; the members before it see the gradient of each micro-batch;
- a transformation that replaces updates (``optax.lookahead``, ...) holds no step with an average
  (masters follow the changed params);
- a step that changes updates (freezing, layer rates) holds no step with an average, masters or
  rounding, at any depth;
- a loss scale and frozen layers are of the whole loss, so such a step sees all params, and no
  member of a chain is before it;
- a transformation that leaves out or sums gradients, or steps along them (``optax.MultiSteps``,
  ...), holds no loss scale, which must see each gradient first.

The state tells all of this: a holder's state is the parent of the states that it holds. So the
check runs where a state is seen from its root: in ``init`` of whatever holds transformations,
``apply_gradients``, the train steps, and ``averaged_params``. It does not see the holder in a bare
loop of ``tx.update``.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _arrays, _checks, _masks, _trees
from optax_boost._step import _slots, _state

# Classes of states of optax's transformations, and the names of these transformations.
_NAMES = {
  "ApplyIfFiniteState": "optax.apply_if_finite",
  "ConditionallyMaskState": "optax.conditionally_mask",
  "ConditionallyTransformState": "optax.conditionally_transform",
  "LookaheadState": "optax.lookahead",
  "MechanicState": "optax.contrib.mechanize",
  "MultiStepsState": "optax.MultiSteps",
  "SAMState": "optax.contrib.sam",
  "ScheduleFreeState": "optax.contrib.schedule_free",
}
# Those that return other updates than the transformations that they hold.
_REPLACING = {"LookaheadState", "MechanicState", "SAMState", "ScheduleFreeState"}
# Those that use gradients themselves before the transformations that they hold do.
_READING = {"ApplyIfFiniteState", "MechanicState", "MultiStepsState", "SAMState"}
# Those that call the transformations that they hold inside of a `lax.cond`.
_CONDITIONAL = {"ApplyIfFiniteState", "ConditionallyMaskState", "ConditionallyTransformState"}
_UNEQUAL_BRANCHES = "its `lax.cond` needs updates in the gradients' dtype, and gets them in float32"
# The functions that fill the slots of a state.
_WRAPPERS = {
  "accumulation": "accumulate",
  "scaling": "dynamic_loss_scale",
  "precision": "",  # see `_precision_name`
  "averaging": "average_params",
  "spikes": "skip_spikes",
  "freezing": "freeze_layers",
}


def check(opt_state: optax.OptState, params: optax.Params = ()) -> None:
  """Raises ValueError if a step in `opt_state` is in a place that makes it wrong.

  With `params`, also refuses steps whose updates are wider than these, where optax can't take them.
  """
  dtypes = [jnp.result_type(p) for p in jax.tree.leaves(params)]
  is_half = any(jnp.issubdtype(d, jnp.floating) and d.itemsize < 4 for d in dtypes)
  for state, holders in _steps(opt_state):
    for holder, index in holders:
      widens = is_half and state.precision and type(holder).__name__ in _CONDITIONAL
      if reason := _UNEQUAL_BRANCHES if widens else _reason(state, holder, index):
        name, called = _name(state), _holder_name(holder)
        raise ValueError(
          f"`{name}` can't be inside of `{called}` here: {reason}. Put it around the whole:"
          f" `{name}({called}(...), ...)`."
        )


def check_below(step: _slots.Step, inner_state: optax.OptState, params: optax.Params) -> None:
  """Raises ValueError if `step` makes a step in its `inner_state` wrong, or sees too few params."""
  check(inner_state, params)
  whole = step.scaling or step.freezing
  if whole and (hidden := _masks.masked_paths(params)):
    raise ValueError(
      f"`{whole.method}` must see all params, since it acts on the whole loss; `optax.masked` or"
      f" `optax.partition` hides {_checks.shorten(hidden)} from it. Put it around the whole:"
      f" `{whole.method}(optax.partition(...), ...)`."
    )
  changing = step.layer_rates or step.freezing
  # A loss scale casts the updates of half-precision params, which undoes masters further inside.
  dtypes = [jnp.result_type(p) for p in jax.tree.leaves(params)]
  casts = step.scaling if any(_arrays.accumulator_dtype(d) != d for d in dtypes) else None
  for below in _trees.find_states(inner_state, _state.StepState):
    if step.leaves_out and below.scaling:
      raise ValueError(
        f"`{step.method}` can't hold `dynamic_loss_scale` further inside: it leaves out a batch"
        " that overflows before the loss scale sees it, so the scale would never come down. Put"
        f" `dynamic_loss_scale` around the whole: `dynamic_loss_scale({step.method}(...), ...)`."
      )
    changes = changing or (None if step.precision else below.precision and casts)
    kept = "average_params" if below.averaging else below.precision and _precision_name(below)
    if changes and kept:
      raise ValueError(
        f"`{changes.method}` can't hold `{kept}` further inside: a transformation between the two"
        f" applies the changed updates. Put `{kept}` around the whole:"
        f" `{kept}({changes.method}(...), ...)`."
      )
  judges = step.checks_gradients or step.checks_updates or step.spikes
  exchanges = _protocol.declaring_states(inner_state, "across_devices")
  if judges and step.axis_name is None and exchanges:
    judge = step.scaling or step.precision or step.spikes or step.accumulation
    raise ValueError(
      f"`{judge.method}` needs `axis_name` around a method that exchanges gradients, as `adasum`"
      " does: if one device left its batch out, the others would wait for it without end. Pass the"
      f" axis of the method: `{judge.method}(..., axis_name=...)`."
    )
  if step.layer_rates and _protocol.declaring_states(inner_state, "exact"):
    raise ValueError(
      "`layerwise_decay` can't scale the updates of an optimizer that permutes params, as"
      " `sgperm` and `laperm` do. Leave `layerwise_decay` out."
    )


def refuse_steps(method: str, held_states: optax.OptState) -> None:
  """Raises ValueError if a method, which is a part of a step, holds a step itself."""
  for state in _trees.find_states(held_states, _state.StepState):
    name = _name(state)
    raise ValueError(
      f"`{method}` can't hold `{name}`, which acts on each step of the training. Put it around:"
      f" `{name}({method}(...), ...)`."
    )


def _name(state: _state.StepState) -> str:
  """Returns the name of a wrapper in a step; layer rates are the only slot without a state."""
  names = _WRAPPERS | {"precision": _precision_name(state)}
  filled = [name for slot, name in names.items() if getattr(state, slot) is not None]
  return filled[0] if filled else "layerwise_decay"


def _precision_name(state: _state.StepState) -> str:
  has_masters = hasattr(state.precision, "master_params")
  return "master_weights" if has_masters else "stochastic_rounding"


def _steps(
  opt_state: optax.OptState,
) -> list[tuple[_state.StepState, list[tuple[Any, int]]]]:
  """Returns each step in a state, with the nodes around it that are no steps.

  A node around a step comes with the index of its child that holds the step.
  """
  found = []
  pending: list[tuple[Any, list[tuple[Any, int]]]] = [(opt_state, [])]
  while pending:
    node, holders = pending.pop()
    if isinstance(node, _state.StepState):
      found.append((node, holders))
      pending.append((node.inner_state, holders))
    elif isinstance(node, optax.PartitionState):
      pending += [(part, [*holders, (node, 0)]) for part in node.inner_states.values()]
    elif (flat := _trees.flatten_node(node)) is not None:
      pending += [(child, [*holders, (node, i)]) for i, child in enumerate(flat[0])]
  return found


def _reason(state: _state.StepState, holder: Any, index: int) -> str:
  """Returns why a step is wrong in the child `index` of a holder's state, or "" if it is right."""
  if state.averaging and type(holder).__name__ in _REPLACING:
    return "it replaces the updates that lead to the averaged params"
  if state.freezing and type(holder).__name__ == "ScheduleFreeState":
    return "it moves params whose updates are zero"
  if state.scaling and type(holder).__name__ in _READING:
    return "it acts on gradients that still have the loss scale, and hides their overflows"
  chain = _chain(holder)
  if chain and (type(holder) is dict or index + 1 < len(holder)):
    return "members after it would change its updates, and act in skipped steps"
  if chain and (state.scaling or state.freezing):
    return "the members before it don't know of the loss scale or the frozen layers"
  return ""


def _chain(node: Any) -> str:
  """Returns the name of the chain whose state a node is; "" for any other node.

  A state of ``optax.named_chain`` is an ordered dict. A plain dict is sorted by JAX, so the order
  of the members is not known. A tuple or dict that holds an array, or a tree of arrays without a
  state, is the state of a user's transformation.
  """
  if type(node) not in (tuple, dict, collections.OrderedDict):
    return ""
  children = list(node.values()) if isinstance(node, dict) else list(node)
  if len(children) < 2 or not all(map(_holds_state, children)):
    return ""
  return "optax.named_chain" if isinstance(node, dict) else "optax.chain"


def _holder_name(holder: Any) -> str:
  name = type(holder).__name__
  return _chain(holder) or _NAMES.get(name, name)


def _holds_state(node: Any) -> bool:
  """Returns whether a node is a state, a named tuple; or a container that holds one, or nothing."""
  if _masks.is_masked(node):
    return False
  if isinstance(node, tuple) and hasattr(node, "_fields"):
    return True
  flat = _trees.flatten_node(node)
  if flat is None or not isinstance(node, tuple | list | dict):
    return False
  return not flat[0] or any(map(_holds_state, flat[0]))
