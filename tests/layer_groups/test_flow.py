"""Which leaves the data were computed with that a leaf meets."""

import jax
import jax.numpy as jnp
import pytest

from optax_boost._trace import _leaf_uses

NAMES = ("a", "b", "c")
PARAMS = {name: jnp.eye(4) for name in NAMES}
X = jnp.ones((3, 4))


def flow_of(loss, *args, data=(True,)):
  return _leaf_uses.follow(jax.make_jaxpr(loss)(PARAMS, *args), PARAMS, data)


def named(sets):
  """For each leaf the names of leaves, in one word."""
  return ["".join(NAMES[leaf] for leaf in sorted(leaves)) for leaves in sets]


def chain(params, x):
  for name in "cab":
    x = jnp.tanh(x @ params[name])
  return jnp.mean(x)


def diamond(params, x):
  return jnp.mean((x @ params["a"] + x @ params["b"]) @ params["c"])


def twice(params, x):
  for name in "abab":
    x = jnp.tanh(x @ params[name])
  return jnp.mean(x @ params["c"])


def looped(params, x):
  def step(x, _):
    return jnp.tanh(x @ params["a"]) @ params["b"], None

  return jnp.mean(jax.lax.scan(step, x, length=2)[0] @ params["c"])


def in_cond(params, x):
  def branch(name):
    return lambda x: jnp.tanh(x @ params[name])

  return jnp.mean(jax.lax.cond(x[0, 0] > 0, branch("a"), branch("b"), x) @ params["c"])


def penalized(params, x):
  return chain(params, x) + sum(jnp.sum(p**2) for p in params.values())


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
  ("loss", "first", "ever"),
  [
    (chain, ["c", "ac", ""], ["c", "ac", ""]),
    (penalized, ["c", "ac", ""], ["c", "ac", ""]),
    (diamond, ["", "", "ab"], ["", "", "ab"]),
    (twice, ["", "a", "ab"], ["ab", "ab", "ab"]),
    (looped, ["", "a", "ab"], ["ab", "ab", "ab"]),
    (in_cond, ["", "", "ab"], ["", "", "ab"]),
  ],
)
def test_the_leaves_upstream_of_each_use(loss, first, ever, wrap):
  flow = flow_of(wrap(loss), X)
  assert named(flow.upstream) == first
  assert named(flow.ever_upstream) == ever
  assert named(flow.recurrent) == (["ab"] if loss is looped else [])


def test_a_sum_over_experts_is_not_a_recurrence():
  def loss(params, x):
    def add(total, _):
      return total + jnp.tanh(x @ params["a"]) @ params["b"], None

    return jnp.mean(jax.lax.scan(add, jnp.zeros_like(x), length=2)[0] @ params["c"])

  flow = flow_of(loss, X)
  assert named(flow.ever_upstream) == ["", "a", "ab"]
  assert flow.recurrent == []


@pytest.mark.parametrize(
  ("loss", "args", "data"),
  [
    (lambda p: chain(p, X), (), ()),
    (lambda p, tau: chain(p, X) / tau, (2.0,), (True,)),
    (lambda p, state, x: chain(p, x), (jnp.ones(3), X), (None, True)),
    (lambda p, key: chain(p, jax.random.normal(key, X.shape)), (jax.random.key(0),), (True,)),
  ],
  ids=["constants", "scalar", "state", "noise"],
)
def test_constants_and_noise_are_data_if_there_are_no_others(loss, args, data):
  assert named(flow_of(loss, *args, data=data).upstream) == ["c", "ac", ""]


def refined(params, x):
  """Samples by what a first pass of the same model returns, as mip-NeRF; no gradient flows back."""
  x = jnp.concatenate([x, jax.lax.stop_gradient(chain(params, x))[None, None] * x])
  return chain(params, x)


def conditioned_on_itself(params, x):
  first = jax.lax.stop_gradient(jnp.tanh(x @ params["a"]) @ params["b"])
  return jnp.mean(jnp.tanh((x + first) @ params["a"]) @ params["b"] @ params["c"])


@pytest.mark.parametrize(
  ("loss", "ever"), [(refined, ["c", "ac", ""]), (conditioned_on_itself, ["", "a", "ab"])]
)
def test_a_detached_pass_is_data_and_makes_no_recurrence(loss, ever):
  flow = flow_of(loss, X)
  assert named(flow.ever_upstream) == named(flow.upstream) == ever
  assert flow.recurrent == []
