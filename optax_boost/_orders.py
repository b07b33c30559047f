"""Refuses orders of wrappers and chains that give wrong steps, and names orders that work.

The tree of an optimizer's states has the shape of its wrappers and chains, so one walk over it
checks them all. The ``init`` of a wrapper checks the transformations inside it; the train step and
:func:`apply_gradients` check the whole optimizer. The checks read the declarations of the states'
types (:mod:`optax_boost._protocol`), so no method is known by name.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_boost import _protocol


def check(opt_state: optax.OptState, params: optax.Params | None = None) -> None:
  """Raises ValueError for an order that gives wrong steps, and names one that works.

  If `params` are given, also for orders that are right for float32 params only.
  """
  half = any(_is_half_precision(leaf) for leaf in jax.tree.leaves(params))
  for node in _protocol.nodes(opt_state):
    if type(node) is tuple:
      _check_chain([state for state in node if isinstance(state, tuple)])
    elif isinstance(node, optax.ApplyIfFiniteState) and half:
      _refuse(node, "rounds", "optax.apply_if_finite", _ZEROS)
    for holder in _protocol.declared(node, "replaces"):
      _refuse(node, "snapshots", holder, _REPLACES)
    for holder in _protocol.declared(node, "changes"):
      _refuse(node, "snapshots", holder, _CHANGES)
      _refuse(node, "rounds", holder, _CHANGES)
      _refuse(node, "gathers", holder, _CHANGES_A_WINDOW)


def _is_half_precision(leaf: Any) -> bool:
  """Whether a param is kept in fewer than 32 bits; a leaf may be a Python number or a key, too."""
  dtype = jnp.result_type(leaf)
  return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < 4


_REPLACES = (
  "it follows the params after each step, and `{holder}` replaces its updates in some of the steps"
)
_CHANGES = "it computes the new params from its own updates, which `{holder}` changes afterwards"
_ZEROS = (
  "its updates are float32, and `{holder}` replaces the updates of a skipped step by zeros in the"
  " gradients' dtype"
)
_CHANGES_A_WINDOW = (
  "a leaf for which `{holder}` changes a part of a window would get the rest of the window's"
  " gradient, divided by the whole window's weight"
)


def _refuse(holder_state: Any, kind: str, holder: str, reason: str) -> None:
  """Refuses states that declare `kind` inside the state of a method, or of a wrapper of optax."""
  for name in _protocol.declared_inside(holder_state, (kind,))[kind]:
    works = f"`{name}({holder}(...))`"
    if kind == "gathers" and name != "accumulate":
      works += f" or `accumulate({holder}(...))`"
    raise ValueError(
      f"`{holder}` can't hold `{name}`: {reason.format(holder=holder)}. Put its wrapper around the"
      f" whole: {works}."
    )


def _check_chain(states: list[Any]) -> None:
  """Checks the states of the members of an ``optax.chain``."""
  kinds = ("normalizes", "remembers", "requests", "rounds", "scales", "snapshots")
  names_of_states = [_protocol.declared_inside(state, kinds) for state in states]
  _check_undone(states, names_of_states)
  for place, names_of_kind in enumerate(names_of_states):
    if place and _protocol.LOSS_SCALE in names_of_kind["requests"]:
      raise ValueError(
        "a loss scale must come first in a chain: a member before it gets gradients of the scaled"
        f" loss; got the scale in place {place + 1} of {len(states)}. Put it around the chain:"
        " `dynamic_loss_scale(optax.chain(...))`."
      )
    names = names_of_kind["snapshots"] + names_of_kind["rounds"]
    if names and place + 1 < len(states):
      raise ValueError(
        f"`{names[0]}` must come last in a chain: it computes the new params from its own updates,"
        f" which a member after it may change; got it in place {place + 1} of {len(states)}. Put it"
        f" around the chain: `{names[0]}(optax.chain(...))`."
      )


def _check_undone(states: list[Any], names_of_states: list[dict[str, list[str]]]) -> None:
  """Refuses methods whose effect a later member of the chain undoes: factors, and freezing."""
  scaling: list[str] = []
  freezing: list[str] = []
  for state, names_of_kind in zip(states, names_of_states, strict=True):
    normalizing = names_of_kind["normalizes"]
    # A method that chooses the new params themselves: a factor on its updates would spoil them.
    choosing = any(
      _protocol.declared(node, "normalizes") for node in _protocol.declaring_states(state, "exact")
    )
    if scaling and choosing:
      raise ValueError(
        f"`{scaling[0]}` must not stand before an optimizer that chooses the new params themselves;"
        f" got it before one with a {normalizing[0]}, which divides the factors away. Leave it out."
      )
    if scaling and normalizing:
      raise ValueError(
        f"`{scaling[0]}` must come after an optimizer that normalizes its gradients, which divides"
        f" the factors away; got it before one with a {normalizing[0]}. Put it last:"
        f" `optax.chain(optimizer, {scaling[0]}(...))`."
      )
    moments = names_of_kind["remembers"]
    if freezing and moments:
      raise ValueError(
        f"`{freezing[0]}` must hold the whole optimizer: moments after it, here those of a"
        f" {moments[0]}, move a leaf on while it is frozen. Put them inside:"
        f" `{freezing[0]}(optax.chain(...))`."
      )
    scaling += names_of_kind["scales"]
    # If a mask hides leaves from the method, the later moments may be those of the hidden leaves.
    for node in _protocol.declaring_states(state, "changes"):
      freezing += [] if node.hidden else _protocol.declared(node, "changes")
