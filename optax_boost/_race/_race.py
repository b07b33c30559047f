"""``race``, which checks its arguments, makes batches, and trains with all methods."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from optax_boost._foundation import _checks, _full_gradient, _types, _warnings
from optax_boost._race import _result, _training

# Trainings whose batches have the same examples in another order differ by rounding only. The steps
# of a training may add up about a hundred roundings of float32.
_ROUNDING = 1e-5

# A transformation, or ``(transformation, batch_fn)``.
_Contender: TypeAlias = (
  optax.GradientTransformation | tuple[optax.GradientTransformation, _training.BatchFn]
)


def race(
  loss_fn: _types.LossFn,
  init_fn: Callable[[jax.Array], Any],
  data: Any,
  transformations: Mapping[str, _Contender],
  *,
  steps: int,
  batch_size: int | None = None,
  seeds: int | Sequence[int] = 3,
  evaluate: _types.Closure | None = None,
  points: int = 40,
  has_model_state: bool = False,
  full_grad_fn: _types.Closure | None = None,
  vmap_seeds: bool = False,
  progress: bool = True,
) -> _result.RaceResult:
  """Trains with several transformations, and compares each of them with the first, the baseline.

  Runs in one process: if several processes train together, `race` refuses, since each would time
  the methods by its own clock.

  For each seed, all methods get the same initial params, batches and keys. So a method is compared
  with the baseline seed by seed. Both are compared at the same cost: the total cost of the one
  whose training cost less. The cost is measured in three ways, the budgets:

  - steps;
  - gradient evaluations, counted with the first seed. A gradient of the loss counts as 1, a value
    of the loss without a gradient (a trial point of a line search) as 1/3. The count doesn't show
    that :func:`freeze_layers` skips a part of the backward pass, or that sequences are short; the
    time does;
  - time, without the time for compiling, evaluating and making batches. Each seed has a time of its
    own, so the error of the clock is a part of the intervals over seeds. For each seed all methods
    train in turns, so memory must hold one state of each method.

  For Flax models, ``nnx.split_loss`` and ``linen.split_loss`` make the loss pure.

  Args:
    loss_fn: the loss, as :func:`make_train_step` takes it: ``loss_fn(params, batch)``, or
      ``loss_fn(params, model_state, batch)`` with `has_model_state`. If it has another argument
      called ``rng`` or ``key``, it gets a key.
    init_fn: a function from a key to the initial params, or to ``(params, model_state)`` with
      `has_model_state`.
    data: a tree of arrays with a leading axis of examples, which are shuffled for each seed and
      epoch and cut into whole batches; or a function from the seed to an iterable of batches, which
      is called again when the iterable ends.
    transformations: the transformations by name. The first is the baseline. Make learning-rate
      schedules for `steps` steps. A pair ``(transformation, batch_fn)`` trains with batches of its
      own, ``batch_fn(batch, step)`` for the step counted from 0:
      ``(boost.optimizer(...), boost.batch)`` races a level of :func:`auto_boost`.
    steps: the number of steps of each training.
    batch_size: the number of examples in a batch; None: all examples. Must be None if `data` is a
      function.
    seeds: the seeds, or the number n of seeds, which are then 0, ..., n - 1. More seeds make the
      intervals narrower; 3 is few.
    evaluate: ``evaluate(params)``, or ``evaluate(params, model_state)`` with `has_model_state`;
      measures on held-out data and returns a scalar or a dictionary of scalars. `race` does not jit
      this function. If the optimizer keeps an average (:func:`average_params`,
      ``optax.contrib.schedule_free``, also inside wrappers), `params` is the average, though the
      training loss is computed at the trained params. `model_state` is the average of the
      statistics if ``average_params(..., model_state=model_state)`` keeps one, else the last
      statistics. The last statistics of BatchNorms don't fit averaged params, so average the
      statistics, too, or let `evaluate` estimate them (``nnx.estimate_batch_stats``,
      ``linen.estimate_batch_stats``).
    points: the largest number of points in a curve. More points cost more evaluations.
    has_model_state: whether the loss takes and returns mutable statistics.
    full_grad_fn: the argument of :func:`make_train_step` for :func:`svrg`.
    vmap_seeds: whether to train all seeds at once with ``jax.vmap``, which may be faster on an
      accelerator, needs the memory of all these trainings, and measures no time. Methods that
      freeze layers always train one seed at a time.
    progress: whether to show a progress bar; needs ``tqdm``.

  Returns:
    A :class:`RaceResult`. A seed whose last loss is not finite is reported as diverged and left out
    of means. If seeds give the same curves, since neither initial params nor batches nor keys
    depend on them, a warning says so, and the result holds the first of these seeds. After Ctrl-C
    the result holds the seeds that every method has finished, if there are any, and
    ``result.complete`` is False.

  Examples:
    >>> import jax, jax.numpy as jnp, optax, optax_boost
    >>> methods = {"sgd": optax.sgd(0.05), "lbfgs": optax.lbfgs()}
    >>> loss_fn = lambda w, batch: jnp.mean((batch @ w) ** 2)
    >>> init_fn = lambda key: jax.random.normal(key, (3,))
    >>> result = optax_boost.race(loss_fn, init_fn, jnp.eye(3), methods, steps=20, progress=False)
    >>> [bool(result.spent[name]["gradient_evaluations"][-1] > 20) for name in methods]
    [False, True]
  """
  if jax.process_count() > 1:
    raise ValueError(
      f"`race` must run in one process; got {jax.process_count()}, each of which would time the"
      " methods by its own clock. Run it on one machine, without `jax.distributed.initialize`."
    )
  _checks.check_bool("vmap_seeds", vmap_seeds)
  batches, chosen = _batches(data, batch_size), _seeds(seeds)
  problem = _training.Problem(
    loss_fn, init_fn, batches, evaluate, steps, points, has_model_state, full_grad_fn
  )
  methods = _methods(problem, transformations)
  complete = _training.train(methods, problem.blocks, chosen, vmap_seeds, progress)
  finished = _different(
    [seed for seed in chosen if all(seed in m.points for m in methods.values())], methods
  )
  curves = {name: method.curves(finished) for name, method in methods.items()}
  spent = {name: method.spent(finished) for name, method in methods.items()}
  averaged = tuple(name for name, method in methods.items() if method.is_averaged)
  return _result.RaceResult(tuple(finished), curves, spent, complete, averaged)


def _methods(
  problem: _training.Problem, transformations: _types.Unchecked
) -> dict[str, _training.Method]:
  if (
    not isinstance(transformations, Mapping)
    or not transformations
    or not all(isinstance(name, str) for name in transformations)
  ):
    raise TypeError(
      "`transformations` must be a dictionary from names to transformations, at least one; got"
      f" {_checks.shorten(transformations)}."
    )
  methods = {}
  for name, contender in transformations.items():
    tx, batch_fn = contender, lambda batch, step: batch
    if type(contender) in (tuple, list) and len(contender) == 2:
      tx, batch_fn = contender
      argument = f"transformations[{name!r}][1]"
      _checks.check_callable(argument, batch_fn, "batch_fn(batch, step)", takes=2)
    _checks.check_transformation(f"transformations[{name!r}]", tx)
    methods[name] = _training.Method(problem, tx, batch_fn)
  return methods


def _different(seeds: list[int], methods: Mapping[str, _training.Method]) -> list[int]:
  """Returns `seeds` without those that repeat the training of a seed before, and warns of these."""
  if not seeds:
    return []
  losses = [method.curves(seeds)[_result.LOSS] for method in methods.values()]
  different: list[int] = []
  for i in range(len(seeds)):
    if not any(all(_equal(curves[i], curves[k]) for curves in losses) for k in different):
      different.append(i)
  if len(different) < len(seeds):
    _warnings.warn(
      f"{len(seeds)} seeds give only {len(different)} different trainings; equal ones count once."
      " Let the initial params (`init_fn`), the batches (`batch_size`, `data`) or the noise of the"
      " loss depend on the seed.",
      _warnings.NoEffectWarning,
    )
  return [seeds[i] for i in different]


def _equal(curve: np.ndarray, other: np.ndarray) -> bool:
  """Returns whether two curves are equal up to rounding; curves without a number are not."""
  finite = np.isfinite(curve)
  scale = np.abs(curve[finite]).max(initial=0)
  same = np.isclose(curve, other, rtol=0, atol=_ROUNDING * scale, equal_nan=True).all()
  return bool(finite.any() and same)


def _seeds(seeds: Any) -> list[int]:
  if np.ndim(seeds) == 0:
    _checks.check_whole_number("seeds", seeds, static=True)
    return list(range(seeds))
  chosen = np.asarray(seeds).tolist()
  for seed in chosen:
    _checks.check_whole_number("seeds", seed, minimum=0, static=True)
  if not chosen or len(set(chosen)) < len(chosen):
    raise ValueError(f"`seeds` must be different numbers, at least one; got {chosen}.")
  return chosen


def _batches(data: Any, batch_size: int | None) -> Callable[[int], Iterator[_types.Batch]]:
  """Returns a function from a seed to endless batches; every method gets the same batches."""
  if callable(data):
    if batch_size is not None:
      raise ValueError(
        f"`batch_size` must be None if `data` is a function; got {_checks.shorten(batch_size)}. Let"
        " the function make batches of that size."
      )
    return functools.partial(_repeat, data)
  examples = _count_examples(data)
  size = examples if batch_size is None else batch_size
  _checks.check_whole_number("batch_size", size, static=True)
  if size > examples:
    raise ValueError(
      f"`batch_size` must be at most the number of examples, {examples}; got {size}."
    )
  return functools.partial(_shuffle, data, examples, size)


def _count_examples(data: _types.Tree) -> int:
  leaves = [] if isinstance(data, Iterator) else jax.tree.leaves(data)
  shapes = [np.shape(leaf) if _checks.is_any_array(leaf) else () for leaf in leaves]
  examples = shapes[0][0] if shapes and shapes[0] else 0
  if not examples or any(shape[:1] != (examples,) for shape in shapes):
    raise ValueError(
      "`data` must be a tree of arrays with one leading axis of at least one example, or a function"
      " from the seed to an iterable of batches (`lambda seed: loader`); got"
      f" {f'arrays of the shapes {shapes}' if any(shapes) else _checks.shorten(data)}."
    )
  return examples


def _shuffle(data: _types.Tree, examples: int, size: int, seed: int) -> Iterator[_types.Batch]:
  """Yields whole batches of `size` examples without end; shuffles `data` again for each epoch."""
  rng = np.random.default_rng(seed)
  while True:
    order = rng.permutation(examples)
    for start in range(0, examples - size + 1, size):
      yield jax.tree.map(functools.partial(_rows, order[start : start + size]), data)


def _rows(chosen: np.ndarray, leaf: Any) -> Any:
  """Returns the rows `chosen` of a leaf."""
  return _rows_on_device(chosen, leaf) if isinstance(leaf, jax.Array) else leaf[chosen]


# To index an array outside of `jit` takes Python a millisecond.
@jax.jit
def _rows_on_device(chosen: jax.Array, leaf: jax.Array) -> jax.Array:
  return leaf[chosen]


def _repeat(data: Callable[[int], Iterable[_types.Batch]], seed: int) -> Iterator[_types.Batch]:
  """Yields the batches of ``data(seed)`` without end; calls ``data(seed)`` for each epoch."""
  while True:
    batch, batches = None, data(seed)
    _full_gradient.check_batches(f"data({seed})", batches)
    for batch in batches:
      yield batch
    if batch is None:
      raise ValueError(
        f"`data` must return batches from their start at each call; data({seed}) gave none. Make"
        " the iterator inside of the function."
      )
