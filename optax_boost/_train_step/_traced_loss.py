"""The loss of a step as a jaxpr, which freezing and methods that treat layers need."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from optax_boost._foundation import _batches, _types
from optax_boost._trace import _frozen_scans, _jaxpr, _layer_axes, _leaf_uses


class TracedLoss:
  """A loss as a jaxpr ("program"), which is traced when it is first needed.

  Most steps don't need it: they freeze whole leaves or nothing, and no method reads `layers`.
  """

  def __init__(
    self, loss_fn: _types.LossFn, params: optax.Params, arguments: tuple[_types.Tree, ...]
  ) -> None:
    """`arguments` are the loss's arguments after the params: the model state, then data."""
    self._loss_fn, self._params, self._arguments = loss_fn, params, arguments
    self._programs: dict[Any, tuple[_types.Jaxpr, _types.TreeDef]] = {}

  def __call__(self, params: optax.Params) -> tuple[_types.FloatScalar, Any]:
    """Returns the loss and aux, computed by the program."""
    return self.run_with_leaves(params, jax.tree.leaves(params))

  @property
  def program(self) -> _types.Jaxpr:
    """Returns the program for the types of the current params."""
    return self._trace(self._params)[0]

  def run_with_leaves(
    self, params: optax.Params, leaves: Sequence[Any]
  ) -> tuple[_types.FloatScalar, Any]:
    """Returns the loss and aux, computed from `leaves` instead of the leaves of `params`.

    A leaf may be split into frozen and trained parts (:mod:`optax_boost._trace._frozen_scans`).
    """
    program, structure = self._trace(params)
    outputs = _frozen_scans.evaluate(program, [*leaves, *jax.tree.leaves(self._arguments)])
    return jax.tree.unflatten(structure, outputs)

  def layers(self) -> _layer_axes.LayerAxes:
    """Returns the roles of the params' axes. The model state does not count as data."""
    model_state, *data = self._arguments
    state_flags = [None] * len(jax.tree.leaves(model_state))
    return _layer_axes.describe(
      self.program, self._params, [*state_flags, *_batches.data_flags(data)]
    )

  def statistics_axes(self) -> dict[int, int]:
    """Returns along which axis a scan over layers slices each leaf of the model state.

    The dict maps the index of a leaf to the axis. Leaves that no scan slices are not in the dict.
    """
    model_state, *_ = self._arguments
    first = len(jax.tree.leaves(self._params))
    end = first + len(jax.tree.leaves(model_state))
    return _leaf_uses.scanned_axes(self.program, range(first, end))

  def _trace(self, params: optax.Params) -> tuple[_types.Jaxpr, _types.TreeDef]:
    """Returns the program for params of the same types as `params`, and its output's structure."""
    types = jax.tree.map(jax.typeof, params)
    signature = (jax.tree.structure(types), *jax.tree.leaves(types))
    if signature not in self._programs:
      trace = jax.make_jaxpr(_jaxpr.uncached(self._loss_fn), return_shape=True)
      program, shapes = trace(params, *self._arguments)
      self._programs[signature] = program, jax.tree.structure(shapes)
    return self._programs[signature]
