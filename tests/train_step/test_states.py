"""States of other params are refused; states of abstract params are described."""

from flax import linen as nn, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost
from optax_boost._foundation import _placement
import optax_boost.linen
import optax_boost.nnx
from tests import compilations, meshes

X = jnp.ones((3, 4))


def loss_fn(params, x):
  return jnp.mean((x @ params["kernel"] + params["bias"]) ** 2)


def params_of(outputs, dtype=jnp.float32):
  return {"kernel": jnp.ones((4, outputs), dtype), "bias": jnp.zeros(outputs, dtype)}


def subspace_of(params):
  basis = jax.tree.map(lambda p: jnp.zeros((3, *p.shape)), params)
  return optax_boost.Subspace(params, basis, jnp.ones(3), jnp.ones(3))


# Optimizers with arrays of the params' shapes, and the path of the first in the state.
OPTIMIZERS = {
  "momentum": lambda: optax.sgd(0.1, momentum=0.9),
  "adam": lambda: optax.adam(0.1),
  "adamw in a chain": lambda: optax.chain(optax.clip(1.0), optax.adamw(0.1)),
  "masked": lambda: optax.masked(optax.adam(0.1), {"bias": True, "kernel": True}),
  "a part": lambda: optax.masked(optax.adam(0.1), {"bias": False, "kernel": True}),
  "injected": lambda: optax.inject_hyperparams(optax.adam)(0.1),
  "accumulate": lambda: optax_boost.accumulate(optax.sgd(0.1), 2),
  "average": lambda: optax_boost.average_params(optax.sgd(0.1), decay=0.9),
  "lbfgs": lambda: optax.scale_by_lbfgs(memory_size=2),
  "trajectory": lambda: optax.chain(optax_boost.record_trajectory(2, 3), optax.sgd(0.1)),
  "subspace": lambda: optax_boost.dim_reduce(subspace_of),
  "centered": lambda: optax.chain(optax_boost.centralize(layout="flax"), optax.adam(0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_params_that_broadcast_is_refused_with_the_name_of_a_leaf(name):
  step = optax_boost.make_train_step(loss_fn, OPTIMIZERS[name]())
  other, right = step.init(params_of(1)), step.init(params_of(2))
  wrong = right._replace(opt_state=other.opt_state)
  with pytest.raises(
    ValueError, match=r"its leaf '.*(kernel|bias)' must have .*2,?\).* got .*1,?\)"
  ):
    step(wrong, X)
  # Nothing was donated.
  step(right, X)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_restored_from_other_params_is_refused(name):
  step = optax_boost.make_train_step(loss_fn, OPTIMIZERS[name]())
  saved = jax.tree.map(np.asarray, step.init(params_of(1)).opt_state)
  with pytest.raises(ValueError, match="restore a checkpoint into the structure of what"):
    step(step.init(params_of(2))._replace(opt_state=saved), X)


def test_a_state_of_another_structure_is_refused_with_the_name_of_a_leaf():
  step = optax_boost.make_train_step(loss_fn, optax.adam(0.1))
  state = step.init(params_of(2))
  without = optax.adam(0.1).init({"kernel": state.params["kernel"]})
  with pytest.raises(ValueError, match=r"it lacks the leaf '0/mu/bias'"):
    step(state._replace(opt_state=without), X)


def test_a_state_of_other_kinds_of_numbers_is_refused_and_another_precision_is_not():
  step = optax_boost.make_train_step(loss_fn, optax.sgd(0.1, momentum=0.9), donate=False)
  state = step.init(params_of(2))
  complex_state = optax.sgd(0.1, momentum=0.9).init(params_of(2, jnp.complex64))
  with pytest.raises(ValueError, match=r"dtype float32; got .*complex64"):
    step(state._replace(opt_state=complex_state), X)
  half = optax.sgd(0.1, momentum=0.9).init(params_of(2, jnp.bfloat16))
  step(state._replace(opt_state=half), X)


def test_a_state_that_grows_in_the_first_update_is_accepted():
  """An `init` of zeros without the params' shapes is common in code of one's own."""

  def update(updates, state, params=None):
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state, updates)
    return mean, mean

  tx = optax.GradientTransformation(lambda p: jax.tree.map(lambda x: jnp.zeros([]), p), update)
  step = optax_boost.make_train_step(loss_fn, tx, donate=False)
  state = step.init(params_of(2))
  for _ in range(3):
    state, _ = step(state, X)


def test_an_init_that_needs_values_is_not_asked_for_types():
  tx = optax.adam(0.1)
  needs_values = optax.GradientTransformation(
    lambda p: tx.init(p) if float(jnp.sum(p["bias"])) == 0 else None, tx.update
  )
  step = optax_boost.make_train_step(loss_fn, needs_values)
  state = step.init(params_of(2))
  for _ in range(2):
    state, _ = step(state, X)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_an_nnx_optimizer_of_a_model_that_broadcasts_is_refused(name):
  tx = {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1, momentum=0.9)}[name]
  small, large = (nnx.Linear(4, n, rngs=nnx.Rngs(0)) for n in (1, 2))
  optimizer = nnx.Optimizer(small, tx, wrt=nnx.Param)
  step = optax_boost.nnx.make_train_step(lambda model, x: jnp.mean(model(x) ** 2))
  with pytest.raises(
    ValueError, match=r"The optimizer state must be the one .*'.*(bias|kernel)' must have"
  ):
    step(large, optimizer, X)
  step(small, optimizer, X)
  # Known to the step, too.
  with pytest.raises(ValueError, match=r"The optimizer state must be the one"):
    step(large, optimizer, X)


def test_a_linen_state_of_a_module_that_broadcasts_is_refused():
  states, steps = [], []
  for outputs in (1, 2):
    module = nn.Dense(outputs)
    loss, params, model_state = optax_boost.linen.split_loss(
      lambda model, x: jnp.mean(model(x) ** 2), module, module.init(jax.random.key(0), X)
    )
    steps.append(optax_boost.make_train_step(loss, optax.adam(0.1)))
    states.append(steps[-1].init(params, model_state))
  with pytest.raises(ValueError, match=r"its leaf '0/mu/bias' must have the shape \(2,\)"):
    steps[1](states[1]._replace(opt_state=states[0].opt_state), X)


def test_the_check_costs_later_steps_nothing():
  inits = []

  def init(params):
    inits.append(None)
    return optax.adam(0.1).init(params)

  step = optax_boost.make_train_step(loss_fn, optax.adam(0.1)._replace(init=init))
  state = step.init(params_of(2))
  watched = compilations.Watched(step)
  for _ in range(3):
    state, _ = watched(state, X)
  assert watched.compiled_once()
  assert len(inits) == 2, "the check belongs to tracing"


def test_copies_of_an_initial_state_compile_no_program():
  tx = optax_boost.master_weights(optax.sgd(0.1))
  tx = optax_boost.average_params(optax_boost.dynamic_loss_scale(tx), decay=0.9)
  step = optax_boost.make_train_step(lambda params, batch: jnp.float32(0.0), tx)
  step.init({"w": np.ones(3, np.float32)})
  params = [jnp.asarray(np.ones((7, n), np.float32)) for n in range(31, 36)]
  state, compiled = compilations.counted(lambda: step.init(params))
  assert compiled == 0
  copies = jax.tree.leaves((state.params, state.opt_state.precision, state.opt_state.averaging))
  pointers = {x.unsafe_buffer_pointer() for x in [*params, *copies] if x.shape[:1] == (7,)}
  assert len(pointers) == 4 * len(params)


@pytest.mark.parametrize("spec", [None, (), ("x",)], ids=["one device", "replicated", "sharded"])
def test_a_copy_of_an_array_or_a_key_has_memory_of_its_own(spec):
  keys, kept = jax.random.split(jax.random.key(0), 8), jnp.arange(8.0)
  if spec is not None:
    mesh = meshes.mesh((8,), ("x",))
    keys, kept = jax.device_put((keys, kept), jax.NamedSharding(mesh, jax.P(*spec)))
  for x in (keys, kept):
    copy = _placement.copy(x)
    assert (copy.sharding, copy.committed) == (x.sharding, x.committed)
    x, copy = (jax.random.key_data(a) if a.dtype == keys.dtype else a for a in (x, copy))
    parts = [s.data.unsafe_buffer_pointer() for a in (x, copy) for s in a.addressable_shards]
    assert len(set(parts)) == len(parts)
    np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_abstract_params_give_an_abstract_state(name):
  step = optax_boost.make_train_step(loss_fn, OPTIMIZERS[name]())
  params = params_of(2)
  concrete = step.init(params)
  for abstract in (
    step.init(jax.eval_shape(lambda: params)),
    jax.eval_shape(step.init, params),
    step.init({**params, "bias": jax.ShapeDtypeStruct((2,), jnp.float32)}),
  ):
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    types = [[(x.shape, x.dtype) for x in jax.tree.leaves(s)] for s in (abstract, concrete)]
    assert types[0] == types[1]
  # A step lowered for it serves the concrete state.
  assert "stablehlo" in step.lower(step.init(jax.eval_shape(lambda: params)), X).as_text()


def test_an_abstract_state_with_statistics_keeps_them():
  step = optax_boost.make_train_step(
    lambda p, s, x: (loss_fn(p, x), s), optax.adam(0.1), has_model_state=True
  )
  abstract = step.init(jax.eval_shape(lambda: params_of(2)), {"mean": jnp.ones(3)})
  assert abstract.model_state["mean"].shape == (3,)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
  "name", ["momentum", "adam", "adamw in a chain", "accumulate", "lbfgs", "trajectory", "subspace"]
)
def test_an_abstract_state_has_the_shardings_of_the_concrete_one(name, kind):
  mesh = meshes.mesh((2, 4), ("data", "model"), kind)
  specs = {"kernel": jax.P("model", "data"), "bias": jax.P("data")}
  params = {
    key: jax.device_put(x, jax.sharding.NamedSharding(mesh, specs[key]))
    for key, x in params_of(2).items()
  }
  step = optax_boost.make_train_step(loss_fn, OPTIMIZERS[name]())
  abstract = step.init(
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
  )
  concrete = step.init(params)
  for (path, x), y in zip(
    jax.tree.leaves_with_path(abstract), jax.tree.leaves(concrete), strict=True
  ):
    assert x.sharding.is_equivalent_to(y.sharding, x.ndim), path


def test_a_checkpoint_is_restored_into_an_abstract_state(tmp_path):
  step = optax_boost.make_train_step(loss_fn, optax.adam(0.1))
  state, _ = step(step.init(params_of(2)), X)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
  with ocp.StandardCheckpointer() as checkpointer:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = step.init(
      jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), params_of(2))
    )
    restored = checkpointer.restore(tmp_path / "state", abstract)
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  step(restored, X)
