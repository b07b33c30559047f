"""Layers as blocks: a kernel with its bias and normalization, a recurrence, or a step of a scan."""

import itertools

from optax_boost._trace import _places, _traced_leaves


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

  If the loss uses tables (leaves of several axes) before all layers, all leaves before the layers
  are one more block, the first. Any other leaf, such as a bias, joins the layer in its own module,
  if this module has exactly one layer and no modules inside. Otherwise, the leaf joins the layer
  that began last before the leaf, or the first layer. `origin` is the line for ``print``.
  """
  by_leaf: dict[int, list[int]] = {}
  layers_of: dict[str, set[int]] = {}
  first = min((model.begin(layer) for layer in layers), default=len(model.order))
  is_before = {
    i
    for i, place in model.order.items()
    if place < first and len(model.leaves[i].axes_of_layer) > 1
  }
  count = int(bool(is_before))
  begins: list[tuple[int, int, int]] = []
  for layer in layers:
    begins.append((model.begin(layer), count, count + layer.length - 1))
    for leaf in layer.leaves:
      by_leaf[leaf] = layer.numbers(count)
      if layer.scan is None:
        layers_of.setdefault(model.leaves[leaf].path.rpartition("/")[0], set()).add(count)
    count += layer.length
  outer = {module for leaf in model.leaves for module in ["", *_modules_of(leaf.path)[:-1]]}
  shared = {i: scan for scan in model.layer_scans for i in _places.shared_leaves(model, scan)}
  for leaf, place in model.order.items():
    if leaf in by_leaf:
      continue
    module = model.leaves[leaf].path.rpartition("/")[0]
    siblings = layers_of.get(module, set())
    if leaf in is_before or (is_before and place < first):
      by_leaf[leaf] = [0]
    elif len(siblings) == 1 and module not in outer:
      by_leaf[leaf] = [min(siblings)]
    else:
      begun = [row for row in begins if row[0] < place] or begins[:1] or [(0, 0, 0)]
      _, begin, end = max(begun)
      by_leaf[leaf] = [begin if leaf in shared else end]
  return _places.Blocks(by_leaf, max(count, 1), origin)


def _modules_of(path: str) -> list[str]:
  """Returns the paths of the modules that enclose a leaf, from the outermost on."""
  names = path.split("/")[:-1]
  return ["/".join(names[:end]) for end in range(1, len(names) + 1)]
