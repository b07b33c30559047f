"""SGPerm as published, in plain Python: graphs, a depth-first search, no closed form.

Written from the specification alone and slow on purpose; the oracle for both kernels.
"""

import json
import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("sgperm_*.npz"))


def load(name):
  """A trace's arrays and what its `meta` says."""
  with np.load(GOLDEN / f"{name}.npz") as file:
    arrays = {key: file[key] for key in file.files}
  return arrays, json.loads(str(arrays["meta"]))


def vectors(array):
  """One row per weight vector."""
  return array.reshape(-1, array.shape[-1]).T if array.ndim > 1 else array.reshape(1, -1)


def recorded_order(arrays, step, variable, shape):
  """A step's partitions as the order after the shuffle, a row per weight vector.

  Vectors that were skipped, and positions in subsets that were dropped, are filled in.
  """
  rows = np.prod(shape[-1:] if len(shape) > 1 else (1,), dtype=int)
  length = int(np.prod(shape)) // rows
  order = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  table = arrays["part_table"]
  for row in range(rows):
    pieces = table[(table[:, 0] == step) & (table[:, 1] == variable) & (table[:, 2] == row)]
    if len(pieces):
      found = [arrays["part_index"][p[4] : p[4] + p[5]] for p in sorted(pieces, key=lambda p: p[3])]
      kept = np.concatenate(found)
      order[row] = np.concatenate([kept, np.setdiff1d(np.arange(length), kept)])
  return order


def permute(weights, wishes, order, size, ranges, alpha, remainder=True):
  """One step: for each position, the position whose weight it receives.

  Args:
    weights: (vectors, n).
    wishes: the recommendations, of the same shape.
    order: the positions after the shuffle, of the same shape.
    size: the size of a subset.
    ranges: (vectors,), in the dtype of the weights.
    alpha: float64.
    remainder: whether the subset that reaches the end takes part.
  """
  source = np.tile(np.arange(weights.shape[1]), (len(weights), 1))
  for row in range(len(weights)):
    if np.all(wishes[row] >= 0) or not np.any(wishes[row] >= 0):
      continue
    pieces = [order[row, i : i + size] for i in range(0, weights.shape[1], size)]
    if size >= weights.shape[1]:
      pieces = [np.arange(weights.shape[1])]
    elif not remainder:
      pieces.pop()
    for piece in pieces:
      cycles = subset_cycles(weights[row], wishes[row], piece, ranges[row], alpha)
      for cycle in cycles:
        source[row, cycle] = np.roll(cycle, -1)
  return source


def subset_cycles(weights, wishes, piece, spread, alpha):
  """The cycles of one subset, as positions."""
  piece = np.array([p for p in piece if abs(wishes[p]) > 0], int)
  if len(piece) < 2:
    return []
  piece = piece[np.argsort(weights[piece], kind="stable")]
  epsilon = float(spread * weights.dtype.type(alpha + 1 / len(piece)))
  w = [float(x) for x in weights[piece]]
  m = [float(x) for x in wishes[piece]]
  graph = []
  for i in range(len(w)):
    if m[i] < 0:
      graph.append([j for j in range(i + 1, len(w)) if w[j] < w[i] + epsilon])
    else:
      graph.append([j for j in range(i - 1, -1, -1) if w[i] - epsilon <= w[j] < w[i]])
  done = [False] * len(w)
  cycles = []
  for source in np.argsort(np.abs(m), kind="stable")[::-1]:
    if not done[source]:
      cycle = find_cycle(graph, int(source), done)
      for i in cycle or [source]:
        done[i] = True
      if cycle:
        cycles.append(piece[cycle])
  return cycles


def find_cycle(graph, source, done):
  """The first path back to the source, neighbours in their order, dead ends never tried again."""
  visited = {source}
  path = [(source, iter(graph[source]))]
  while path:
    for j in path[-1][1]:
      if j == source:
        return [i for i, _ in path]
      if not done[j] and j not in visited:
        visited.add(j)
        path.append((j, iter(graph[j])))
        break
    else:
      path.pop()
  return None


def schedules(hyper, steps):
  """The values of alpha and lamda at each step."""
  alpha, lamda, found = hyper["alpha0"], hyper["lamda0"], []
  for _ in range(steps):
    alpha = max(hyper["beta1"] * alpha, hyper["alpha_min"])
    lamda = min(hyper["beta2"] * lamda, hyper["lamda_max"])
    found.append((alpha, lamda))
  return found


def subset_size(lamda, length, least):
  return max(least, int(np.floor(lamda * length)))
