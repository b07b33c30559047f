"""Proposes patterns of blocks, and keeps those that select a series.

Patterns are proposed for modules whose names differ by numbers, and for the steps of scans. In a
series, each block gets data from the block before it, and the loss uses all kernels of a block
before any kernel of the next. Only ``_series.select`` makes series, so a pattern that is shown to
users selects the same blocks if they pass it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
import contextlib
import itertools
import re

from optax_boost._foundation import _patterns
from optax_boost._trace import _series, _traced_leaves

# A number in a name, with a letter in models such as Inception (`Mixed_5b`) and EfficientNet.
_DIGITS = re.compile(r"(\d+(?:[a-z](?![a-zA-Z]))?)")
_NUMBER = "\0"  # stands for a number in a stem
# What stands for a number in a pattern: the first of these that selects no other modules.
_WILDCARDS: tuple[Callable[[str], str], ...] = (
  lambda number: "*",
  lambda number: "[0-9]*",
  lambda number: re.sub(r"\d", "[0-9]", number),
  lambda number: number,
)


def find_series(model: _traced_leaves.Model, num_kernels: int = 2) -> list[_series.Series]:
  """Returns the outermost series in the order of first uses.

  In a series, two or more blocks have at least `num_kernels` kernels.
  """
  modules = modules_of(model)
  stems = {module: _stems(module, modules) for module in modules}
  found: list[_series.Series] = []
  for names in _outermost_first(stems):
    parts = [modules[name] for name in names]
    if all(each.leaves.isdisjoint(part.leaves) for each in found for part in parts):
      series = _try_series(model, names, parts, num_kernels)
      found += [series] if series is not None else []
  return sorted(found, key=lambda series: model.begin(series.parts[0]))


def find_finer(model: _traced_leaves.Model, series: _series.Series) -> _series.Series | None:
  """Returns a series inside of the blocks of `series`, such as the layers of each stage, or None.

  It has more blocks, and more than half as many kernels.
  """
  modules = {
    name: part
    for name, part in modules_of(model).items()
    if any(part.leaves <= block.leaves for block in series.parts)
  }
  num_kernels = len(series.leaves.intersection(model.kernels))
  for names in _outermost_first({name: [_DIGITS.sub(_NUMBER, name)] for name in modules}):
    parts = [modules[name] for name in names]
    leaves = frozenset[int]().union(*(part.leaves for part in parts))
    if (
      sum(part.length for part in parts) > series.length
      and 2 * len(leaves.intersection(model.kernels)) > num_kernels
      and (inner := _try_series(model, names, parts, num_kernels=2))
    ):
      return inner
  return None


def join_modules(model: _traced_leaves.Model, series: _series.Series) -> _series.Series | None:
  """Returns blocks of several modules each, of which `series` has the first modules, or None.

  After each module of the series, the last too, the loss uses kernels of modules with the same
  stems, as in ``attention_0, dense_0, dense_1, attention_1, dense_2, dense_3``.
  """
  around = module_around(model, series.leaves)
  end = around.count("/") + 1

  def within(leaves: Iterable[int]) -> list[str]:
    paths = (model.leaves[i].path for i in leaves)
    inside = (path.split("/") for path in paths if path.startswith(around))
    return list(dict.fromkeys("/".join(names[:end]) for names in inside))

  modules, firsts = within(model.kernels), within(series.leaves)
  begins = [number for number, module in enumerate(modules) if module in firsts]
  blocks = [modules[a:b] for a, b in itertools.pairwise([*begins, len(modules)])]
  size = len(blocks[0])
  blocks[-1] = blocks[-1][:size]
  stems = [[_stems(module, modules)[0] for module in block] for block in blocks]
  if size == 1 or len(blocks) == 1 or any(each != stems[0] for each in stems):
    return None
  pattern = "|".join(_series.JOIN.join(map(_patterns.escape, block)) for block in blocks)
  return try_select(model, pattern)


def module_around(model: _traced_leaves.Model, leaves: Iterable[int]) -> str:
  """Returns the path of the innermost module of all leaves, with a slash; "" at the root."""
  paths = [model.leaves[i].path.split("/")[:-1] for i in leaves]
  columns = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
  return "".join(f"{names[0]}/" for names in columns)


def try_select(model: _traced_leaves.Model, pattern: str) -> _series.Series | None:
  """Returns the series that a pattern selects from the root on, or None if it is refused."""
  with contextlib.suppress(ValueError):
    return _series.select(model, _series.from_root(model, pattern))
  return None


def modules_of(model: _traced_leaves.Model) -> dict[str, _traced_leaves.Part]:
  """Returns the leaves of each module and of each scan, by its pattern.

  The pattern of a scan is the outermost module that has only leaves of the scan's steps, with
  `[*]` at the end.
  """
  leaves: dict[str, set[int]] = {}
  for i in model.order:
    names = model.leaves[i].path.split("/")
    for end in range(1, len(names)):
      leaves.setdefault("/".join(names[:end]), set()).add(i)
  parts = {_patterns.escape(path): _traced_leaves.Part(frozenset(leaves[path])) for path in leaves}
  for scan in model.layer_scans:
    first, *_ = model.in_order(scan.axis_of)
    path = model.leaves[first].path
    names = path.split("/")
    around = ("/".join(names[:end]) for end in range(1, len(names)))
    of_steps = scan.shared.union(scan.axis_of)
    name = next((module for module in around if leaves[module] <= of_steps), path)
    parts[_patterns.escape(name) + _series.STEPS] = _traced_leaves.Part(
      frozenset(scan.axis_of), scan
    )
  return parts


def _stems(name: str, names: Collection[str]) -> list[str]:
  """Returns the stems of a module: its path with a mark in place of numbers of the last name.

  The first stem has a mark for each number, the next stems for one number each, and the last stem
  has no marks. Haiku, Keras and TensorFlow begin to number with the second of the modules `names`,
  as in ``block, block_1``.
  """
  if f"{name}_1" in names and f"{name}_0" not in names:
    name += "_1"
  parent, slash, last = name.rpartition("/")
  texts = _DIGITS.split(last)
  numbers = range(1, len(texts), 2)
  marked = (set(numbers), *({number} for number in numbers), set[int]())
  stems = (
    "".join(_NUMBER if i in each else text for i, text in enumerate(texts)) for each in marked
  )
  return list(dict.fromkeys(parent + slash + stem for stem in stems))


def _outermost_first(stems: Mapping[str, list[str]]) -> list[list[str]]:
  """Returns modules with equal stems: outermost first, scans before modules, most marks first."""
  names: dict[str, list[str]] = {}
  for name in stems:
    for stem in stems[name]:
      names.setdefault(stem, []).append(name)

  def rank(stem: str) -> tuple[int, bool, int]:
    return stem.count("/"), not stem.endswith(_series.STEPS), -stem.count(_NUMBER)

  return [names[stem] for stem in sorted(names, key=rank)]


def _try_series(
  model: _traced_leaves.Model,
  names: list[str],
  parts: list[_traced_leaves.Part],
  num_kernels: int,
) -> _series.Series | None:
  """Returns the series of modules or scans with these names, or None if they are not a series."""
  kernels = frozenset(model.kernels)
  if sum(part.length for part in parts if len(part.leaves & kernels) >= num_kernels) < 2:
    return None
  selected = (try_select(model, pattern) for pattern in _patterns_of(names))
  series = next((each for each in selected if each and set(each.parts) == set(parts)), None)
  if series is None:
    return None
  for a, b in itertools.pairwise(series.parts):
    are_apart = _series.places(model, a)[-1] < _series.places(model, b)[0]
    if not (are_apart and model.follows(b.leaves, a.leaves)):
      return None
  return series


def _patterns_of(names: list[str]) -> Iterable[str]:
  """Yields patterns that select these names, the shortest first; the last selects no others."""
  rows = [_DIGITS.split(name) for name in names]
  length = max(map(len, rows))
  columns = zip(*(row for row in rows if len(row) == length), strict=True)
  differ = [len(set(column)) > 1 for column in columns]
  for wildcard in _WILDCARDS:
    # A first module without a number has a shorter row.
    patterns = (
      [wildcard(text) if i else text for i, text in zip(differ, row, strict=False)]
      if len(row) == length
      else row
      for row in rows
    )
    yield "|".join(dict.fromkeys(map("".join, patterns)))
