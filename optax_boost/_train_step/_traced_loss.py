"""The loss of a step as a traced program, for those who need more of it than its results."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from optax_boost._foundation import _batches, _types
from optax_boost._trace import _frozen_scans, _jaxpr, _layer_axes, _leaf_uses


class TracedLoss:
  """A loss, traced when a program is first asked for, and once for params of each type.

  A step without frozen stacks, whose methods don't ask for the axes of leaves, never traces it.
  """

  def __init__(
    self, loss_fn: _types.LossFn, params: optax.Params, arguments: tuple[_types.Tree, ...]
  ) -> None:
    """`arguments` are those of the loss after the params: the model state, then data."""
    self._loss_fn, self._params, self._arguments = loss_fn, params, arguments
    self._programs: dict[Any, tuple[_types.Jaxpr, Any]] = {}

  def __call__(self, params: optax.Params) -> tuple[jax.Array, Any]:
    """The loss and aux, computed by the program."""
    return self.run_cut(params, jax.tree.leaves(params))

  @property
  def program(self) -> _types.Jaxpr:
    """The program at the current params."""
    return self._trace(self._params)[0]

  def run_cut(self, params: optax.Params, leaves: Sequence[Any]) -> Any:
    """The loss's output, computed with `leaves` in the place of those of `params`.

    Some of `leaves` may be in parts, of which some are frozen
    (:mod:`optax_boost._trace._frozen_scans`).
    """
    program, structure = self._trace(params)
    outputs = _frozen_scans.run(program, [*leaves, *jax.tree.leaves(self._arguments)])
    return jax.tree.unflatten(structure, outputs)

  def layers(self) -> _layer_axes.LayerAxes:
    """The axes of the params; the model state holds constants."""
    model_state, *data = self._arguments
    state_flags = [None] * len(jax.tree.leaves(model_state))
    return _layer_axes.describe(
      self.program, self._params, [*state_flags, *_batches.data_flags(data)]
    )

  def statistics_axes(self) -> dict[int, int]:
    """The axis of layers of each leaf of the model state that a scan over layers slices."""
    model_state, *_ = self._arguments
    first = len(jax.tree.leaves(self._params))
    end = first + len(jax.tree.leaves(model_state))
    return _leaf_uses.scanned_axes(self.program, range(first, end))

  def _trace(self, params: optax.Params) -> tuple[_types.Jaxpr, Any]:
    """The program for params of these types, and the structure of its output."""
    types = jax.tree.map(jax.typeof, params)
    signature = (jax.tree.structure(types), *jax.tree.leaves(types))
    if signature not in self._programs:
      trace = jax.make_jaxpr(_jaxpr.uncached(self._loss_fn), return_shape=True)
      program, shapes = trace(params, *self._arguments)
      self._programs[signature] = program, jax.tree.structure(shapes)
    return self._programs[signature]
