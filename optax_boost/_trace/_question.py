"""Asks which blocks a model has, and proposes values of `blocks`, each of which is accepted."""

from collections.abc import Sequence
import contextlib
import re

from optax_boost._foundation import _patterns
from optax_boost._trace import _candidates, _series, _traced_leaves


class Unclear(Exception):
  """Raised if the trace doesn't tell the blocks; the message proposes values of `blocks`."""


def has_many_beside(model: _traced_leaves.Model, series: Sequence[_series.Series]) -> bool:
  """Returns whether a model has more kernels beside some series than in them.

  Kernels that neither get data from the series nor give data to it count twice, since they are in
  no order with its blocks.
  """
  inside = _leaves_of(series)
  beside = model.order.keys() - inside
  unordered = {i for i in beside if not model.follows([i], inside)}
  unordered -= frozenset[int]().union(*(model.flow.upstream[i] for i in inside))
  return sum(map(model.count_kernels, (beside, unordered))) > model.count_kernels(inside)


def ask(model: _traced_leaves.Model, found: Sequence[_series.Series]) -> Unclear:
  """Returns the question for a model with these series, none of which is clearly the only one."""
  units: list[_series.Series] = []
  for series in found:
    joined = _candidates.join_modules(model, series)
    # Series of equal lengths in one module may be side by side.
    equal = [other for other in found if other.length == series.length and other is not series]
    if joined is not None and joined.leaves.isdisjoint(_leaves_of(equal)):
      units.append(joined)
  units += [each for each in found if each.leaves.isdisjoint(_leaves_of(units))]
  of_series = [unit.pattern for unit in units]
  if has_many_beside(model, units):
    units += _modules_beside(model, units)
  units.sort(key=lambda unit: model.begin(unit.parts[0]))
  chains: list[list[_series.Series]] = []
  for unit in units:
    before = [chain for chain in chains if _comes_after(model, unit, chain[-1])]
    if before:
      before[0].append(unit)
    else:
      chains.append([unit])
  proposed = [
    ["|".join(unit.pattern for unit in chain) for chain in chains],
    of_series if len(of_series) > 1 else [],
    ["|".join(unit.pattern for unit in units)],
    [found[0].pattern if found else _all_modules(model)],
  ]
  # Of several values that select the same blocks, the shortest is shown.
  answers: dict[object, str] = {}
  for patterns in filter(None, proposed):
    with contextlib.suppress(ValueError):
      selected = tuple(tuple(series.parts) for series in _series.select_all(model, patterns))
      code = ", ".join(map(_series.quoted, patterns))
      code = f"({code})" if len(patterns) > 1 else code
      text = f"blocks={code} {_condition(patterns, found)}"
      answers[selected] = min(answers.get(selected, text), text, key=len)
  return Unclear(f"`layer_groups` {_what(model, found)}. Pass {'; or '.join(answers.values())}.")


def _what(model: _traced_leaves.Model, found: Sequence[_series.Series]) -> str:
  """Returns what `layer_groups` finds, and what it must be told."""
  if not found:
    return (
      "must be told the blocks of this model: there is no numbered series of modules with several"
      " kernels, one after the other, no scan over layers, and the layers are no plain chain"
    )
  names = ", ".join(f"{_series.quoted(each.pattern)} ({each.length})" for each in found)
  if len(found) > 1:
    return f"finds {len(found)} series of blocks and must be told which to take: {names}"
  beside = model.order.keys() - found[0].leaves
  total, num_beside = map(model.count_kernels, (model.order, beside))
  return (
    f"finds the blocks {names}, but {num_beside} of {total} kernels beside them, and must be told"
    " whether they are the only blocks"
  )


def _condition(patterns: Sequence[str], found: Sequence[_series.Series]) -> str:
  if len(patterns) > 1:
    return "if they are side by side, each counted from its last block"
  if patterns[0] in [series.pattern for series in found]:
    return "for these blocks alone"
  if _series.JOIN in patterns[0]:
    return "if these modules are one block each"
  return "if they are one after the other" if found else "for each of these, one after the other"


def _comes_after(
  model: _traced_leaves.Model, later: _series.Series, earlier: _series.Series
) -> bool:
  """Returns whether a series gets data from another one, and is used after all of its blocks."""
  last, first = (_series.places(model, s.parts[i]) for s, i in ((earlier, -1), (later, 0)))
  return last[-1] < first[0] and model.follows(later.parts[0].leaves, earlier.leaves)


def _modules_beside(
  model: _traced_leaves.Model, series: Sequence[_series.Series]
) -> list[_series.Series]:
  """Returns modules without blocks of a series that may be blocks, too.

  These are the outermost modules with several kernels, or, beside series, with one if none has
  several. A module is divided into its modules if it has more than twice as many kernels as any
  block, or, in a model without series, more than half of all kernels.
  """
  sizes = [model.count_kernels(part.leaves) // part.length for s in series for part in s.parts]
  most = 2 * max(sizes) if sizes else model.count_kernels(model.order) // 2
  modules = _candidates.modules_of(model)
  taken = _leaves_of(series)
  chosen: dict[str, int] = {}
  for pattern in sorted(modules, key=lambda pattern: pattern.count("/")):
    leaves = modules[pattern].leaves
    size = model.count_kernels(leaves)
    is_divided = size > most and any(other.startswith(f"{pattern}/") for other in modules)
    if taken.isdisjoint(leaves) and not is_divided:
      taken |= leaves
      chosen[pattern] = size
  smallest = 2 if not series or max(chosen.values(), default=0) > 1 else 1
  proposed = [_candidates.try_select(model, p) for p, size in chosen.items() if size >= smallest]
  return [unit for unit in proposed if unit is not None]


def _all_modules(model: _traced_leaves.Model) -> str:
  """Returns the pattern of the outermost modules, of those with kernels if there are any."""
  modules = model.top_modules()
  wide = [m for m, leaves in modules.items() if any(len(model.leaves[i].shape) > 1 for i in leaves)]
  patterns = dict.fromkeys(re.sub(r"\d+$", "*", _patterns.escape(m)) for m in wide or modules)
  return _series.from_root(model, "|".join(patterns))


def _leaves_of(series: Sequence[_series.Series]) -> frozenset[int]:
  return frozenset[int]().union(*(each.leaves for each in series))
