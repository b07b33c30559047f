"""Programs with a workaround and without it, and what XLA makes of the two.

Most are steps of the package's methods, in which the plain form takes the workaround's place. Only
what is counted in a compiled program is compared, except where the workaround is about time.
"""

from collections.abc import Callable, Iterator
import contextlib
import importlib
import re
import time
import tomllib
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import optax_boost
from optax_boost._form import _finiteness
from optax_boost._foundation import _arrays, _conditionals
from tests.xla import table

_SHAPE = (256, 256)
_SMALL = (10, 16)


class Finding(NamedTuple):
  """Whether a workaround is needed, and the figures that say so."""

  is_needed: bool
  figures: str


CHECKS: dict[int, Callable[[], Finding]] = {}


def check(number: int) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
  """Registers the check of a row of docs/xla.md."""

  def register(function: Callable[[], Finding]) -> Callable[[], Finding]:
    CHECKS[number] = function
    return function

  return register


# What is replaced, as "module.name" in the package: tests/house checks that all of these exist.
REPLACED = (
  "_foundation._arrays._TOGETHER",
  "_form._finiteness.all_finite",
  "_foundation._arrays.divide",
  "_foundation._arrays.group_small_leaves",
  "_foundation._conditionals.once_if",
  "_methods._dim_reduce._linalg._sum_by_group",
  "_form._finiteness._sums_in_links",
  "_methods._lars._trust_ratio",
  "_methods._lars.jax.lax.platform_dependent",
  "_methods._sgperm._execution._hint",
  "_methods._sgperm._execution.sharded_like",
)


def find(target: str) -> tuple[Any, str]:
  """The module or object that holds a target, and its name there."""
  path, _, name = target.rpartition(".")
  parts = path.split(".")
  holder: Any = importlib.import_module("optax_boost")
  for i, part in enumerate(parts):
    if not hasattr(holder, part):
      importlib.import_module(".".join(["optax_boost", *parts[: i + 1]]))
    holder = getattr(holder, part)
  return holder, name


@contextlib.contextmanager
def replaced(target: str, plain: Any) -> Iterator[None]:
  """Puts the plain form in the place of a workaround."""
  assert target in REPLACED, f"list {target} in REPLACED"
  # Jitted functions keep the traces that the workaround left.
  jax.clear_caches()
  with mock.patch.object(*find(target), plain):
    yield
  jax.clear_caches()


def compiled(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
  """The compiled program of a new function, so that no earlier trace is used."""
  return jax.jit(lambda *args: function(*args), donate_argnums=donate).lower(*args).compile()


def step(tx: Any, leaves: int, shape: tuple[int, ...] = _SHAPE) -> Any:
  """The compiled step of a transformation in place, params and state donated."""
  params = [jax.ShapeDtypeStruct(shape, jnp.float32)] * leaves
  state = jax.eval_shape(tx.init, params)
  return compiled(
    lambda params, state, grads: optax_boost.apply_gradients(tx, grads, state, params),
    *(params, state, params),
    donate=(0, 1),
  )


def temporary(program: Any) -> int:
  """The bytes of a program's temporary arrays."""
  return program.memory_analysis().temp_size_in_bytes


def count(program: Any, operation: str) -> int:
  """How often an operation occurs in the text of a program."""
  return len(re.findall(rf" {operation}(?:-start)?\(", program.as_text()))


def loops(program: Any) -> list[int]:
  """The lines of each fused loop of a program for CPUs."""
  computations = re.split(r"\n(?=\S)", program.as_text())
  return [text.count("\n") for text in computations if text.startswith("%fused")]


def compare(unit: str, without: float, ours: float, at_least: float = 1.3) -> Finding:
  """Needed if the figure without the workaround is so many times as large, or more."""
  figures = f"{without:,.6g} {unit} without, {ours:,.6g} with it"
  return Finding(without > ours and without >= at_least * ours, figures)


def seconds(function: Callable[..., Any], *args: Any, rounds: int = 5) -> float:
  """The shortest time of a call of a jitted function."""
  jax.block_until_ready(function(*args))
  times = []
  for _ in range(rounds):
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    times.append(time.perf_counter() - start)
  return min(times)


def seconds_to_compile(tx: Callable[[], Any], leaves: int, shape: tuple[int, ...]) -> float:
  """The processor time that a step takes to compile."""
  transformation = tx()
  params = [jax.ShapeDtypeStruct(shape, jnp.float32)] * leaves
  state = jax.eval_shape(transformation.init, params)

  def run(params: Any, state: Any, grads: Any) -> Any:
    return optax_boost.apply_gradients(transformation, grads, state, params)

  lowered = jax.jit(run).lower(params, state, params)
  start = time.process_time()
  lowered.compile()
  return time.process_time() - start


def _each_alone(keys: Any, *columns: Any) -> list[list[int]]:
  return [[i] for i in range(len(keys))]


@check(1)
def sums_over_small_leaves() -> Finding:
  def lines() -> int:
    return max(loops(compiled(_arrays.sum_squares_of_tree, [jnp.ones(_SMALL)] * 200)))

  ours = lines()
  with replaced("_foundation._arrays._TOGETHER", 10_000):
    return compare("lines in the largest loop", lines(), ours)


@check(2)
def a_scalar_of_all_leaves() -> Finding:
  def lines() -> int:
    def select(leaves: Any) -> Any:
      finite = _finiteness.all_finite(leaves)
      return [jnp.where(finite, x, 0) for x in leaves]

    return sum(loops(compiled(select, [jnp.ones(_SMALL)] * 50)))

  def plain(leaves: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]))

  ours = lines()
  with replaced("_form._finiteness.all_finite", plain):
    return compare("lines in all loops", lines(), ours)


@check(3)
def a_cheap_scalar_per_leaf() -> Finding:
  def lines() -> int:
    return sum(loops(step(optax_boost.lars(0.1, 1e-4), 40)))

  def division_first(w2: Any, g2: Any, eta: Any, wd: Any, eps: Any, rate: Any) -> Any:
    w, g = jnp.sqrt(w2), jnp.sqrt(g2)
    finite = jnp.isfinite(w + g)
    usable = finite & (jnp.minimum(w, g) > 0)
    ratio = eta * w / jnp.where(usable, g + wd * w + eps, 1.0)
    return jnp.where(usable, ratio, jnp.where(finite, 1.0, jnp.nan))

  ours = lines()
  with replaced("_methods._lars._trust_ratio", jax.jit(division_first)):
    return compare("lines in all loops", lines(), ours, 1.2)


@check(4)
def leaves_that_read_parts_of_a_vector() -> Finding:
  def lars() -> Any:
    return optax_boost.lars(0.1, 1e-4)

  def as_on_gpus(*args: Any, cuda: Any, **others: Any) -> Any:
    return cuda(*args)

  ours = seconds_to_compile(lars, 100, _SMALL)
  with replaced("_methods._lars.jax.lax.platform_dependent", as_on_gpus):
    return compare("s to compile", seconds_to_compile(lars, 100, _SMALL), ours)


@check(8)
def a_kernel_that_draws_for_each_leaf() -> Finding:
  def draws() -> int:
    tx = optax_boost.stochastic_rounding(optax.sgd(0.1), key=0)
    params = [jax.ShapeDtypeStruct(_SMALL, jnp.bfloat16)] * 16
    state = jax.eval_shape(tx.init, params)
    return count(compiled(lambda g, s, p: tx.update(g, s, p), params, state, params), "shift-left")

  ours = draws()
  with replaced("_foundation._arrays.group_small_leaves", _each_alone):
    return compare("shifts of random bits", draws(), ours)


def _dim_reduce(shapes: list[tuple[int, ...]], components: int = 8) -> Any:
  rows = [jnp.full((components, *shape), 0.01) for shape in shapes]
  variances = jnp.ones(components)
  subspace = optax_boost.Subspace(
    [jnp.ones(shape) for shape in shapes], rows, variances, variances / components
  )
  tx = optax_boost.dim_reduce(subspace, max_search=None)
  params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

  def update(params: Any, state: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return compiled(update, params, jax.eval_shape(tx.init, params), params, donate=(0, 1))


@check(9)
def a_product_for_each_leaf() -> Finding:
  ours = count(_dim_reduce([_SMALL] * 40), "dot")
  with replaced("_foundation._arrays.group_small_leaves", _each_alone):
    return compare("products", count(_dim_reduce([_SMALL] * 40), "dot"), ours)


@check(10)
def copies_at_the_edge_of_a_conditional() -> Finding:
  def copies() -> int:
    return count(step(optax_boost.accumulate(optax.adam(0.1), 4, not_finite=None), 8), "copy")

  def cond(condition: Any, function: Any, *carry: Any) -> Any:
    def call(carry: Any) -> Any:
      return tuple(_arrays.cast_like(tuple(function(*carry)), carry))

    return condition, *jax.lax.cond(condition, call, lambda carry: carry, carry)

  ours = copies()
  with replaced("_foundation._conditionals.once_if", cond):
    return compare("copies", copies(), ours)


@check(12)
def products_that_are_summed_are_stored() -> Finding:
  def stored() -> int:
    return temporary(step(optax_boost.dynamic_loss_scale(optax.adam(0.1)), 16))

  ours = stored()
  with replaced("_form._finiteness._sums_in_links", _finiteness._sums):
    return compare("temporary bytes", stored(), ours)


@check(13)
def a_division_is_stored() -> Finding:
  def stored() -> int:
    return temporary(step(optax_boost.accumulate(optax.adam(0.1), 4, not_finite=None), 8))

  def plain(x: jax.Array, by: jax.Array, largest: float = 0.0) -> jax.Array:
    return (_arrays.widen(x) / by).astype(x.dtype)

  ours = stored()
  with replaced("_foundation._arrays.divide", plain):
    return compare("temporary bytes", stored(), ours)


@check(14)
def equal_zeros_share_one_array() -> Finding:
  def program(reset: Callable[[Any], Any]) -> Any:
    def emptied(ended: Any, totals: Any, grads: Any) -> Any:
      totals = [total + grad for total, grad in zip(totals, grads, strict=True)]
      _, *out = _conditionals.once_if(ended, lambda *x: tuple(reset(y, ended) for y in x), *totals)
      return out

    arrays = [jnp.ones(_SHAPE)] * 8
    return compiled(emptied, True, arrays, arrays, donate=(1,))

  without = program(lambda total, ended: jnp.zeros_like(total))
  ours = program(lambda total, ended: jnp.where(ended, jnp.zeros_like(total), total))
  return compare("copies", count(without, "copy"), count(ours, "copy"))


@check(15)
def a_momentum_that_is_computed_twice() -> Finding:
  def program(selects_first: bool) -> Any:
    def update(finite: Any, params: Any, momentum: Any, grads: Any) -> Any:
      new = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
      kept = [jnp.where(finite, n, m) for n, m in zip(new, momentum, strict=True)]
      used = kept if selects_first else new
      moved = [p + jnp.where(finite, -0.1 * m, 0) for p, m in zip(params, used, strict=True)]
      return moved, kept

    arrays = [jnp.ones(_SHAPE)] * 8
    return compiled(update, True, arrays, arrays, arrays, donate=(1, 2))

  return compare("copies", count(program(False), "copy"), count(program(True), "copy"))


@check(17)
def a_joined_vector() -> Finding:
  def program(by_row: bool) -> Any:
    def pack(leaves: Any) -> Any:
      if not by_row:
        return jnp.concatenate([jnp.ravel(x) for x in leaves]).reshape(8, -1)
      flat = [jnp.ravel(x) for x in leaves]
      size = sum(x.size for x in flat) // 8
      starts = [sum(x.size for x in flat[:i]) for i in range(len(flat))]
      rows = []
      for origin in range(0, 8 * size, size):
        cuts = [slice(max(origin - s, 0), max(origin + size - s, 0)) for s in starts]
        rows.append(jnp.concatenate([x[cut] for x, cut in zip(flat, cuts, strict=True)]))
      return jnp.stack(rows)

    def exchanged(leaves: Any) -> Any:
      return jax.lax.all_to_all(pack(leaves), "x", 0, 0, tiled=True)

    mesh = jax.make_mesh((8,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    arrays = [jax.ShapeDtypeStruct((8, 1000, 100), jnp.float32, sharding=sharding)] * 20
    return compiled(jax.shard_map(exchanged, mesh=mesh, in_specs=spec, out_specs=spec), arrays)

  return compare("temporary bytes", temporary(program(False)), temporary(program(True)), 1.05)


@check(18)
def precision_that_a_dtype_does_not_have() -> Finding:
  x = jnp.linspace(0, 1, 1000).astype(jnp.bfloat16)
  y = jnp.linspace(1, 3, 1000).astype(jnp.bfloat16)
  rounded = (x + y).astype(jnp.float32)

  def plain(x: Any, y: Any) -> Any:
    return (x + y).astype(jnp.float32)

  def behind_a_barrier(x: Any, y: Any) -> Any:
    return jax.lax.optimization_barrier(x + y).astype(jnp.float32)

  wrong = [int(jnp.sum(jax.jit(f)(x, y) != rounded)) for f in (plain, behind_a_barrier)]
  return compare("of 1,000 sums not rounded", *wrong)


@check(19)
def a_sort_loses_its_sharding() -> Finding:
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

  def gathers() -> int:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    params = jax.device_put({"kernel": jnp.arange(64.0 * 64).reshape(64, 64)}, sharding)
    tx = optax_boost.sgperm(0.1, method="rank")
    program = compiled(tx.update, params, tx.init(params), params)
    return count(program, "all-gather")

  ours = gathers()
  with (
    replaced("_methods._sgperm._execution.sharded_like", lambda old, new, floats: new),
    replaced("_methods._sgperm._execution._hint", lambda *_: None),
  ):
    return compare("gathers", gathers(), ours)


@check(20)
def no_gather_from_an_explicit_mesh_that_is_not_set() -> Finding:
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  empty = jax.device_put(jnp.zeros((2, 0)), sharding)
  index = jax.device_put(jnp.zeros((2, 0), jnp.int32), sharding)
  try:
    jnp.ravel(empty)[index]
  except Exception as error:  # JAX has no one type for it.
    return Finding(True, f"{type(error).__name__} for a leaf without entries")
  return Finding(False, "a leaf without entries is gathered")


@check(21)
def sorts_of_pairs() -> Finding:
  from optax_boost._methods._sgperm import _sorting

  x = jax.random.normal(jax.random.key(0), (784, 500))

  def sort_of_xla(x: jax.Array) -> jax.Array:
    return jnp.argsort(x, axis=0)

  without, ours = (seconds(jax.jit(sort), x) for sort in (sort_of_xla, _sorting.argsort))
  return compare("s", without, ours)


@check(22)
def gradients_of_convolutions_in_control_flow() -> Finding:
  x, w = jnp.ones((16, 32, 32, 16)), jnp.ones((3, 3, 16, 16))

  def loss(w: jax.Array) -> jax.Array:
    y = jax.lax.conv_general_dilated(
      x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.sum(jax.nn.relu(y) ** 2)

  def inside(go: Any, w: Any) -> Any:
    return jax.lax.cond(go, jax.grad(loss), jnp.zeros_like, w)

  without = seconds(jax.jit(inside), True, w)
  return compare("s", without, seconds(jax.jit(jax.grad(loss)), w))


@check(23)
def each_array_of_a_call_takes_time() -> Finding:
  def time_of(arrays: int) -> float:
    def call(*x: Any) -> Any:
      return [y + 1 for y in x]

    values = [jnp.ones(1000 // arrays)] * arrays
    return seconds(jax.jit(call), *values, rounds=50)

  return compare("us for 1,000 numbers", 1e6 * time_of(1000), 1e6 * time_of(1))


@check(24)
def donated_arrays_are_matched_in_order() -> Finding:
  def copies(*, crosses: bool) -> int:
    def update(params: Any, momentum: Any, grads: Any) -> Any:
      momentum = 0.9 * momentum + grads
      params = params - momentum
      return (momentum, params) if crosses else (params, momentum)

    array = jnp.ones(_SHAPE)
    program = compiled(update, array, array, array, donate=(0, 1))
    return count(program, "copy")

  return compare("copies", copies(crosses=True), copies(crosses=False))


@check(25)
def a_function_is_not_traced_again() -> Finding:
  factor = 1.0

  def called(x: jax.Array) -> jax.Array:
    return factor * x

  def traced(function: Callable[..., Any]) -> str:
    return str(jax.make_jaxpr(function)(1.0))

  before = traced(called)
  factor = 2.0
  stale, fresh = traced(called) == before, traced(lambda x: called(x)) == before
  return Finding(stale and not fresh, "an earlier trace is used" if stale else "traced again")


@check(26)
def a_barrier_joins_derivatives() -> Finding:
  def equations(together: bool) -> int:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
      w = jax.lax.stop_gradient(w)
      if together:
        x, w = jax.lax.optimization_barrier((x, w))
      else:
        x, w = jax.lax.optimization_barrier(x), jax.lax.optimization_barrier(w)
      return jnp.sum(x * jnp.sin(w))

    return len(jax.make_jaxpr(jax.grad(loss))(jnp.ones(3), jnp.ones(3)).jaxpr.eqns)

  return compare("equations in a gradient", equations(True), equations(False), 1.01)


def _oldest_jax() -> tuple[int, ...]:
  with (table.ROOT / "pyproject.toml").open("rb") as file:
    needs = tomllib.load(file)["project"]["dependencies"]
  version = next(need for need in needs if need.startswith("jax>=")).removeprefix("jax>=")
  return tuple(map(int, version.split(".")))


def _until(version: tuple[int, ...]) -> Finding:
  oldest = _oldest_jax()
  return Finding(oldest < version, f"the oldest supported JAX is {'.'.join(map(str, oldest))}")


@check(27)
def an_old_all_gather() -> Finding:
  return _until((0, 10))


@check(28)
def an_old_mesh() -> Finding:
  return _until((0, 8))
