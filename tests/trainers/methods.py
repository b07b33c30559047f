"""Each method in a trainer that knows only optax, with a promise that can fail."""

from collections.abc import Callable
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from tests import compilations, meshes

STEPS = 6
INNER = optax.adam(1e-2, eps=1e-3)  # an eps that rounding can't turn into steps


class Trained(NamedTuple):
  """Results of a trainer: params before and after, the optimizer's state, and its losses."""

  initial: Any
  final: Any
  opt_state: Any
  losses: list[float]
  late: int = 0  # programs compiled after the first step


@dataclasses.dataclass(frozen=True)
class Program:
  """A trainer: `train(tx)`, with patterns of its first layers, vectors, and a centered kernel."""

  train: Callable[[optax.GradientTransformation], Trained]
  first: str
  kernel: str | None  # None: without kernels, whose methods have nothing to do
  vectors: str = "bias|scale"
  layout: str = "flax"
  falls: bool = True
  axis: str | None = None  # of replicas, whose gradients the trainer averages
  wraps: bool = False  # puts a wrapper of optax around the optimizer


def host(tree: Any) -> Any:
  """A tree's values, out of reach of donation."""
  return jax.tree.map(np.array, tree)


@functools.partial(jax.jit, static_argnums=0)
def init(module: Any, *args: Any) -> Any:
  """A Linen module's variables: one program, traced once for all modules that are equal."""
  return module.init(*args)


@functools.partial(jax.jit, static_argnums=1)
def entry(tree: Any, index: int) -> Any:
  """One replica's or model's tree, of leaves with an axis of them."""
  return jax.tree.map(lambda x: x[index], tree)


def mesh() -> jax.sharding.Mesh:
  """Four devices, two for data and two for params, as most trainers still use them: Auto."""
  return meshes.mesh((2, 2), ("data", "fsdp"))


def loop(step: Callable[..., tuple[Any, Any]], state: Any) -> tuple[Any, list[float], int]:
  """Makes the steps: the last state, the losses, and the programs compiled late."""
  step, losses = compilations.Watched(step), []
  for _ in range(STEPS):
    state, loss = step(state)
    losses.append(jax.block_until_ready(loss))  # few cores: one program of collectives at a time
  return state, [float(jnp.mean(loss)) for loss in losses], sum(step.counts[1:])


def named(tree: Any) -> dict[str, np.ndarray]:
  flat = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in flat}


@functools.cache
def train(program: Program, tx: optax.GradientTransformation) -> Trained:
  return program.train(tx)


def _close(left: Any, right: Any) -> None:
  left, right = named(left), named(right)
  assert left.keys() == right.keys()
  for name, value in left.items():
    np.testing.assert_allclose(value, right[name], rtol=1e-4, atol=2e-5, err_msg=name)


def _split(program: Program, first: Any, rest: Any) -> optax.GradientTransformation:
  def labels(params: Any) -> Any:
    hit = optax_boost.path_mask(program.first)(params)
    return jax.tree.map(lambda x: "first" if x else "rest", hit)

  return optax.partition({"first": first, "rest": rest}, labels)


@functools.cache
def _for_two_steps() -> optax.GradientTransformation:
  return optax.chain(INNER, optax.scale_by_schedule(lambda count: jnp.where(count < 2, 1.0, 0.0)))


def _groups(program: Program) -> list[str]:
  """The first layers and a later leaf, with all others, which no pattern matches."""
  return [program.first, program.kernel or program.vectors]


def _optax_lars(program: Program) -> optax.GradientTransformation:
  vectors = optax_boost.path_mask(program.vectors)

  def mask(params: Any) -> Any:
    return jax.tree.map(operator.not_, vectors(params))

  ours = {"trust_coefficient": 0.02, "eps": 1e-8, "momentum": 0.5}
  return optax.lars(0.5, weight_decay=0.0, trust_ratio_mask=mask, **ours)


def _froze(program: Program, trained: Trained) -> None:
  before, after = named(trained.initial), named(trained.final)
  frozen = named(optax_boost.path_mask(program.first)(trained.initial))
  assert 0 < sum(map(bool, frozen.values())) < len(frozen)
  assert all(np.array_equal(before[name], after[name]) for name, hit in frozen.items() if hit)


def _averaged_the_last(program: Program, trained: Trained) -> None:
  """The average from the last step on is of that step's params."""
  _close(optax_boost.averaged_params(trained.opt_state, trained.final), trained.final)


def _recorded(program: Program, trained: Trained) -> None:
  kept = jax.tree.map(lambda x: x[0], optax_boost.snapshots(trained.opt_state))
  _close(kept, train(program, _for_two_steps()).final)


def _centered(program: Program, trained: Trained) -> None:
  def drift(run: Trained) -> float:
    moved = named(run.final)[program.kernel] - named(run.initial)[program.kernel]
    axis = tuple(range(moved.ndim - 1)) if program.layout == "flax" else tuple(range(1, moved.ndim))
    return float(np.abs(moved.mean(axis)).max() / np.abs(moved).max())

  assert drift(trained) < 1e-4 < drift(train(program, INNER))


def _permuted(program: Program, trained: Trained) -> None:
  """Entry by entry the initial values, which the trainer's addition rounds in the last bits."""
  model = optax_boost.permuted_params(trained.opt_state, trained.initial)
  start, exact, final = map(named, (trained.initial, model.params, trained.final))
  moved = False
  for name, before in start.items():
    np.testing.assert_array_equal(np.sort(before.ravel()), np.sort(exact[name].ravel()), name)
    np.testing.assert_allclose(final[name], exact[name], rtol=0, atol=3e-7, err_msg=name)
    moved |= not np.array_equal(before, exact[name])
  assert moved


class Method(NamedTuple):
  """A transformation, plain optax with the same result, and what else must hold."""

  ours: Callable[[Program], optax.GradientTransformation]
  plain: Callable[[Program], optax.GradientTransformation] | None = lambda program: INNER
  check: Callable[[Program, Trained], None] = lambda program, trained: None


METHODS = {
  "accumulate": Method(
    lambda p: optax_boost.accumulate(INNER, 2),
    lambda p: optax.MultiSteps(INNER, 2).gradient_transformation(),
  ),
  "average_params": Method(
    lambda p: optax_boost.average_params(INNER, start=STEPS - 1), check=_averaged_the_last
  ),
  "centralize": Method(
    lambda p: optax.chain(optax_boost.centralize(layout=p.layout), optax.sgd(0.05)),
    None,
    _centered,
  ),
  "dynamic_loss_scale": Method(
    lambda p: optax_boost.dynamic_loss_scale(INNER, 1.0, growth_interval=None)
  ),
  "freeze_layers": Method(
    lambda p: optax_boost.freeze_layers(INNER, _groups(p), optax_boost.fixed_freezing(2, 1)),
    lambda p: _split(p, optax.set_to_zero(), INNER),
    _froze,
  ),
  "lars": Method(
    lambda p: optax_boost.lars(0.5, momentum=0.5, trust_coefficient=0.02), _optax_lars
  ),
  "layerwise_decay": Method(
    lambda p: optax_boost.layerwise_decay(INNER, _groups(p), 0.5),
    lambda p: _split(p, optax.chain(INNER, optax.scale(0.5)), INNER),
  ),
  "master_weights": Method(lambda p: optax_boost.master_weights(INNER)),
  "stochastic_rounding": Method(lambda p: optax_boost.stochastic_rounding(INNER, key=0)),
  "record_trajectory": Method(
    lambda p: optax.chain(optax_boost.record_trajectory(2, 2), INNER), check=_recorded
  ),
  "switch_after": Method(
    lambda p: optax_boost.switch_after(2, INNER, optax.set_to_zero()), lambda p: _for_two_steps()
  ),
  "adasum": Method(lambda p: optax.chain(optax_boost.adasum(p.axis), INNER)),
  "sgperm": Method(
    lambda p: optax_boost.sgperm(method="pairs", key=1, layout=p.layout),
    None,
    _permuted,
  ),
  "laperm": Method(
    lambda p: optax_boost.laperm(INNER, sync_every=STEPS, layout=p.layout),
    None,
    _permuted,
  ),
}


OF_KERNELS = {"centralize", "lars", "sgperm", "laperm"}
# What must be around all wrappers of optax.
OF_ROOT = {"average_params", "dynamic_loss_scale", "freeze_layers", "master_weights"}
OF_ROOT |= {"stochastic_rounding"}


def check(program: Program, name: str) -> None:
  """Trains with a method and with plain optax, and compares."""
  method = METHODS[name]
  trained = program.train(method.ours(program))
  assert np.all(np.isfinite(trained.losses))
  plain = train(program, INNER)
  assert trained.late <= plain.late
  if program.falls:
    assert plain.losses[-1] < plain.losses[0]
  if method.plain is not None:
    _close(trained.final, train(program, method.plain(program)).final)
  method.check(program, trained)


def quick_and_slow(programs: dict[str, Program], *quick: str) -> Any:
  """Parametrizes with all methods, and marks all slow but one for each program, by turns."""
  rows = []
  for (label, program), chosen in zip(programs.items(), quick, strict=True):
    left_out = (set() if program.axis else {"adasum"}) | (set() if program.kernel else OF_KERNELS)
    left_out |= OF_ROOT if program.wraps else set()
    names = [name for name in METHODS if name not in left_out]
    assert chosen in names
    for name in names:
      marks = [] if name == chosen else [pytest.mark.slow]
      rows.append(pytest.param(program, name, id=f"{label}-{name}", marks=marks))
  return pytest.mark.parametrize(("program", "method"), rows)
