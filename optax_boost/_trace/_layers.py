"""Layers as blocks: a kernel with its bias and normalization, a recurrence, or a step of a scan."""

import itertools

from optax_boost._trace import _candidates, _places, _traced_leaves


def find_layers(model: _traced_leaves.Model) -> list[_traced_leaves.Part]:
  """Returns the layers by first use; a layer is a kernel, the leaves of a recurrence, or a scan."""
  scanned = {leaf for scan in model.layer_scans for leaf in scan.axis_of}
  layers: list[set[int]] = []
  for kernel in [i for i in model.kernels if i not in scanned]:
    joined = [layer for layer in layers if any(_recur(model, kernel, i) for i in layer)]
    layers = [layer for layer in layers if layer not in joined]
    layers.append({kernel}.union(*joined))
  for leaf in model.order.keys() - set(model.kernels) - scanned:
    for layer in layers:
      if any(_recur(model, leaf, i) for i in layer):
        layer.add(leaf)
        break
  parts = [_traced_leaves.Part(frozenset(layer)) for layer in layers]
  parts += [_traced_leaves.Part(frozenset(scan.axis_of), scan) for scan in model.layer_scans]
  return sorted(parts, key=lambda part: model.begin(part))


def _recur(model: _traced_leaves.Model, first: int, second: int) -> bool:
  """Returns whether two leaves belong to one recurrence.

  They do if every iteration of one recurrent loop uses both leaves, or if data that was computed
  with either leaf flows back into both leaves.
  """
  ever = model.flow.ever_upstream
  pair = {first, second}
  return pair <= ever[first] & ever[second] or any(pair <= loop for loop in model.flow.recurrent)


def are_chained(model: _traced_leaves.Model, layers: list[_traced_leaves.Part]) -> bool:
  """Returns whether each layer gets data from the layer before it.

  A single layer counts as a chain if it is a scan, or if it has exactly one kernel.
  """
  if len(layers) == 1 and layers[0].scan is None:
    return len(layers[0].leaves.intersection(model.kernels)) == 1
  return all(model.follows(b.leaves, a.leaves) for a, b in itertools.pairwise(layers))


def join_modules(
  model: _traced_leaves.Model, layers: list[_traced_leaves.Part]
) -> list[_traced_leaves.Part]:
  """Returns the layers, with layers of one innermost module (an adapter's factors) joined."""
  joined: dict[str, _traced_leaves.Part] = {}
  for number, layer in enumerate(layers):
    modules = {model.leaves[leaf].path.rpartition("/")[0] for leaf in layer.leaves}
    module = modules.pop() if len(modules) == 1 and layer.scan is None else ""
    key = module or f"/{number}"
    leaves = joined[key].leaves if key in joined else frozenset[int]()
    joined[key] = _traced_leaves.Part(layer.leaves | leaves, layer.scan)
  return sorted(joined.values(), key=lambda part: model.begin(part))


def join_parallel(
  model: _traced_leaves.Model, layers: list[_traced_leaves.Part]
) -> list[_traced_leaves.Part]:
  """Joins parallel layers; returns the layers in the order of use.

  Each of the returned layers gets data from all layers before it.
  """
  follows = [{k for k, a in enumerate(layers) if model.follows(b.leaves, a.leaves)} for b in layers]
  joined: list[_traced_leaves.Part] = []
  for number, layer in enumerate(layers):
    if all(set(range(number)) <= earlier for earlier in follows[number:]):
      joined.append(layer)
    else:
      joined[-1] = _traced_leaves.Part(joined[-1].leaves | layer.leaves)
  return joined


def blocks_of_layers(
  model: _traced_leaves.Model, layers: list[_traced_leaves.Part], origin: str
) -> _places.Blocks:
  """Returns a block for each layer, or for each step of a layer that is a scan.

  A leaf in the module of exactly one layer, such as a bias, joins this layer, unless there are
  modules inside. `origin` is the line for ``print``.
  """
  whole = list(layers)
  layer_of = {i: number for number, layer in enumerate(layers) for i in layer.leaves}
  modules = {
    name: part.leaves for name, part in _candidates.modules_of(model).items() if part.scan is None
  }
  for module in modules.keys() - {name.rpartition("/")[0] for name in modules}:
    numbers = {layer_of[i] for i in modules[module] if i in layer_of}
    if len(numbers) == 1 and layers[number := numbers.pop()].scan is None:
      whole[number] = _traced_leaves.Part(whole[number].leaves | modules[module])
  return _places.place(model, [whole], origin, are_all=True)
