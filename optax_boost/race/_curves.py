"""The curves of one method in a race."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import numpy as np

from optax_boost import _base

LOSS = "training loss"


@dataclasses.dataclass(frozen=True)
class RaceCurves:
  """One method's curves, at ``m`` points of the training, for ``n`` seeds.

  Attributes:
    steps: ``(m,)``, the steps made.
    loss: ``(n, m)``, the mean training loss of the steps since the point before.
    metrics: by name, ``(n, m)``, the values of `evaluate`.
    gradient_evaluations: ``(m,)``, the evaluations so far, in gradients of one batch; a value of
      the loss without its gradient counts a third. Where it varies, that of the first seed.
    seconds: ``(m,)``, the time that the steps took so far, for one seed alone, without compiling
      and evaluating; nan if unknown.
    compile_seconds: the time to compile the step, without programs for depths of frozen layers that
      come later; nan if unknown.
    seeds_at_once: how many seeds were trained at once.
  """

  steps: np.ndarray
  loss: np.ndarray
  metrics: Mapping[str, np.ndarray]
  gradient_evaluations: np.ndarray
  seconds: np.ndarray
  compile_seconds: float
  seeds_at_once: int

  def __post_init__(self) -> None:
    _check_array("steps", self.steps, 1, kinds="iu")
    points = len(self.steps)
    if not points or np.any(np.diff(self.steps, prepend=0) <= 0):
      raise ValueError(
        f"`steps` must be whole numbers >= 1 that grow, at least one; got"
        f" {_base.shorten(self.steps.tolist())}."
      )
    _check_array("loss", self.loss, 2)
    if not len(self.loss) or self.loss.shape[1] != points:
      raise ValueError(
        f"`loss` must have a row for each seed, at least one, and {points} columns, the points of"
        f" `steps`; got shape {self.loss.shape}."
      )
    _base.check_type("metrics", self.metrics, Mapping, "a dict of arrays by name")
    for name, rows in self.metrics.items():
      if not isinstance(name, str) or name == LOSS:
        raise ValueError(
          f"`metrics` must have names other than '{LOSS}'; got {_base.shorten(name)}."
        )
      _check_array(f"metrics[{name!r}]", rows, 2)
      if rows.shape != self.loss.shape:
        raise ValueError(
          f"`metrics[{name!r}]` must have the shape of `loss`, {self.loss.shape}; got {rows.shape}."
        )
    for name in ("gradient_evaluations", "seconds"):
      spent = getattr(self, name)
      _check_array(name, spent, 1)
      known = spent[~np.isnan(spent)]
      if len(spent) != points or np.any(np.diff(known, prepend=0) < 0) or np.any(np.isinf(known)):
        raise ValueError(
          f"`{name}` must be {points} numbers >= 0 that do not fall, or nan; got"
          f" {_base.shorten(spent.tolist())}."
        )
    if not (isinstance(self.compile_seconds, float) and math.isnan(self.compile_seconds)):
      _base.check_number("compile_seconds", self.compile_seconds)
    _base.check_whole_number("seeds_at_once", self.seeds_at_once, static=True)

  @property
  def gradient_evaluations_per_step(self) -> float:
    """The mean over the run."""
    return float(self.gradient_evaluations[-1] / self.steps[-1])

  @property
  def seconds_per_step(self) -> float:
    """The mean over the run."""
    return float(self.seconds[-1] / self.steps[-1])

  @property
  def diverged(self) -> np.ndarray:
    """``(n,)``, whether the loss was not finite at the end."""
    return ~np.isfinite(self.loss[:, -1])


def _check_array(name: str, value: Any, axes: int, kinds: str = "iuf") -> None:
  if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.ndim != axes:
    what = "whole numbers" if kinds == "iu" else "real numbers"
    got = f"shape {value.shape}, dtype {value.dtype}" if isinstance(value, np.ndarray) else value
    raise TypeError(
      f"`{name}` must be a NumPy array of {what} with {axes} axes; got {_base.shorten(got)}."
    )
