"""SGPerm against the recorded runs, and against the published search in plain Python."""

import functools
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost._methods._sgperm import _device_search, _execution, _host_search
from optax_boost._trace import _jaxpr
from tests import layer_losses, meshes
from tests.sgperm import oracle as oracle

every_trace = pytest.mark.parametrize("name", oracle.NAMES)
FLOAT64 = ("sgperm_all_f64", "sgperm_slots_f64")


def same_bits(found, expected):
  found, expected = np.ascontiguousarray(found), np.ascontiguousarray(expected)
  assert found.dtype == expected.dtype
  np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def brackets(alpha, n, dtype):
  return (alpha + 1 / np.maximum(np.arange(n + 1), 1)).astype(dtype)


def trace_steps(name):
  """Each step of each variable: weights, recommendations, partition, and weights after."""
  arrays, meta = oracle.load(name)
  hyper = meta["hyper"]
  for t in range(meta["steps"]):
    for v in range(meta["variables"]):
      w = arrays[f"w{v}"]
      weights, n = oracle.vectors(w[t]), oracle.vectors(w[t]).shape[1]
      size = oracle.subset_size(arrays["lamda"][t], n, hyper["partition_size_min"])
      order = oracle.recorded_order(arrays, t, v, w[t].shape)
      wishes = oracle.vectors(arrays[f"m{v}"][t])
      ranges, after = arrays[f"range{v}"], oracle.vectors(w[t + 1])
      remainder = hyper["include_partition_remainder"]
      yield weights, wishes, order, size, ranges, arrays["alpha"][t], remainder, after


@every_trace
def test_the_oracle_is_the_published_algorithm(name):
  for *given, after in trace_steps(name):
    same_bits(np.take_along_axis(given[0], oracle.permute(*given), 1), after)


@pytest.fixture(params=["python", "numba"])
def compiler(request, monkeypatch):
  """Runs the host's search without and with its compiler."""
  if request.param == "numba":
    pytest.importorskip("numba")
  monkeypatch.setattr(_host_search, "have_numba", lambda: request.param == "numba")


def on_host(weights, wishes, order, size, ranges, alpha, remainder):
  fractions = brackets(alpha, weights.shape[1], weights.dtype)
  work = _host_search.Work(weights.T, wishes.T, order.T, size, fractions)
  return _host_search.permute(work, remainder=remainder).T


@every_trace
def test_host_kernel_repeats_every_trace(name, compiler):
  for weights, wishes, order, size, ranges, alpha, remainder, after in trace_steps(name):
    source = on_host(weights, wishes, order, size, ranges, alpha, remainder)
    same_bits(np.take_along_axis(weights, source, 1), after)


def random_case(seed, tied, n=None, remainder=None):
  """Small weight vectors, with many ties if wanted, and all that a step needs."""
  rng = np.random.default_rng(seed)
  rows, n = 4, n or int(rng.integers(2, 33))
  if tied:
    weights = rng.integers(-6, 7, (rows, n)) / 16
    wishes = rng.integers(-4, 5, (rows, n))
  else:
    weights, wishes = rng.normal(size=(2, rows, n))
  weights, wishes = weights.astype(np.float32), wishes.astype(np.float32)
  size = int(rng.integers(2, n + 2))
  order = np.stack([rng.permutation(n) for _ in range(rows)]).astype(np.int32)
  alpha = float(rng.choice([0.0, 0.03, 0.125, 0.25, 1.0]))
  remainder = bool(rng.integers(2)) if remainder is None else remainder
  return weights, wishes, order, size, np.ptp(weights, axis=1), alpha, remainder


@pytest.mark.parametrize("tied", [False, True])
def test_host_kernel_equals_the_published_search_on_random_vectors(tied, compiler):
  for seed in range(200):
    given = random_case(seed, tied)
    np.testing.assert_array_equal(on_host(*given), oracle.permute(*given))


def hyperparams(hyper):
  names = {"alpha0": "alpha", "lamda0": "lamda"}
  return {names.get(name, name): value for name, value in hyper.items()}


def replayed(name, **changes):
  """Runs the transformation over a trace's gradients; its weights after each step."""
  arrays, meta = oracle.load(name)
  tx = optax_boost.sgperm(**hyperparams(meta["hyper"]) | {"key": 0} | changes)
  variables = range(meta["variables"])
  feed = "m" if changes.get("momentum") == 0.0 else "g"
  params = [jnp.asarray(arrays[f"w{v}"][0]) for v in variables]
  state, step = tx.init(params), jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  for t in range(meta["steps"]):
    shapes = [p.shape for p in params]
    orders = [
      oracle.recorded_order(arrays, t, v, s).T for v, s in zip(variables, shapes, strict=True)
    ]
    grads = [jnp.asarray(arrays[f"{feed}{v}"][t]) for v in variables]
    params, state = step(grads, state, params, partitions=orders)
    for v in variables:
      same_bits(params[v], arrays[f"w{v}"][t + 1])
    np.testing.assert_allclose(state.alpha, arrays["alpha"][t], rtol=1e-6)
    np.testing.assert_allclose(state.lamda, arrays["lamda"][t], rtol=1e-6)
  return state


# The transformation, given recorded recommendations: with these numbers its momentum is they.
RECOMMENDED = {"momentum": 0.0, "momentum_lr": 1.0}
VARIED = ("model", "bounds", "part_noremainder", "ties_weights_part", "zeros_part")


@pytest.mark.optimized
@pytest.mark.parametrize("name", VARIED)
def test_transformation_repeats_the_recorded_runs(name):
  replayed(f"sgperm_{name}", backend="host", **RECOMMENDED)


@pytest.mark.parametrize("name", FLOAT64)
def test_transformation_repeats_the_float64_runs(name, x64):
  replayed(name, backend="host", **RECOMMENDED)


def test_whole_optimizer_repeats_the_run_without_roundings():
  replayed("sgperm_dyadic", backend="host")


@pytest.mark.optimized
# Their recommendations differ by at least 40 ulps of their terms: no rounding changes the order.
@pytest.mark.parametrize(
  "name",
  [
    "sgperm_bounds",
    *(pytest.param(f"sgperm_full_{leaf}", marks=pytest.mark.slow) for leaf in ("conv", "bias")),
  ],
)
def test_the_program_of_the_migration_page_repeats_runs_that_draw_nothing(name):
  text = (oracle.GOLDEN.parents[1] / "docs" / "migrating" / "sgperm.md").read_text(encoding="utf-8")
  program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
  assert program.count("\n") <= 40
  exec(compile(program, "sgperm.md", "exec"), page := {})
  arrays, meta = oracle.load(name)
  arguments = hyperparams(meta["hyper"])
  _, history = page["fit"](
    lambda w, g: jnp.sum(w * g), np.array, jnp.asarray(arrays["w0"][0]), arrays["g0"], **arguments
  )
  same_bits(np.stack(history), arrays["w0"])


@functools.partial(jax.jit, static_argnames=("sizes", "remainder"))
def device_step(weights, wishes, order, size, fractions, *, sizes, remainder):
  work = _host_search.Work(weights, wishes, order, size, fractions)
  return _device_search.permute(work, sizes=sizes, remainder=remainder)


def on_device(weights, wishes, order, size, ranges, alpha, remainder):
  n = weights.shape[1]
  given = (weights.T, wishes.T, order.T, np.int32(size), brackets(alpha, n, weights.dtype))
  return np.asarray(device_step(*given, sizes=(min(n, 2), n), remainder=remainder)).T


# Only these have vectors of these lengths: three programs.
OF_OTHER_LENGTHS = ("sgperm_bounds", "sgperm_model")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow) if name in OF_OTHER_LENGTHS else name
    for name in oracle.NAMES
    if name not in FLOAT64
  ],
)
def test_device_kernel_repeats_every_float32_trace(name):
  for *given, after in trace_steps(name):
    same_bits(np.take_along_axis(given[0], on_device(*given), 1), after)


@pytest.mark.optimized
@pytest.mark.parametrize("name", FLOAT64)
def test_device_kernel_repeats_the_float64_traces(name, x64):
  for *given, after in trace_steps(name):
    same_bits(np.take_along_axis(given[0], on_device(*given), 1), after)


@pytest.mark.parametrize("tied", [False, True])
def test_device_kernel_equals_the_published_search_on_random_vectors(tied):
  for seed in range(40):
    given = random_case(seed, tied, n=24, remainder=True)
    np.testing.assert_array_equal(on_device(*given), oracle.permute(*given))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_both_kernels_agree_in_half_precision_with_many_tied_weights(dtype):
  for seed in range(10):
    weights, wishes, order, size, _, alpha, _ = random_case(seed, False, n=24, remainder=True)
    weights = np.asarray(jnp.asarray(weights, dtype))
    ranges = np.max(weights, 1) - np.min(weights, 1)
    given = (weights, wishes, order, size, ranges, alpha, True)
    np.testing.assert_array_equal(on_device(*given), on_host(*given))


@pytest.mark.parametrize(("lamda", "beta2"), [(0.1, 1.3), (1.0, 0.9), (0.5, 0.9), (1.0, 1.0)])
def test_traced_schedules_follow_the_recurrences(lamda, beta2):
  names = ("alpha", "lamda", "beta1", "beta2", "alpha_min", "lamda_max")
  known = dict(zip(names, (0.2, lamda, 0.9, beta2, 0.01, 0.5), strict=True))
  x = jnp.arange(3.0)
  for count in (0, 1, 5, 100):
    found = []
    for numbers in (known, {name: jnp.float32(value) for name, value in known.items()}):
      tx = optax_boost.sgperm(**numbers, method="rank")
      _, state = tx.update(x, tx.init(x)._replace(count=jnp.int32(count)), x)
      found.append((state.alpha, state.lamda))
    np.testing.assert_allclose(*found, rtol=2e-5)


def problem():
  """A kernel and a bias, and gradients that keep changing their minds."""
  rng = np.random.default_rng(1)
  params = {"kernel": rng.normal(size=(12, 3)), "bias": rng.normal(size=12)}
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  waves = {name: 1.7 * np.arange(p.size, dtype=np.float32) for name, p in params.items()}

  def grads(t):
    return {name: jnp.sin(x + 0.3 * t).reshape(params[name].shape) for name, x in waves.items()}

  return params, grads


METHODS = (
  {"backend": "host", "lamda": 0.5, "partition_size_min": 3, "key": 0},
  {"method": "pairs", "key": 0},
  {"method": "rank"},
)
LAPERM = optax_boost.laperm(optax.sgd(0.5), sync_every=2)
each_method = pytest.mark.parametrize("kwargs", METHODS, ids=["exact", "pairs", "rank"])
each_transformation = pytest.mark.parametrize(
  "tx",
  [*(optax_boost.sgperm(**kwargs) for kwargs in METHODS), LAPERM],
  ids=["exact", "pairs", "rank", "laperm"],
)
both = pytest.mark.parametrize(
  "tx", [optax_boost.sgperm(method="rank"), LAPERM], ids=["sgperm", "laperm"]
)


def test_without_apply_gradients_params_stay_within_one_rounding_of_a_permutation():
  params, grads = problem()
  tx = optax_boost.sgperm(alpha_min=0.3, method="pairs", key=0)

  @jax.jit
  def run(carry):
    def body(carry, t):
      params, state = carry
      updates, state = tx.update(grads(t), state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, carry, jnp.arange(10_000))[0]

  last, state = run((params, tx.init(params)))
  exact = optax_boost.permuted_params(state).params
  for name in params:
    slack = 2 * 2**-24 * np.abs(params[name]).max()
    np.testing.assert_allclose(last[name], exact[name], rtol=0, atol=slack)
    assert not np.array_equal(exact[name], params[name])
    np.testing.assert_array_equal(np.sort(exact[name], 0), np.sort(params[name], 0))


@pytest.mark.parametrize("length", [3_000, 70_000])
def test_pairs_of_short_and_long_vectors_come_nearer_to_their_targets(length):
  # Weight and place of the longer ones don't fit into one integer.
  start = np.random.default_rng(0).normal(size=length).astype(np.float32)
  goal = np.flip(start)
  tx = optax_boost.sgperm(alpha=1.0, method="pairs", momentum=0.0, momentum_lr=1.0, key=0)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  moved, _ = step(start - goal, tx.init(jnp.asarray(start)), start)
  same_bits(np.sort(moved), np.sort(start))
  assert np.sum((moved - goal) ** 2) < 0.5 * np.sum((start - goal) ** 2)


@pytest.mark.parametrize("kwargs", [{"method": "rank"}, {"method": "pairs", "key": 0}])
def test_a_permuted_target_is_found_up_to_swapped_neighbours(kwargs):
  start = jnp.asarray(np.random.default_rng(3).normal(size=(64, 4)), jnp.float32)
  goal = jnp.flip(start, 0)
  tx = optax_boost.sgperm(alpha=0.5, momentum=0.0, **kwargs)

  def body(carry, _):
    params, state = carry
    updates, state = tx.update(params - goal, state, params)
    return (optax.apply_updates(params, updates), state), None

  params, _ = jax.lax.scan(body, (start, tx.init(start)), length=500)[0]
  assert jnp.sum((params - goal) ** 2) < 1e-3 * jnp.sum((start - goal) ** 2)


def test_device_and_host_agree_and_nothing_is_compiled_again_while_drawn_subsets_grow(monkeypatch):
  # Several bands of sizes, as in long vectors; and two leaves that the device permutes as one.
  monkeypatch.setattr(_device_search, "_FEW_WORDS", 0)
  monkeypatch.setattr(_device_search, "_BANDS", 2)
  _device_search.permute.clear_cache()
  start, grads = problem()
  start["twin"] = jnp.cos(start["kernel"])
  options = {"lamda": 0.2, "beta2": 1.2, "lamda_max": 1.0, "partition_size_min": 2, "key": 7}
  found = []
  for backend in ("device", "host"):
    tx = optax_boost.sgperm(**options, momentum=0.5, momentum_lr=0.5, backend=backend)
    traces = []
    update = jax.jit(lambda *args, tx=tx, traces=traces: traces.append(1) or tx.update(*args))
    params, state, sizes = start, tx.init(start), set()
    for t in range(12):
      gradient = grads(t)
      gradient["twin"] = gradient["kernel"] ** 2
      updates, state = update(gradient, state, params)
      params = optax.apply_updates(params, updates)
      sizes.add(int(np.floor(12 * float(state.lamda))))
    assert len(sizes) > 5
    assert len(traces) == 1
    found.append(optax_boost.permuted_params(state).permutation)
  jax.tree.map(np.testing.assert_array_equal, *found)
  assert np.any(found[0]["bias"] != np.arange(12))


@pytest.mark.parametrize("method", ["exact", "exact, given subsets", "rank"])
def test_blocks_of_vectors_permute_a_large_leaf_like_one_call(method, monkeypatch):
  rng = np.random.default_rng(0)
  params = {"kernel": jnp.asarray(rng.normal(size=(23, 11)), jnp.float32)}
  grads = [{"kernel": jnp.asarray(rng.normal(size=(23, 11)), jnp.float32)} for _ in range(3)]
  given = {}
  if "given" in method:
    orders = rng.permuted(np.tile(np.arange(23)[:, None], (1, 11)), axis=0)
    given = {"partitions": {"kernel": jnp.asarray(orders, jnp.int32)}}
  options = {"method": method.partition(",")[0], "key": 0, "lamda": 0.4, "partition_size_min": 3}

  def permutation(backend):
    """The permutation after three steps, and whether they went block by block."""
    tx = optax_boost.sgperm(**options, backend=backend)
    state = tx.init(params)
    update = jax.jit(tx.update)
    program = str(jax.make_jaxpr(update)(grads[0], state, params, **given))
    for g in grads:
      _, state = update(g, state, params, **given)
    in_blocks = " dynamic_update_slice" in program
    return optax_boost.permuted_params(state).permutation["kernel"], in_blocks

  # The host's kernel, which agrees with the device's, takes no blocks.
  at_once, in_blocks = permutation("host")
  assert not in_blocks
  monkeypatch.setattr(jax, "device_count", lambda *_: 1)
  # Four vectors at a time; the last block is short of one.
  for weights_of_a_block in ("_WEIGHTS", "_MANY_WEIGHTS"):  # of a CPU, of other devices
    monkeypatch.setattr(_execution, weights_of_a_block, 4 * 23)
  found, in_blocks = permutation("device")
  assert in_blocks
  np.testing.assert_array_equal(found, at_once)


def test_the_same_key_draws_the_same_and_another_key_does_not():
  params, grads = problem()

  tx = optax_boost.sgperm(**METHODS[0])
  update = jax.jit(tx.update)

  def trained(key):
    # Keys are data of the state: one compiled step serves all.
    state = optax_boost.sgperm(**METHODS[0] | {"key": key}).init(params)
    for t in range(3):
      _, state = update(grads(t), state, params)
    return optax_boost.permuted_params(state).permutation["bias"].tolist()

  assert trained(1) == trained(jax.random.key(1))
  assert trained(1) != trained(2)


def layers(stacked):
  """Leaves of which some are alike, and gradients."""
  rng = np.random.default_rng(2)
  shapes = {"a": (16, 8), "b": (16, 8), "half": (16, 8), "query": (8, 8, 2), "out": (8, 2, 8)}
  tree = {name: {"kernel": rng.normal(size=shape)} for name, shape in shapes.items()}
  if stacked:
    tree["layers"] = {"kernel": rng.normal(size=(2, 16, 8)), "bias": rng.normal(size=(2, 8))}
  tree = jax.tree.map(np.float32, tree)
  tree["half"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree["half"])
  return tree, jax.tree.map(lambda x: np.sin(7 * x), tree)


FOR_LAYERS = {
  "pairs": lambda **options: optax_boost.sgperm(method="pairs", key=0, **options),
  "rank": lambda **options: optax_boost.sgperm(method="rank", **options),
  "laperm": lambda **options: optax_boost.laperm(optax.sgd(0.5), sync_every=1, **options),
}
for_layers = pytest.mark.parametrize("make", FOR_LAYERS.values(), ids=FOR_LAYERS)


@for_layers
def test_leaves_permuted_together_equal_leaves_permuted_one_by_one(make):
  tree, grads = layers(stacked=True)
  stacked = {"layers": tree["layers"]}
  described = layer_losses.described(stacked, {"kernel": (0,), "bias": (0,)})

  def step(tx, tree, grads):
    updates, state = tx.update(grads, tx.init(tree), tree)
    return updates, state.permutation

  @jax.jit
  def one_by_one(tree, grads):
    found = {}
    for name in tree:
      alone = make(layers=described if name == "layers" else None)
      found |= {name: step(alone, {name: tree[name]}, {name: grads[name]})}
    return found

  updates, permutation = jax.jit(functools.partial(step, make(layers=described)))(tree, grads)
  for name, (expected, expected_permutation) in one_by_one(tree, grads).items():
    jax.tree.map(same_bits, updates[name], expected[name])
    jax.tree.map(same_bits, permutation[name], expected_permutation[name])
    assert np.any(np.asarray(updates[name]["kernel"]))


def equations(program, names):
  """How many equations of these primitives a program has, at any depth."""
  jaxpr = getattr(program, "jaxpr", program)
  return sum(
    (equation.primitive.name in names)
    + sum(equations(part, names) for part in _jaxpr.sub_jaxprs(equation))
    for equation in jaxpr.eqns
  )


@pytest.mark.parametrize(
  "make", [*FOR_LAYERS.values(), lambda: optax_boost.sgperm(key=0, backend="device")]
)
def test_a_program_for_several_equal_leaves_has_the_loops_and_sorts_of_one(make):
  tx = make()

  def count(leaves):
    # One alone is not sorted as a small array is.
    tree = {f"{i}": jax.ShapeDtypeStruct((16, 32), jnp.float32) for i in range(leaves)}
    jaxpr = jax.make_jaxpr(tx.update)(tree, jax.eval_shape(tx.init, tree), tree)
    return equations(jaxpr, {"while", "scan", "sort"})

  assert count(5) == count(1) > 0


@pytest.mark.parametrize("axis", ["fan-in", "outputs"])
@for_layers
def test_sharded_leaves_are_exchanged_twice_along_fan_in_and_never_along_outputs(make, axis):
  mesh = meshes.mesh((8,), ("x",))
  spec = jax.sharding.PartitionSpec(*(("x",) if axis == "fan-in" else (None, "x")))
  sharding = jax.sharding.NamedSharding(mesh, spec)
  tree, grads = layers(stacked=False)
  tree, grads = ({name: x[name]["kernel"] for name in ("a", "b")} for x in (tree, grads))
  tx = make()
  expected, _ = jax.jit(tx.update)(grads, tx.init(tree), tree)
  grads, tree = jax.device_put((grads, tree), sharding)
  state = tx.init(tree)
  compiled = jax.jit(tx.update).lower(grads, state, tree).compile()
  updates, after = compiled(grads, state, tree)
  jax.tree.map(np.testing.assert_array_equal, updates, expected)
  for leaf in jax.tree.leaves((updates, after.permutation, after.permuted_params)):
    assert leaf.sharding.is_equivalent_to(sharding, 2)
  program = compiled.as_text()
  for name in ("all-gather(", "collective-permute("):
    assert name not in program
  assert program.count(" all-to-all(") == (2 if axis == "fan-in" else 0)


@pytest.mark.skipif(
  not hasattr(jax.sharding, "use_abstract_mesh"), reason="this JAX needs jax.set_mesh"
)
@pytest.mark.parametrize(
  ("tx", "jit"),
  [(optax_boost.sgperm(**METHODS[0]), True), (LAPERM, False)],
  ids=["sgperm jitted", "laperm eager"],
)
def test_params_on_an_explicit_mesh_need_no_set_mesh(tx, jit):
  mesh = meshes.mesh((2,), ("x",), "Explicit")
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  plain, gradient = problem()
  params, grads = jax.device_put((plain, gradient(0)), sharding)

  step = functools.partial(optax_boost.apply_gradients, tx)

  def trained(params, grads, step):
    state = tx.init(params)
    for _ in range(2):
      params, state = step(grads, state, params)
    return params, optax_boost.permuted_params(state).permutation

  found = trained(params, grads, jax.jit(step) if jit else step)
  expected = trained(plain, gradient(0), jax.jit(step))
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)
  again = optax_boost.PermutedParams.from_initial(params, found[1])
  for leaf in jax.tree.leaves((found, again)):
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_the_host_kernel_runs_on_eight_devices_under_load_with_donated_buffers():
  meshes.devices(8)  # the process has as many
  program = pathlib.Path(__file__).with_name("under_load.py")
  settings = {"PYTHONPATH": str(program.parents[2]), "JAX_PLATFORMS": "cpu"}
  result = subprocess.run(
    [sys.executable, str(program)],
    env=os.environ | settings,
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )
  assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
  ("path", "shape", "kwargs", "vectors"),
  [
    ("dense/kernel", (5, 3), {}, 3),
    ("dense/bias", (3,), {}, 1),
    ("conv/kernel", (3, 3, 2, 4), {}, 4),
    ("attention/query/bias", (4, 8), {}, 1),
    ("scale", (), {}, 1),
    ("attention/query/kernel", (6, 2, 3), {}, 6),
    ("attention/out/kernel", (2, 3, 6), {}, 6),
    ("layers/kernel", (4, 5, 3), {"stacked": (0,)}, 12),
    ("layers/bias", (4, 3), {"stacked": (0,)}, 4),
    ("kernel", (5, 2, 3), {"fan_in": (0,)}, 6),
    ("weight", (3, 5, 2), {"layout": "torch"}, 3),
    ("conv/bias", (3, 1, 1), {"layout": "torch"}, 1),  # Equinox's
    ("layers/bias", (4, 3, 1), {"layout": "torch", "stacked": (0,)}, 4),
  ],
)
def test_leaves_of_any_rank_are_cut_into_vectors(path, shape, kwargs, vectors):
  tree = np.zeros(shape, np.float32)
  for key in reversed(path.split("/")):
    tree = {key: tree}
  name, axes = path.rpartition("/")[2], dict(kwargs)
  layout = axes.pop("layout", "flax")
  layers = layer_losses.described(tree, *({name: axes.get(k, ())} for k in ("stacked", "fan_in")))
  tx = optax_boost.sgperm(key=0, layout=layout, layers=layers if axes else None)
  wrong = jax.tree.map(lambda _: np.zeros(0), tree)

  def step(tree):
    return tx.update(tree, tx.init(tree), tree, partitions=wrong)

  with pytest.raises(ValueError, match=rf"\({math.prod(shape) // vectors}, {vectors}\); got"):
    jax.eval_shape(step, tree)


@pytest.mark.parametrize(
  "tx", [optax_boost.sgperm(method="rank"), LAPERM], ids=["sgperm", "laperm"]
)
def test_the_bias_of_all_attention_heads_is_one_vector(tx):
  params = {"query": {"bias": np.arange(12, dtype=np.float32).reshape(3, 4) / 12}}
  grads = {"query": {"bias": 4 * np.cos(9 * np.asarray(params["query"]["bias"]))}}
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  state, trained = tx.init(params), params
  for _ in range(2):
    trained, state = step(grads, state, trained)
  source = optax_boost.permuted_params(state).permutation["query"]["bias"]
  np.testing.assert_array_equal(np.sort(source, None), np.arange(12))
  assert np.any(np.asarray(source) % 4 != np.arange(4)), "each head feature was permuted by itself"


@each_method
def test_zero_ranges_and_single_weights_never_move(kwargs):
  params = {"zero": np.zeros(6), "one": np.ones((1, 4)), "scalar": np.array(2)}
  params = jax.tree.map(np.float32, params)
  tx = optax_boost.sgperm(**kwargs)
  grads = {
    name: np.cos(np.arange(p.size, dtype=np.float32)).reshape(p.shape) for name, p in params.items()
  }
  bad = jax.tree.map(lambda g: np.where(g > 0.5, np.float32(np.nan), g), grads)
  assert np.isnan(bad["scalar"])
  update, state = jax.jit(tx.update), tx.init(params)
  for gradient in (grads, bad, grads):
    updates, state = update(gradient, state, params)
    assert not any(np.any(u != 0) for u in jax.tree.leaves(jax.device_get(updates)))


@each_transformation
def test_initial_weights_that_are_not_finite_are_refused_or_if_traced_not_lost(tx):
  params, grads = problem()
  for bad in (jnp.nan, -jnp.inf):
    params["kernel"] = params["kernel"].at[2:5, 1].set(bad)
    with pytest.raises(
      ValueError, match=r"finite initial weights.*; got a NaN or .* the leaf 'kernel'"
    ):
      tx.init(params)
  state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
  for t in range(2):
    _, state = update(grads(t), state, params)
  found = optax_boost.permuted_params(state).permutation["kernel"]
  np.testing.assert_array_equal(np.sort(found, 0), np.arange(36).reshape(12, 3))


def test_a_bad_gradient_entry_leaves_its_recommendation_and_is_counted():
  params, grads = problem()
  tx = optax_boost.sgperm(method="rank")
  update = jax.jit(tx.update)
  _, state = update(grads(0), tx.init(params), params)
  bad = grads(1)
  bad["bias"] = bad["bias"].at[2].set(jnp.nan)
  _, after = update(bad, state, params)
  assert after.momentum["bias"][2] == state.momentum["bias"][2]
  assert after.momentum["bias"][3] != state.momentum["bias"][3]
  assert after.notfinite_count == 1


@pytest.mark.parametrize("kind", ["masked", "partition"])
def test_a_prefix_of_the_tree_can_mask_leaves_out(kind):
  leaves, grads = problem()
  params, gradient = ({"conv": x, "dense": x} for x in (leaves, grads(0)))
  tx = optax_boost.sgperm(method="rank")
  if kind == "masked":
    tx = optax.masked(tx, {"conv": True, "dense": False})
  else:
    labels = {"conv": "permuted", "dense": "free"}
    tx = optax.partition({"permuted": tx, "free": optax.sgd(0.125)}, labels)
  updates, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
  step = jax.jit(functools.partial(optax_boost.apply_gradients, tx))
  last, state = step(gradient, tx.init(params), params)
  integers = optax_boost.permuted_params(state).permutation
  assert integers["dense"] == optax.MaskedNode()
  restored = optax_boost.PermutedParams.from_initial(params, integers).params
  exact = optax_boost.permuted_params(state, params).params
  expected = last["conv"]
  assert np.any(expected["kernel"] != leaves["kernel"])
  for found, free in ((restored, leaves), (exact, leaves), (last, last["dense"])):
    jax.tree.map(same_bits, found, {"conv": expected, "dense": free})
  jax.tree.map(same_bits, last["dense"], optax.apply_updates(params, updates)["dense"])
  with pytest.raises(ValueError, match=r"`params` must have the structure that was permuted"):
    optax_boost.permuted_params(state, {"conv": {"bias": leaves["bias"]}, "dense": leaves})


@both
def test_the_state_of_a_population_is_mapped_over_or_refused(tx):
  params = {"bias": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)}
  step = jax.jit(jax.vmap(functools.partial(optax_boost.apply_gradients, tx)))
  _, state = step(jax.tree.map(np.sin, params), jax.jit(jax.vmap(tx.init))(params), params)
  with pytest.raises(ValueError, match=r"needs the state of one run; .*`jax\.vmap`"):
    optax_boost.permuted_params(state)
  model = jax.jit(jax.vmap(optax_boost.permuted_params))(state)
  again = jax.jit(jax.vmap(optax_boost.PermutedParams.from_initial))(params, model.permutation)
  same_bits(again.params["bias"], model.params["bias"])
  same_bits(np.sort(model.params["bias"]), np.sort(params["bias"]))


@both
def test_refuses_leaves_that_are_complex_or_python_numbers_and_states_of_others(tx):
  with pytest.raises(TypeError, match=r"the leaf 'a' is complex64"):
    tx.init({"a": jnp.ones(2, jnp.complex64)})
  with pytest.raises(TypeError, match=r"needs arrays as leaves; the leaf 'a' is 1.0 of type float"):
    tx.init({"a": 1.0})
  params = {"a": jnp.arange(3.0)}
  with pytest.raises(
    TypeError, match=r"the state that its own `init` made, a \w+State; got a Trace"
  ):
    tx.update(params, optax.trace(0.9).init(params), params)
  other = {"a": jnp.arange(4.0)}
  message = r"this transformation's `init` made of these params; .* the shape \(4,\) .*; got \(3,\)"
  with pytest.raises(ValueError, match=message):
    optax_boost.apply_gradients(tx, other, tx.init(params), other)


def test_refuses_partitions_of_another_shape():
  params, grads = problem()
  tx = optax_boost.sgperm(key=0)
  state = tx.init(params)
  with pytest.raises(ValueError, match=r"`partitions` must have the tree structure"):
    tx.update(grads(0), state, params, partitions={"bias": jnp.arange(12)})
  orders = {"bias": jnp.arange(12), "kernel": jnp.zeros((12, 3), jnp.int32)}
  with pytest.raises(ValueError, match=r"for the leaf 'bias' \(12, 1\); got int32 of shape"):
    tx.update(grads(0), state, params, partitions=orders)
  orders["bias"] = jnp.zeros((12, 1), jnp.int32)
  with pytest.raises(
    ValueError, match=r"`partitions` must hold each index from 0 to 11 of the leaf 'bias' once"
  ):
    tx.update(grads(0), state, params, partitions=orders)
