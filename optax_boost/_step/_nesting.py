"""Wrappers that do more than change updates are around every transformation of optax, never inside.

:func:`master_weights`, :func:`stochastic_rounding` and :func:`average_params` keep params plus
*their* updates, and :func:`dynamic_loss_scale` and :func:`freeze_layers` are of the whole loss. So
nothing may be around such a step: its state is the root of an optimizer state. (A wrapper around
wrappers fills a slot of the same step.) :func:`accumulate`, :func:`skip_spikes` and
:func:`layerwise_decay` only read gradients and change updates, so they may stand anywhere, as
``optax.MultiSteps`` may; but members of a chain after the first two would act in skipped steps.
"""

import collections
from collections.abc import Iterator, Sequence
import re
from typing import Any

import optax

from optax_boost._form import _protocol
from optax_boost._foundation import _trees
from optax_boost._step import _slots, _state

# The slots of the root.
OF_ROOT = ("scaling", "precision", "averaging", "freezing")


def check(opt_state: optax.OptState, tx: optax.GradientTransformation | None = None) -> None:
  """Raises ValueError if a step below the root of an optimizer state must be the root.

  Also raises for a step that leaves out batches in a chain, before other members. With `tx`, also
  raises if a user's transformation around a step keeps the step's state as its own.
  """
  is_own = tx is None or _slots.step_of(tx) is not None
  is_step = isinstance(opt_state, _state.StepState) and is_own
  _check_steps(opt_state.inner_state if is_step else opt_state)


def _check_steps(opt_state: optax.OptState) -> None:
  """Raises ValueError for a step in `opt_state`, the state of what a step or optax holds."""
  for state, around, is_last in _steps(opt_state):
    if names := _names(state, OF_ROOT):
      name = names[0]
      raise ValueError(
        f"`{name}` must be around the whole optimizer; got it inside of `{around}`. Write"
        f" `{name}({around}(...), ...)`."
      )
    if state.left_out is not None and not is_last:
      name = _names(state)[0]
      raise ValueError(
        f"`{name}` must be the last member of a chain, since members after it act in steps that it"
        f" skips. Write `{name}({around}(...), ...)`."
      )


def check_below(step: _slots.Step, inner_state: optax.OptState) -> None:
  """Raises ValueError if a method in `inner_state` does not bear what `step` does."""
  _check_steps(inner_state)
  drops = step.accumulation if step.checks_gradients else None
  judge = step.scaling or step.precision or step.spikes or drops
  if judge and step.axis_name is None and _protocol.declaring_states(inner_state, "across_devices"):
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
    name = [*_names(state), "layerwise_decay"][0]
    raise ValueError(
      f"`{method}` can't hold `{name}`, which acts on each step of the training. Put it around:"
      f" `{name}({method}(...), ...)`."
    )


def _names(state: _state.StepState, slots: Sequence[str] = _state.SLOTS) -> list[str]:
  """Returns the names of the wrappers whose `slots` are filled."""
  states = [getattr(state, slot) for slot in slots]
  return [_function_of(slot_state) for slot_state in states if slot_state is not None]


def _function_of(state: Any) -> str:
  """Returns the name of the function to which a state belongs, by the name of the state's class."""
  name = type(state).__name__.removesuffix("State")
  snake = "_".join(re.findall("[A-Z][a-z0-9]*", name)).lower()
  for package, module in (("optax", optax), ("optax.contrib", optax.contrib)):
    for public in (name, snake, name.lower()):
      if hasattr(module, public):
        return f"{package}.{public}"
  return snake


def _steps(
  node: Any, around: str = "", is_last: bool = True
) -> Iterator[tuple[_state.StepState, str, bool]]:
  """Yields each step, the name of the outermost transformation around it, and whether it is last.

  A step is not last if members of a chain, whose state is a tuple of states, are after it.
  """
  is_chain = type(node) in (tuple, collections.OrderedDict)
  if isinstance(node, _state.StepState):
    yield node, around or "your_transformation", is_last
  elif is_chain:
    around = around or "optax.chain"
  elif not isinstance(node, list | dict):
    around = around or _function_of(node)
  flat = _trees.flatten_node(node)
  children = [] if flat is None else list(flat[0])
  for i, child in enumerate(children):
    after = children[i + 1 :] if is_chain else ()
    yield from _steps(child, around, is_last and not any(isinstance(x, tuple) for x in after))
