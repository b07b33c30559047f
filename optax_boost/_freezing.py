r"""Gradient freezing: on some steps the first layers stand still, and their backward pass is cut.

The leaves fall into groups 0, ..., G-1 along the forward pass. A step with i frozen groups trains
the groups i, ..., G-1:

  i(t)     in 0, ..., G-1: how many groups are frozen in step t, a function of (t, key)
  f        the share of steps in which something is frozen
  G        the number of groups; the last is never frozen

Sources: MindSpore Boost's ``GradientFreeze``, whose `freeze_p` is 1 - f; Brock et al., "FreezeOut",
arXiv:1706.04983.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import contextvars
import dataclasses
import fractions
import functools
import math
import re
from typing import Any
from typing import Literal
from typing import NamedTuple
from typing import TypeAlias
import warnings

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _base
from optax_boost import _tree

# Names of leaves that belong to the kernel before them; with stacked layers they may be matrices.
_ATTACHED = re.compile(r"(^|/)(bias|scale|beta|gamma)$")
# Shares of steps are exact as fractions up to this denominator.
_LARGEST_PERIOD = 10_000


@dataclasses.dataclass(frozen=True)
class FreezeGroups:
  """Which leaf belongs to which group; ``print`` shows it. Made by :func:`freeze_groups`.

  Attributes:
    groups: for each group, the paths of its leaves in the order of the forward pass.
    sizes: for each group, the number of its parameters.
    unused: leaves that the loss does not depend on. They are in the last group.
    reused: leaves that are used again after a later layer (tied weights, unrolled recurrences).
      They are frozen with the layer that uses them first.
  """

  groups: tuple[tuple[str, ...], ...]
  sizes: tuple[int, ...]
  unused: tuple[str, ...] = ()
  reused: tuple[str, ...] = ()

  def __str__(self) -> str:
    total = max(sum(self.sizes), 1)
    lines = []
    for index, (paths, size) in enumerate(zip(self.groups, self.sizes, strict=True)):
      never = ", never frozen" if index == len(self.groups) - 1 else ""
      lines.append(
        f"group {index}: {size:,} parameters ({100 * size / total:.1f} %){never}: "
        + ", ".join(paths)
      )
    if self.unused:
      lines.append("not used by the loss, so never frozen: " + ", ".join(self.unused))
    if self.reused:
      lines.append("used again later, frozen where they are used first: " + ", ".join(self.reused))
    return "\n".join(lines)


# A plan, or regular expressions for the groups 0, 1, ...
Groups: TypeAlias = FreezeGroups | Sequence[str]


def freeze_groups(
  loss_fn: Callable[..., Any],
  params: optax.Params,
  *args: Any,
  num_groups: int = 10,
  overrides: Mapping[str, int] | None = None,
) -> FreezeGroups:
  """Groups the leaves along the forward pass, as a trace of the loss shows it.

  A leaf's place is where it first meets the data: casts and reshapes of params do not count, nor
  does the order of names. Nothing is computed; arrays may be abstract. A bias or a normalization
  stays with the kernel before it. The blocks that this makes are shared out evenly.

  Args:
    loss_fn: the loss, as ``loss_fn(params, *args)``; aux is ignored.
    params: the params.
    *args: the loss's other arguments: statistics, batch, rng.
    num_groups: how many groups; the last is never frozen. Raising it makes finer steps of depth,
      each a program to compile.
    overrides: group by regular expression, searched in the leaves' paths, against the trace. The
      first that matches counts.

  Returns:
    A :class:`FreezeGroups`.

  Raises:
    ValueError: there are fewer blocks than groups, or an override names no group.
    TypeError: `loss_fn` is not callable.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> params = {"a_head": jnp.ones((8, 1)), "z_body": {"bias": jnp.ones(8), "kernel": jnp.eye(8)}}
    >>> def loss_fn(params, x):
    ...   h = jnp.tanh(x @ params["z_body"]["kernel"] + params["z_body"]["bias"])
    ...   return jnp.mean(h @ params["a_head"])
    >>> print(optax_boost.freeze_groups(loss_fn, params, jnp.ones((2, 8)), num_groups=2))
    group 0: 72 parameters (90.0 %): z_body/kernel, z_body/bias
    group 1: 8 parameters (10.0 %), never frozen: a_head
  """
  if not callable(loss_fn):
    raise TypeError(f"`loss_fn` must be callable; got {loss_fn!r}.")
  check_num_groups(num_groups)
  leaves = _tree.describe(params)
  events = forward_uses(loss_fn, params, *args)
  order = list(dict.fromkeys(events))
  unused = [i for i in range(len(leaves)) if i not in set(order)]
  blocks = _blocks(leaves, order)
  if len(blocks) < num_groups:
    raise ValueError(
      f"`freeze_groups` can't make {num_groups} groups of {len(blocks)} blocks (a kernel with its"
      f" bias and normalization is one). Pass num_groups={max(len(blocks), 1)} or fewer."
    )
  group: dict[int, int] = {}
  for index, block in enumerate(blocks):
    group |= {leaf: index * num_groups // len(blocks) for leaf in block}
  group |= {leaf: num_groups - 1 for leaf in unused}
  for leaf, number in _overridden(leaves, overrides, num_groups).items():
    group[leaf] = number
  members = [[i for i in [*order, *unused] if group[i] == g] for g in range(num_groups)]
  return FreezeGroups(
    groups=tuple(tuple(leaves[i].path for i in leaf_ids) for leaf_ids in members),
    sizes=tuple(sum(math.prod(leaves[i].shape) for i in leaf_ids) for leaf_ids in members),
    unused=tuple(leaves[i].path for i in unused),
    reused=tuple(leaves[i].path for i in _reused(events, blocks)),
  )


def check_num_groups(num_groups: Any) -> None:
  """Checks a number of groups.

  Args:
    num_groups: what came.

  Raises:
    TypeError: it is no integer.
    ValueError: it is below 1.
  """
  if isinstance(num_groups, bool) or not isinstance(num_groups, int):
    raise TypeError(f"`num_groups` must be an integer; got {num_groups!r}.")
  _base.check_number("num_groups", num_groups, minimum=1)


def _blocks(leaves: list[_tree.Leaf], order: list[int]) -> list[list[int]]:
  """Kernels in the order of the forward pass, each with what belongs to it."""

  def attached(leaf: _tree.Leaf) -> bool:
    return len(leaf.shape) <= 1 or _ATTACHED.search(leaf.path) is not None

  def parent(leaf: _tree.Leaf) -> str:
    return leaf.path.rpartition("/")[0]

  kernels = [i for i in order if not attached(leaves[i])]
  of_parent: dict[str, list[int]] = {}
  for i in kernels:
    of_parent.setdefault(parent(leaves[i]), []).append(i)
  blocks: dict[int, list[int]] = {}
  last = (kernels or order or [0])[0]
  for i in order:
    siblings = of_parent.get(parent(leaves[i]), [])
    if not attached(leaves[i]):
      last = home = i
    else:
      # A module's own kernel counts before the last one that was used.
      home = siblings[0] if len(siblings) == 1 else last
    blocks.setdefault(home, []).append(i)
  # A kernel stands where it is used, even if its bias is used before it.
  return [blocks[k] for k in order if k in blocks]


def _reused(events: list[int], blocks: list[list[int]]) -> list[int]:
  block_of = {leaf: index for index, block in enumerate(blocks) for leaf in block}
  furthest = 0
  seen: set[int] = set()
  found: list[int] = []
  for leaf in events:
    if leaf in seen and block_of[leaf] < furthest and leaf not in found:
      found.append(leaf)
    seen.add(leaf)
    furthest = max(furthest, block_of[leaf])
  return found


def _overridden(
  leaves: list[_tree.Leaf], overrides: Mapping[str, int] | None, num_groups: int
) -> dict[int, int]:
  if not overrides:
    return {}
  if not hasattr(overrides, "items"):
    raise TypeError(
      f"`overrides` must map regular expressions to groups, as in {{'embed': 0}}; got"
      f" {overrides!r}."
    )
  for pattern, number in overrides.items():
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < num_groups:
      raise ValueError(
        f"`overrides` must name groups 0 to {num_groups - 1}; got {number!r} for {pattern!r}."
      )
  found: dict[int, int] = {}
  for i, leaf in enumerate(leaves):
    matching = [number for p, number in overrides.items() if re.search(p, leaf.path)]
    if matching:
      found[i] = matching[0]
  idle = [p for p in overrides if not any(re.search(p, leaf.path) for leaf in leaves)]
  if idle:
    _tree.warn_no_effect(
      f"`overrides` has patterns that match no leaf: {idle}.", [leaf.path for leaf in leaves]
    )
  return found


def group_numbers(tree: Any, groups: Groups) -> list[int]:
  """The group of each leaf.

  Args:
    tree: params or gradients, or a part of them.
    groups: a plan or patterns.

  Returns:
    A number per leaf, in the order of ``jax.tree.leaves``.

  Raises:
    ValueError: a leaf is not in the plan.
  """
  paths = _tree.leaf_paths(tree)
  if isinstance(groups, FreezeGroups):
    number = {path: g for g, group in enumerate(groups.groups) for path in group}
    missing = [path for path in paths if path not in number]
    if missing:
      raise ValueError(
        f"`freeze` was given groups for other params: no group has the leaf '{missing[0]}'. Make"
        " them with `freeze_groups` from these params."
      )
    return [number[path] for path in paths]
  idle = [p for p in groups if not any(re.search(p, path) for path in paths)]
  if idle and paths:
    _tree.warn_no_effect(f"`groups` has patterns that match no leaf: {idle}.", paths)
  last = len(groups) - 1
  return [
    next((g for g, pattern in enumerate(groups) if re.search(pattern, path)), last)
    for path in paths
  ]


class _Value(NamedTuple):
  """What a value of the trace was made from.

  Attributes:
    data: whether data went into it.
    params: the leaves of the params that it is made of, as long as it has not met data.
    penalty: whether it is a number that sums up params, as a weight decay in the loss is.
  """

  data: bool
  params: frozenset[int]
  penalty: bool = False


_NEUTRAL = _Value(False, frozenset())
_DATA = _Value(True, frozenset())


def forward_uses(loss_fn: Callable[..., Any], params: optax.Params, *args: Any) -> list[int]:
  """The params' leaves in the order in which the loss brings them together with data.

  Args:
    loss_fn: ``loss_fn(params, *args)``.
    params: the params.
    *args: further arguments.

  Returns:
    Numbers of leaves, in the order of ``jax.tree.leaves``; a leaf that is used several times
    occurs several times, one that is never used does not.
  """
  closed = jax.make_jaxpr(loss_fn)(params, *args)
  count = len(jax.tree.leaves(params))
  values = [
    _Value(False, frozenset([i])) if i < count else _argument(variable.aval)
    for i, variable in enumerate(closed.jaxpr.invars)
  ]
  events: list[int] = []
  outputs = _walk(closed.jaxpr, _constants(closed), values, events)
  if outputs:
    # A loss without data: nothing but a penalty.
    events += [~leaf for leaf in sorted(outputs[0].params)]
  uses = [event for event in events if event >= 0]
  return uses + sorted({~event for event in events if event < 0} - set(uses))


def _argument(aval: Any) -> _Value:
  # Noise on the weights, drawn ahead of the forward pass, is not where they are used.
  return _NEUTRAL if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else _DATA


def _constants(closed: jax_core.ClosedJaxpr) -> list[_Value]:
  return [_DATA if np.size(c) > 1 else _NEUTRAL for c in closed.consts]


def _walk(
  jaxpr: Any, constants: Sequence[_Value], arguments: Sequence[_Value], events: list[int]
) -> list[_Value]:
  """Follows the equations, notes the uses, and says what the outputs are made from."""
  known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

  def read(atom: Any) -> _Value:
    return _NEUTRAL if isinstance(atom, jax_core.Literal) else known[atom]

  for equation in jaxpr.eqns:
    outputs = _equation(equation, [read(atom) for atom in equation.invars], events)
    known.update(zip(equation.outvars, outputs, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


def _inner(jaxpr: Any, arguments: Sequence[_Value], events: list[int]) -> list[_Value]:
  if isinstance(jaxpr, jax_core.ClosedJaxpr):
    return _walk(jaxpr.jaxpr, _constants(jaxpr), arguments, events)
  return _walk(jaxpr, [], arguments, events)


def _equation(equation: Any, inputs: list[_Value], events: list[int]) -> list[_Value]:
  name, settings = equation.primitive.name, equation.params
  if name == "scan":
    consts, carries = settings["num_consts"], settings["num_carry"]
    return _loop(settings["jaxpr"], inputs, consts, carries, events)
  if name == "while":
    skipped, consts = settings["cond_nconsts"], settings["body_nconsts"]
    body = inputs[skipped:]
    return _loop(settings["body_jaxpr"], body, consts, len(body) - consts, events)
  if name == "cond":
    return _branches(settings["branches"], inputs[1:], events)
  jaxprs = list(sub_jaxprs(equation))
  if len(jaxprs) == 1:
    inside = getattr(jaxprs[0], "jaxpr", jaxprs[0])
    if len(inside.invars) == len(inputs) and len(inside.outvars) == len(equation.outvars):
      return _inner(jaxprs[0], inputs, events)
  joined = _join(inputs)
  if joined.data and joined.params:
    # Where a penalty meets the data is not where its params are used; noted as ~leaf.
    uses = [leaf for value in inputs if not value.penalty for leaf in value.params]
    events += sorted(set(uses))
    events += [~leaf for leaf in sorted(joined.params - set(uses))]
    return [_DATA] * len(equation.outvars)
  summed = any(
    v.penalty or (v.params and atom.aval.shape)
    for v, atom in zip(inputs, equation.invars, strict=True)
  )
  return [
    joined._replace(penalty=bool(joined.params) and summed and not variable.aval.shape)
    for variable in equation.outvars
  ]


def sub_jaxprs(equation: Any) -> Iterator[Any]:
  """The programs that an equation holds.

  Args:
    equation: an equation of a jaxpr.

  Yields:
    Jaxprs, closed or not.
  """
  for setting in equation.params.values():
    for item in setting if isinstance(setting, list | tuple) else [setting]:
      if isinstance(item, jax_core.ClosedJaxpr | jax_core.Jaxpr):
        yield item


def _join(values: Iterable[_Value]) -> _Value:
  values = list(values)
  return _Value(any(v.data for v in values), frozenset[int]().union(*(v.params for v in values)))


def _loop(
  body: Any, inputs: list[_Value], consts: int, carries: int, events: list[int]
) -> list[_Value]:
  carry = inputs[consts : consts + carries]
  while True:
    # From the second round on the carry is what the body returns.
    arguments = [*inputs[:consts], *carry, *inputs[consts + carries :]]
    outputs = _inner(body, arguments, [])
    merged = [_join(pair) for pair in zip(carry, outputs[:carries], strict=True)]
    if merged == carry:
      break
    carry = merged
  return _inner(body, arguments, events)


def _branches(branches: Sequence[Any], inputs: list[_Value], events: list[int]) -> list[_Value]:
  found: list[int] = []
  results = []
  for branch in branches:
    own: list[int] = []
    results.append(_inner(branch, inputs, own))
    # What two branches use is used once.
    found += [leaf for leaf in own if leaf not in found]
  events += found
  return [_join(values) for values in zip(*results, strict=True)]


def has_convolution(jaxpr: Any) -> bool:
  """Whether a program holds a convolution, at any depth.

  Args:
    jaxpr: a jaxpr, closed or not.

  Returns:
    Whether it does.
  """
  return any(
    equation.primitive.name == "conv_general_dilated"
    or any(has_convolution(inside) for inside in sub_jaxprs(equation))
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
  )


@dataclasses.dataclass(frozen=True)
class FreezeSchedule:
  """How many groups are frozen in each step.

  Attributes:
    num_groups: the number of groups that it was made for.
    frozen_groups: a function of the step (scalar int32) and a key, to how many groups are frozen
      in that step; values are clipped to 0, ..., num_groups - 1.
    learning_rate_scale: a function of the step to what each group's updates are multiplied by, an
      array of `num_groups` numbers; None: ones.
  """

  num_groups: int
  frozen_groups: Callable[[jax.Array, jax.Array], jax.typing.ArrayLike]
  learning_rate_scale: Callable[[jax.Array], jax.Array] | None = None


def _check_schedule(num_groups: Any, frozen_fraction: Any) -> fractions.Fraction:
  check_num_groups(num_groups)
  _base.check_number("frozen_fraction", frozen_fraction, minimum=0.0, below=1.0)
  if isinstance(frozen_fraction, jax.Array):
    raise TypeError(
      "`frozen_fraction` must be a Python number: the schedule is made of exact fractions; got"
      " an array. Pass float(frozen_fraction)."
    )
  return fractions.Fraction(frozen_fraction)


def continuous_freezing(num_groups: int, frozen_fraction: float) -> FreezeSchedule:
  """In turns: some steps with nothing frozen, then 1, 2, ..., num_groups - 1 groups.

  Args:
    num_groups: the number of groups.
    frozen_fraction: the share of steps in which something is frozen; raising it saves more time
      and trains the first layers less. (MindSpore's `freeze_p` is one minus this.) The steps with
      nothing frozen are rounded down to a whole number per turn.

  Returns:
    A :class:`FreezeSchedule` for :func:`freeze`.

  Raises:
    ValueError: `frozen_fraction` is not in [0, 1), or `num_groups` below 1.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import optax_boost
    >>> schedule = optax_boost.continuous_freezing(4, frozen_fraction=0.5)
    >>> [int(schedule.frozen_groups(step, None)) for step in range(8)]
    [0, 0, 0, 1, 2, 3, 0, 0]
  """
  share = _check_schedule(num_groups, frozen_fraction)
  if share == 0 or num_groups == 1:
    return FreezeSchedule(num_groups, lambda count, key: jnp.zeros_like(count))
  full = math.floor((1 - share) * (num_groups - 1) / share)
  turn = full + num_groups - 1

  def frozen_groups(count: jax.Array, key: jax.Array) -> jax.Array:
    del key
    return jnp.maximum(count % turn - full + 1, 0)

  return FreezeSchedule(num_groups, frozen_groups)


def interval_freezing(num_groups: int, frozen_fraction: float) -> FreezeSchedule:
  """Freezes at regular intervals, a random number of groups each time, more often few than many.

  Of `num_groups` G groups, i are frozen with a probability proportional to G - i.

  Args:
    num_groups: the number of groups.
    frozen_fraction: the share of steps in which something is frozen; raising it saves more time
      and trains the first layers less. (MindSpore's `freeze_p` is one minus this.)

  Returns:
    A :class:`FreezeSchedule` for :func:`freeze`. Its steps are drawn from the key that
    :func:`freeze` keeps, each on its own: what step 100 freezes does not depend on step 99.

  Raises:
    ValueError: `frozen_fraction` is not in [0, 1), or `num_groups` below 1.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax, optax_boost
    >>> schedule = optax_boost.interval_freezing(4, frozen_fraction=0.5)
    >>> depths = [int(schedule.frozen_groups(step, jax.random.key(0))) for step in range(8)]
    >>> [depth > 0 for depth in depths]
    [False, True, False, True, False, True, False, True]
  """
  share = _check_schedule(num_groups, frozen_fraction)
  if share == 0 or num_groups == 1:
    return FreezeSchedule(num_groups, lambda count, key: jnp.zeros_like(count))

  def frozen_groups(count: jax.Array, key: jax.Array) -> jax.Array:
    uniform = jax.random.uniform(jax.random.fold_in(key, count), dtype=jnp.float32)
    return jnp.where(interval_freezes(count, share), interval_depth(uniform, num_groups), 0)

  return FreezeSchedule(num_groups, frozen_groups)


def interval_freezes(count: jax.typing.ArrayLike, share: fractions.Fraction) -> jax.Array:
  r"""Whether the interval schedule freezes in a step.

  The reference freezes in step n if it froze in fewer than f n of the n steps before. By induction
  that is whether :math:`\lceil f n \rceil > \lceil f (n - 1) \rceil`, and n may be taken modulo
  f's denominator: no step depends on those before it, and no float loses digits.

  Args:
    count: the step n, from 0.
    share: the share f of steps, exactly.

  Returns:
    A bool, or an array of them.
  """
  near = share.limit_denominator(_LARGEST_PERIOD)
  # 1 - 0.7 is a little more than 3/10: then what would be a tie freezes.
  above = share > near
  count = jnp.asarray(count)
  n = jnp.where(count > 0, (count - 1) % near.denominator + 1, 0)

  def frozen_before(n: jax.Array) -> jax.Array:
    product = n * near.numerator
    whole = product // near.denominator
    return whole + 1 if above else whole + (product % near.denominator > 0)

  first = share > 0
  return jnp.where(count > 1, frozen_before(n) > frozen_before(n - 1), first & (count == 1))


def interval_depth(uniform: jax.typing.ArrayLike, num_groups: int) -> jax.Array:
  """How many groups the interval schedule freezes when it freezes.

  Args:
    uniform: a draw from [0, 1).
    num_groups: the number of groups G.

  Returns:
    i in 1, ..., G-1 with a probability proportional to G - i: the draw is looked up among
    G-1, G-2, ..., 1 with weights 1, 2, ..., G-1, as in the reference.
  """
  weights = np.cumsum(np.arange(1, num_groups))
  bounds = jnp.asarray(weights / weights[-1], jnp.float32)
  below = jnp.sum(bounds <= jnp.expand_dims(jnp.asarray(uniform), -1), axis=-1)
  return (num_groups - 1 - jnp.minimum(below, num_groups - 2)).astype(jnp.int32)


def progressive_freezing(
  num_groups: int, total_steps: int, first: float = 0.5, *, power: float = 1.0
) -> FreezeSchedule:
  r"""Anneals each group's learning rate to zero at its own time, then freezes it for good.

  Group i is frozen from step :math:`t_i` on, and before that its updates are multiplied by

  .. math::
    \tfrac12 (1 + \cos(\pi t / t_i)), \qquad
    t_i / T = t_0 + (1 - t_0) \left(\frac{i}{G - 1}\right)^p

  The last group's learning rate is annealed over the whole run and it is never frozen, so the
  inner optimizer's learning rate should be constant.

  Args:
    num_groups: the number of groups G.
    total_steps: the length T of the run, in steps.
    first: when the first group is frozen, as a share of the run. Lowering it saves more time.
    power: how the times of the others follow; raising it freezes the groups in the middle earlier
      (the paper's cubic schedule: 3).

  Returns:
    A :class:`FreezeSchedule` for :func:`freeze`.

  Raises:
    ValueError: a number is out of range.
    TypeError: an argument is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax_boost
    >>> schedule = optax_boost.progressive_freezing(3, total_steps=100, first=0.5)
    >>> [int(schedule.frozen_groups(jnp.int32(step), None)) for step in (0, 49, 50, 75, 200)]
    [0, 0, 1, 2, 2]
    >>> [round(float(s), 2) for s in schedule.learning_rate_scale(jnp.int32(25))]
    [0.5, 0.75, 0.85]

  References:
    Brock, Lim, Ritchie, Weston, `FreezeOut <https://arxiv.org/abs/1706.04983>`_, 2017.
  """
  check_num_groups(num_groups)
  if isinstance(total_steps, bool) or not isinstance(total_steps, int):
    raise TypeError(f"`total_steps` must be an integer; got {total_steps!r}.")
  _base.check_number("total_steps", total_steps, minimum=1)
  _base.check_number("first", first, positive=True, below=1.0)
  _base.check_number("power", power, positive=True)
  place = np.arange(num_groups) / max(num_groups - 1, 1)
  if num_groups == 1:
    place = np.ones(1)
  times = np.maximum(np.round(total_steps * (first + (1 - first) * place**power)), 1)
  ends = times.astype(np.int32)

  def frozen_groups(count: jax.Array, key: jax.Array) -> jax.Array:
    del key
    return jnp.sum(count >= ends[:-1], dtype=jnp.int32)

  def learning_rate_scale(count: jax.Array) -> jax.Array:
    passed = jnp.minimum(count / jnp.asarray(times, jnp.float32), 1.0)
    return 0.5 * (1 + jnp.cos(jnp.pi * passed))

  return FreezeSchedule(num_groups, frozen_groups, learning_rate_scale)


class FreezeState(NamedTuple):
  """State of :func:`freeze`.

  Attributes:
    count: scalar int32, steps made.
    frozen_groups: scalar int32, how many groups the next step freezes.
    key: raw key data of the schedule's generator.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  frozen_groups: jax.Array
  key: jax.Array
  inner_state: optax.OptState


class Found(NamedTuple):
  """What a transformation freezes, as the train step needs it.

  Attributes:
    group: for each frozen leaf's path, its group.
    num_groups: the number of groups.
  """

  group: dict[str, int]
  num_groups: int


_SEEN: contextvars.ContextVar[list[Found] | None] = contextvars.ContextVar("freezes", default=None)


def find_groups(tx: optax.GradientTransformation, params: optax.Params) -> Found | None:
  """Asks a chain what it freezes.

  Groups are static and can't be kept in the state, which holds arrays only. So `freeze` tells
  them while its ``init`` is traced, through whatever wrappers stand around it.

  Args:
    tx: any transformation.
    params: the params.

  Returns:
    The groups, or None where no :func:`freeze` was found.
  """
  seen: list[Found] = []
  token = _SEEN.set(seen)
  with contextlib.ExitStack() as stack:
    stack.callback(_SEEN.reset, token)
    # A function of its own, so that no cached trace is taken instead.
    jax.eval_shape(lambda p: tx.init(p), params)
  return seen[0] if seen else None


def freeze(
  inner: optax.GradientTransformation,
  groups: Groups,
  schedule: FreezeSchedule,
  *,
  key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Freezes the first groups of leaves on the steps that a schedule says.

  A frozen leaf gets no update and no weight decay, and what the inner optimizer keeps of it
  (momentum, second moments) stands still. Its gradient counts nowhere: norms that `inner` takes
  for clipping are of what is trained. Inside :func:`make_train_step` the backward pass of frozen
  groups is not computed either; by hand, gradients of frozen leaves are ignored, which saves
  nothing.

  Put it around everything that must stand still: ``freeze(optax.chain(clip, adamw), ...)``. Around
  it go ``optax.MultiSteps``, :func:`accumulate` (a whole window then has one depth),
  ``optax.apply_if_finite`` and :func:`dynamic_loss_scale` (a skipped step repeats its depth).

  Args:
    inner: the optimizer.
    groups: what :func:`freeze_groups` returned; or a sequence of regular expressions, one per
      group in the order of freezing, searched in the leaves' paths. The first that matches
      counts; a leaf that none matches is in the last group.
    schedule: a :class:`FreezeSchedule` for as many groups: :func:`continuous_freezing`,
      :func:`interval_freezing`, :func:`progressive_freezing` or your own.
    key: of the schedule's generator, a key of ``jax.random.key`` or a seed.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates have the inner optimizer's dtype.
    Of the extra arguments, `inner` sees `grad` and `grad_fn` with zeros for frozen leaves.

  Raises:
    ValueError: `schedule` is for another number of groups; in ``init``: the groups are of other
      params.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> tx = optax_boost.freeze(
    ...   optax.sgd(1.0), ["body", "head"], optax_boost.continuous_freezing(2, 0.5)
    ... )
    >>> params = {"body": jnp.zeros(2), "head": jnp.zeros(1)}
    >>> state = tx.init(params)
    >>> for _ in range(2):
    ...   updates, state = tx.update({"body": jnp.ones(2), "head": jnp.ones(1)}, state, params)
    ...   print(updates["body"].tolist(), updates["head"].tolist())
    [-1.0, -1.0] [-1.0]
    [0.0, 0.0] [-1.0]

  References:
    Brock, Lim, Ritchie, Weston, `FreezeOut <https://arxiv.org/abs/1706.04983>`_, 2017.

  .. note::
    What `inner` keeps as shared numbers (step counts, norms) goes on in every step. A leaf's
    entries are recognized with ``optax.tree.map_params``.
  """
  if not isinstance(inner, optax.GradientTransformation):
    raise TypeError(
      f"`inner` must be an optax.GradientTransformation; got {inner!r}. Did you pass the factory"
      " instead of what it returns?"
    )
  num_groups = _check_groups(groups)
  if not isinstance(schedule, FreezeSchedule):
    raise TypeError(
      f"`schedule` must be a FreezeSchedule; got {schedule!r}. Call `interval_freezing`,"
      " `continuous_freezing` or `progressive_freezing`, or make one of your own."
    )
  if schedule.num_groups != num_groups:
    raise ValueError(
      f"`schedule` must be for the same number of groups as `groups`; got {schedule.num_groups}"
      f" and {num_groups}."
    )
  key = _base.as_key("key", key)
  inner = optax.with_extra_args_support(inner)

  def depth_at(count: jax.Array, key_data: jax.Array) -> jax.Array:
    wrapped = jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(key))
    depth = jnp.asarray(schedule.frozen_groups(count, wrapped))
    return jnp.clip(depth, 0, num_groups - 1).astype(jnp.int32)

  def init_fn(params: optax.Params) -> FreezeState:
    _tree.check_floating(params, "freeze")
    numbers = group_numbers(params, groups)
    seen = _SEEN.get()
    if seen is not None:
      seen.append(Found(dict(zip(_tree.leaf_paths(params), numbers, strict=True)), num_groups))
    # A copy: the state is donated, the key stays with this function.
    key_data = jnp.array(jax.random.key_data(key))
    count = jnp.zeros([], jnp.int32)
    return FreezeState(count, depth_at(count, key_data), key_data, inner.init(params))

  def update_fn(
    updates: optax.Updates,
    state: FreezeState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, FreezeState]:
    if params is not None:
      _tree.check_same_tree(updates, params, "freeze")
    numbers = jax.tree.unflatten(jax.tree.structure(updates), group_numbers(updates, groups))
    frozen = _Frozen(state.frozen_groups)

    def without(grads: optax.Updates) -> optax.Updates:
      return jax.tree.map(lambda n, g: frozen.select(n, jnp.zeros_like(g), g), numbers, grads)

    extra = dict(extra_args)
    if "grad" in extra:
      extra["grad"] = without(extra["grad"])
    if "grad_fn" in extra:
      grad_fn = extra["grad_fn"]
      extra["grad_fn"] = lambda *args, **kwargs: without(grad_fn(*args, **kwargs))
    out, moved = inner.update(without(updates), state.inner_state, params, **extra)
    if schedule.learning_rate_scale is not None:
      scale = schedule.learning_rate_scale(state.count)
      out = jax.tree.map(lambda n, u: (u * scale[n]).astype(u.dtype), numbers, out)
    count = state.count + 1
    return without(out), FreezeState(
      count=count,
      frozen_groups=depth_at(count, state.key),
      key=state.key,
      inner_state=_keep(inner, frozen, numbers, state.inner_state, moved),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_groups(groups: Any) -> int:
  if isinstance(groups, FreezeGroups):
    return len(groups.groups)
  strings = isinstance(groups, list | tuple) and all(isinstance(g, str) for g in groups)
  if not strings or not groups:
    raise TypeError(
      "`groups` must be what `freeze_groups` returned, or a sequence of regular expressions, one"
      f" per group; got {groups!r}."
    )
  return len(groups)


class _Frozen:
  """Which groups are frozen; decided while tracing where the depth is a constant.

  The train step that is compiled for one depth puts a NumPy integer into the state. Nothing is
  then computed for frozen leaves, and their state passes through untouched.
  """

  def __init__(self, depth: Any):
    self._depth = depth
    self._static = isinstance(depth, np.integer | np.ndarray)

  def select(self, group: int, if_frozen: Any, otherwise: Any) -> Any:
    if self._static:
      return if_frozen if group < self._depth else otherwise
    return jnp.where(group < self._depth, if_frozen, otherwise)


def _keep(
  inner: optax.GradientTransformation,
  frozen: _Frozen,
  numbers: Any,
  before: optax.OptState,
  after: optax.OptState,
) -> optax.OptState:
  """Takes what belongs to frozen leaves from the state before the step."""

  def masked(value: Any) -> bool:
    return isinstance(value, optax.MaskedNode)

  try:
    groups = optax.tree.map_params(
      inner,
      lambda value, number: value if masked(value) else number,
      before,
      numbers,
      transform_non_params=lambda _: None,
      is_leaf=masked,
    )
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise TypeError(
      "`freeze` needs an inner optimizer over whose state `optax.tree.map_params` can map; it"
      f" failed: {error}. Masks and labels that are callables must take any tree: use"
      " `jax.tree.map_with_path` or `optax_boost.path_mask`, or pass them as trees."
    ) from error
  return jax.tree.map(
    lambda group, old, new: new if group is None else frozen.select(group, old, new),
    groups,
    before,
    after,
    is_leaf=lambda value: value is None,
  )


# What a loss to be differentiated returns: the value, and whatever else the step wants of it.
Objective: TypeAlias = Callable[[optax.Params], tuple[jax.Array, Any]]
Execution: TypeAlias = Literal["auto", "per_depth", "switch"]


def cut_gradient(
  objective: Objective, found: Found, depth: int | jax.Array, execution: Execution
) -> Callable[[optax.Params], tuple[optax.Updates, Any]]:
  """The gradient of an objective, without the backward pass of what is frozen.

  Args:
    objective: from params to the value and the rest.
    found: the groups.
    depth: how many groups are frozen: an integer, or a traced scalar.
    execution: how a traced depth is treated: a conditional over all depths, or, where ``"auto"``
      finds that to be slower, the whole gradient.

  Returns:
    A function from params to the gradient, zero for frozen leaves, and the rest.

  Raises:
    ValueError: the depth is traced and `execution` is ``"per_depth"``.
  """
  if isinstance(depth, int):
    return lambda params: _gradient_at(objective, found, depth, params)
  if execution == "per_depth":
    raise ValueError(
      "freezing='per_depth' needs a state whose values are known, to choose the compiled step on"
      " the host; got a traced one. Inside your own `jit`, `scan` or `vmap` pass freezing='auto'"
      " or 'switch'."
    )

  def gradient(params: optax.Params) -> tuple[optax.Updates, Any]:
    if execution == "auto" and not _switch_is_worth_it(objective, params):
      return jax.grad(objective, has_aux=True)(params)
    branches = [
      functools.partial(_gradient_at, objective, found, d) for d in range(found.num_groups)
    ]
    return jax.lax.switch(depth, branches, params)

  return gradient


def _gradient_at(
  objective: Objective, found: Found, depth: int, params: optax.Params
) -> tuple[optax.Updates, Any]:
  leaves, structure = jax.tree.flatten(params)
  # What no group has is always trained.
  groups = [found.group.get(path, found.num_groups) for path in _tree.leaf_paths(params)]
  trained = [i for i, group in enumerate(groups) if group >= depth]

  def of_trained(values: list[jax.Array]) -> tuple[jax.Array, Any]:
    full = list(leaves)
    for i, value in zip(trained, values, strict=True):
      full[i] = value
    return objective(jax.tree.unflatten(structure, full))

  grads, rest = jax.grad(of_trained, has_aux=True)([leaves[i] for i in trained])
  full = [jnp.zeros_like(leaf) for leaf in leaves]
  for i, grad in zip(trained, grads, strict=True):
    full[i] = grad
  return jax.tree.unflatten(structure, full), rest


def _switch_is_worth_it(objective: Objective, params: optax.Params) -> bool:
  # XLA's CPU backend makes the gradient of a convolution some 20 times slower inside a conditional.
  if jax.default_backend() != "cpu":
    return True
  if not has_convolution(jax.make_jaxpr(objective)(params)):
    return True
  warnings.warn(
    "`freeze` saves no time in this step: its depth is traced (the train step runs inside your"
    " own `jit`, `scan` or `vmap`, or is lowered for abstract values), and on a CPU the gradients"
    " of convolutions inside a conditional are slower than without freezing. Call the train step"
    " directly, or pass freezing='switch' to insist.",
    _base.NoEffectWarning,
    stacklevel=2,
  )
  return False


def hold_statistics(
  before: Any, after: Any, params: optax.Params, found: Found, depth: int | jax.Array
) -> Any:
  """Keeps the mutable statistics of frozen layers.

  Statistics belong to the layer whose params have the same path, collection names aside:
  ``batch_stats/norm/mean`` to ``norm/scale``. Those of layers without params go on.

  Args:
    before: the statistics before the forward pass.
    after: those after it.
    params: the params.
    found: the groups.
    depth: how many groups are frozen.

  Returns:
    `after`, with the floating-point entries of frozen layers from `before`.
  """
  structures: Any = (jax.tree.structure(before), jax.tree.structure(after))
  if structures[0] != structures[1]:
    return after
  modules: dict[str, int] = {}
  for path in _tree.leaf_paths(params):
    module = path.rpartition("/")[0]
    group = found.group.get(path, found.num_groups)
    modules[module] = max(modules.get(module, 0), group)
  frozen = _Frozen(np.int32(depth) if isinstance(depth, int) else depth)

  def kept(key_path: Any, old: Any, new: Any) -> Any:
    parts = _tree.path_string(key_path).split("/")[:-1]
    homes = ["/".join(parts[start:]) for start in range(len(parts))]
    home = next((h for h in homes if h in modules), None)
    if home is None or not jnp.issubdtype(jnp.result_type(new), jnp.floating):
      return new
    return frozen.select(modules[home], old, new)

  return jax.tree.map_with_path(kept, before, after)
