"""SGPerm as published: plain Python over NumPy rows, written from its specification.

One vector of weights after the other, subset by subset: a graph of lists, and for each source a
depth-first search with a stack that gets all open neighbours of an entry at once. Slow, for that is
what it is measured for.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Sgperm:
  """The published optimizer for a list of variables.

  Args:
    variables: the initial weights; the last axis is the output.
    alpha: reach of a move, as a share of the vector's range, before the schedule.
    lamda: size of a subset, as a share of its vector, before the schedule.
    beta1: factor of alpha in each step.
    beta2: factor of lamda in each step.
    alpha_min: least alpha.
    lamda_max: greatest lamda.
    momentum_lr: weight of the gradient in the recommendations.
    momentum: weight of the recommendations before.
    partition_size_min: least size of a subset.
    include_partition_remainder: whether the subset that reaches the end of a vector takes part.
    shuffle: maps the rows of a vector, its number and the variable's to the shuffled rows. None:
      NumPy's global generator.
  """

  def __init__(
    self,
    variables: Sequence[np.ndarray],
    *,
    alpha: float,
    lamda: float,
    beta1: float,
    beta2: float,
    alpha_min: float,
    lamda_max: float,
    momentum_lr: float,
    momentum: float,
    partition_size_min: int,
    include_partition_remainder: bool = True,
    shuffle: Callable[[np.ndarray, int, int], np.ndarray] | None = None,
  ) -> None:
    self.variables = [np.array(v) for v in variables]
    self.alpha, self.lamda, self.beta1, self.beta2 = alpha, lamda, beta1, beta2
    self.alpha_min, self.lamda_max = alpha_min, lamda_max
    self.momentum_lr, self.momentum = momentum_lr, momentum
    self.size_min, self.remainder = partition_size_min, include_partition_remainder
    self.shuffle = shuffle or _shuffled
    self.slots = [np.zeros_like(v) for v in self.variables]
    self.ranges = [np.ptp(vectors(v), axis=1) for v in self.variables]

  def step(self, gradients: Sequence[np.ndarray]) -> None:
    """One step from gradients."""
    for slot, gradient in zip(self.slots, gradients, strict=True):
      slot[...] = self.momentum_lr * gradient + self.momentum * slot
    self.permute(self.slots)

  def permute(self, recommendations: Sequence[np.ndarray]) -> None:
    """One step from recommendations."""
    self.alpha = max(self.beta1 * self.alpha, self.alpha_min)
    self.lamda = min(self.beta2 * self.lamda, self.lamda_max)
    for number, (variable, wishes) in enumerate(zip(self.variables, recommendations, strict=True)):
      rows = vectors(variable)
      for row, wish in enumerate(vectors(wishes)):
        rows[row] = self._vector(rows[row], wish, self.ranges[number][row], row, number)
      variable[...] = rows.T.reshape(variable.shape)

  def _vector(
    self, weights: np.ndarray, wishes: np.ndarray, spread: Any, row: int, number: int
  ) -> np.ndarray:
    n = len(weights)
    rising = np.sum(wishes >= 0)
    if rising in (0, n):
      return weights
    rows = np.stack([weights, wishes, np.arange(n)], axis=1).astype(np.float64)
    size = max(self.size_min, int(np.floor(self.lamda * n)))
    if size < n:
      rows = self.shuffle(rows, row, number)
    new = weights.copy()
    for start in range(0, n, size):
      if size < n and not self.remainder and start + size >= n:
        continue
      for cycle in _cycles(rows[start : start + size], spread, self.alpha):
        for here, there in zip(cycle, cycle[1:] + cycle[:1], strict=True):
          new[here] = weights[there]
    return new


def vectors(variable: np.ndarray) -> np.ndarray:
  """The weight vectors as rows of a new array."""
  if variable.ndim == 1:
    return variable[None].copy()
  return variable.reshape(-1, variable.shape[-1]).T.copy()


def _shuffled(rows: np.ndarray, row: int, number: int) -> np.ndarray:
  np.random.shuffle(rows)
  return rows


class Vertex:
  """One weight in the graph of its subset; its numbers are NumPy's, as they come out of the rows.

  Attributes:
    weight: float64.
    wish: its recommendation.
    position: in the weight vector.
    moves: the vertices to which it may move, nearest first.
    memorised: whether it has had its chance.
    visited: the last source whose search came by.
  """

  def __init__(self, row: np.ndarray) -> None:
    self.weight, self.wish, self.position = row
    self.moves: list[Vertex] = []
    self.memorised = False
    self.visited: Vertex | None = None


def _cycles(rows: np.ndarray, spread: Any, alpha: float) -> list[list[int]]:
  """The cycles of one subset, as positions in the vector."""
  vertices = sorted((Vertex(row) for row in rows if abs(row[1]) > 0), key=lambda v: v.weight)
  if len(vertices) < 2:
    return []
  # Rounded to the dtype of the weights; the comparisons are float64's.
  _connect(vertices, np.float64(spread * type(spread)(alpha + 1 / len(vertices))))
  found = []
  order = np.argsort([abs(v.wish) for v in vertices], kind="stable")[::-1]
  for source in (vertices[i] for i in order):
    increasing = sum(1 for v in vertices if v.wish < 0 and not v.memorised)
    if increasing in (0, len(vertices)):
      break
    if source.memorised:
      continue
    cycle = _cycle(source)
    for vertex in cycle or [source]:
      vertex.memorised = True
    if cycle:
      found.append([int(vertex.position) for vertex in cycle])
  return found


def _connect(vertices: list[Vertex], epsilon: np.float64) -> None:
  """Fills in the moves."""
  for i, vertex in enumerate(vertices):
    if vertex.wish < 0:
      for other in vertices[i + 1 :]:
        if other.weight >= vertex.weight + epsilon:
          break
        vertex.moves.append(other)
    else:
      for other in reversed(vertices[:i]):
        if other.weight < vertex.weight - epsilon:
          break
        if other.weight < vertex.weight:
          vertex.moves.append(other)


def _cycle(source: Vertex) -> list[Vertex] | None:
  """The first path back to the source that a depth-first search closes."""
  path: list[Vertex] = []
  stack = [source]
  while stack:
    vertex = stack[-1]
    if path and path[-1] is vertex:
      # All that was pushed for it has been tried: a dead end.
      path.pop()
      stack.pop()
    elif vertex.visited is source:
      if vertex is source:
        return path
      stack.pop()
    else:
      vertex.visited = source
      path.append(vertex)
      opened = [v for v in vertex.moves if v is source or not (v.memorised or v.visited is source)]
      stack.extend(reversed(opened))
  return None
