"""Divides a model into blocks, of which ``_layer_groups`` makes groups of layers.

A *block* is a module that the model repeats, a step of a scan over layers, or, in a model without
these, a layer. Repeated modules in a row, or the steps of a scan, are a *series* (``_series``). The
leaves that the loss uses before a series are a further block, and so are the leaves after it.
"""

from collections.abc import Sequence
from typing import Any

from optax_boost._foundation import _patterns, _types
from optax_boost._trace import (
  _candidates,
  _layers,
  _places,
  _question,
  _series,
  _traced_leaves,
)


def blocks_by_default(model: _traced_leaves.Model, num_groups: int | None = None) -> _places.Blocks:
  """Returns the blocks of the model's only series, or else of a plain chain of layers.

  A series inside of another doesn't count. In a model without a series and without a chain, layers
  that are parallel share a block, if this makes at least `num_groups` blocks. Otherwise, or if
  `num_groups` is None, modules with one kernel each may be a series, too. Raises
  ``_question.Unclear`` if the model has several series, if many kernels are beside its series, or
  if none of these cases applies.
  """
  found = _candidates.find_series(model)
  if not found:
    layers = _layers.find_layers(model)
    if not _layers.are_chained(model, layers):
      layers = _layers.join_modules(model, layers)
    if _layers.are_chained(model, layers):
      origin = 'blocks: each layer of a chain; for others pass blocks="..."'
      return _layers.blocks_of_layers(model, layers, origin)
    origin = 'blocks: layers, those side by side together; for others pass blocks="..."'
    layers = _layers.join_parallel(model, _layers.find_layers(model))
    joined = _layers.blocks_of_layers(model, layers, origin)
    if num_groups is not None and joined.num_blocks >= num_groups:
      return joined
    found = [
      each
      for each in _candidates.find_series(model, num_kernels=1)
      if not _is_part_of_block(model, each)
    ]
  if (
    len(found) != 1
    or _question.has_many_beside(model, found)
    or _candidates.join_modules(model, found[0])
  ):
    raise _question.ask(model, found)
  origin = f"blocks: {found[0]}"
  finer = _candidates.find_finer(model, found[0])
  if finer is not None:
    origin += f"; for {finer.length} finer ones pass blocks={_series.quoted(finer.pattern)}"
  return _places.place(model, [found[0].parts], f'{origin}; for others pass blocks="..."')


def smallest_blocks(model: _traced_leaves.Model) -> _places.Blocks:
  """Returns the smallest blocks: a kernel with its bias and normalization, or a step of a scan."""
  origin = 'blocks: each layer, for want of larger ones; for others pass blocks="..."'
  return _layers.blocks_of_layers(model, _layers.find_layers(model), origin)


def blocks_of_patterns(model: _traced_leaves.Model, patterns: Sequence[str]) -> _places.Blocks:
  """Returns the blocks of parallel series, such as two towers; each pattern selects one series."""
  towers = _series.select_all(model, patterns)
  origin = f"blocks: {' side by side with '.join(map(str, towers))}"
  return _places.place(model, [tower.parts for tower in towers], origin)


def check_patterns(blocks: _types.Unchecked) -> tuple[str, ...]:
  """Checks the argument `blocks` of `layer_groups`, and returns a tuple of patterns."""
  patterns: Any = (blocks,) if isinstance(blocks, str) else blocks
  words = (
    "a pattern of paths, as 'encoder/layers/*', or a sequence of patterns, one for each series side"
    " by side"
  )
  _patterns.check_patterns("blocks", patterns, words)
  return tuple(patterns)


def _is_part_of_block(model: _traced_leaves.Model, series: _series.Series) -> bool:
  """Returns whether a series is at most half of a module of the model, as a block's MLP is."""
  whole = _candidates.join_modules(model, series) or series
  around = _candidates.module_around(model, whole.leaves)
  inside = [i for i in model.order if model.leaves[i].path.startswith(around)]
  in_series, in_module, in_model = map(model.count_kernels, (whole.leaves, inside, model.order))
  return 2 * in_series <= in_module < in_model
