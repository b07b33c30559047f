"""`cache_prefix`: losses and gradients as without it, nothing computed twice or kept wrongly."""

import errno
import os
import subprocess
import sys

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import _files
from optax_boost._cached_prefix import _rows

N, B, D, L = 8, 4, 3, 4
GROUPS = ("embed", "blocks_0", ".")


def normal(*shape):
  return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def model():
  return {"embed": normal(7, D), "blocks_0": normal(D, D), "head": normal(D, 2)}


def data():
  rng = np.random.default_rng(0)
  return {
    "tokens": jnp.asarray(rng.integers(0, 7, (N, 5))),
    "labels": jnp.asarray(rng.integers(0, 2, N)),
  }


def loss(params, batch):
  x = jax.jit(lambda e, t: e[t])(params["embed"], batch["tokens"]).mean(1)
  x = jnp.tanh(x @ params["blocks_0"])
  logits = jnp.tanh(x @ params["head"]) + params["embed"].sum()  # tied
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def scanned():
  return {"embed": normal(7, D), "blocks": 0.5 * normal(L, D, D), "head": normal(D, 2)}


def scanned_loss(params, batch):
  @jax.checkpoint
  def body(x, kernel):
    return jnp.tanh(x @ kernel), None

  x, _ = jax.lax.scan(body, params["embed"][batch["tokens"]], params["blocks"])
  logits = x.mean(1) @ params["head"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def take(indices):
  return jax.tree.map(lambda x: x[jnp.asarray(indices)], data())


def make(loss_fn=loss, params=None, frozen=2, groups=GROUPS, **options):
  options = {"num_examples": N, "max_bytes": 2**20} | options
  params = model() if params is None else params
  return optax_boost.cache_prefix(loss_fn, params, take(range(B)), groups, frozen, **options)


def scanned_groups():
  return optax_boost.layer_groups(scanned_loss, scanned(), take(range(B)), num_groups=3)


def checkpointed(params, batch):
  return jax.checkpoint(jax.checkpoint(loss))(params, batch)


def checkpointed_scan(params, batch):
  return jax.checkpoint(scanned_loss)(params, batch)


@pytest.mark.parametrize("loss_fn", [loss, scanned_loss, checkpointed, checkpointed_scan])
def test_loss_and_gradients_are_those_of_the_whole_loss(loss_fn):
  if loss_fn in (loss, checkpointed):
    params, cache = model(), make(loss_fn)
  else:
    params = scanned()
    cache = make(loss_fn, params, groups=scanned_groups())
  batch = take([3, 1, 0, 6])
  for _ in range(2):  # computed, then read
    given = cache(params, [3, 1, 0, 6], batch)
    ours, gradient = jax.value_and_grad(cache.loss_fn)(params, given)
    value, expected = jax.value_and_grad(loss_fn)(params, batch)
    np.testing.assert_allclose(ours, value, rtol=1e-6)
    np.testing.assert_allclose(gradient["head"], expected["head"], rtol=1e-5, atol=1e-7)
    assert not np.any(gradient["embed"])
  if "blocks" in params:
    own = np.asarray(gradient["blocks"])
    first = int(np.argmax(np.any(own, axis=(1, 2))))
    assert 0 < first < L
    np.testing.assert_allclose(own[first:], expected["blocks"][first:], rtol=1e-5, atol=1e-7)
  else:
    assert not np.any(gradient["blocks_0"])


def test_an_nnx_model_takes_part_by_its_params():
  """As the card says."""
  rngs = nnx.Rngs(0)
  body, head = nnx.Linear(D, D, rngs=rngs), nnx.Linear(D, 1, rngs=rngs)
  graphdef, params = nnx.split(nnx.Sequential(body, jnp.tanh, head))

  def loss_fn(params, x):
    return jnp.mean(nnx.merge(graphdef, params)(x) ** 2)

  x = normal(B, D)
  groups = optax_boost.layer_groups(loss_fn, params, x, num_groups=2)
  cache = optax_boost.cache_prefix(loss_fn, params, x, groups, 1, num_examples=B, max_bytes=2**20)
  expected, whole = jax.value_and_grad(loss_fn)(params, x)
  for _ in range(2):  # computed, then read
    given = cache(params, range(B), x)
    ours, gradient = jax.value_and_grad(cache.loss_fn)(params, given)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    gradient, whole_gradient = gradient["layers"], whole["layers"]
    chex.assert_trees_all_close(gradient[2], whole_gradient[2], rtol=1e-5)
    assert not any(map(np.any, jax.tree.leaves(gradient[0])))
  assert cache.num_cached == B


def test_a_new_cache_is_of_the_loss_as_it_is_now():
  """As in a notebook, where a function that the loss calls is defined anew."""
  factor = [1.0]

  def loss_fn(params, batch):
    return factor[0] * loss(params, batch)

  params, batch = model(), take(range(B))
  for factor[0] in (1.0, 2.0):
    cache = make(loss_fn)
    ours = cache.loss_fn(params, cache(params, range(B), batch))
    np.testing.assert_allclose(ours, factor[0] * loss(params, batch), rtol=1e-6)


def products(function, *arguments):
  """How many matrix products a program holds once unused ones are dropped."""
  text = jax.jit(function).lower(*arguments).compile().as_text()
  return text.count(" dot(") + text.count("__onednn$matmul")


def test_the_prefix_is_not_computed_for_what_is_cached():
  params, cache = model(), make()
  given = cache(params, range(B), take(range(B)))
  assert products(loss, params, given[0]) == 2
  assert products(cache.loss_fn, params, given) == 1
  # Read, the activations need no params at all.
  nowhere = jax.tree.map(lambda x: x * jnp.nan, params)
  chex.assert_trees_all_equal(cache(nowhere, range(B), given[0])[1], given[1])


@pytest.mark.parametrize("move", ["constraint", "barrier"])
def test_a_scan_over_layers_that_are_moved_before_is_cut(move):
  sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",)), jax.sharding.PartitionSpec())

  def moved(params, batch):
    if move == "constraint":
      return scanned_loss(jax.lax.with_sharding_constraint(params, sharding), batch)
    return scanned_loss(jax.lax.optimization_barrier(params), batch)

  lengths = []
  for loss_fn in (scanned_loss, moved):
    cache = make(loss_fn, scanned(), groups=scanned_groups())
    batch = cache(scanned(), range(B), take(range(B)))
    program = jax.make_jaxpr(cache.loss_fn)(scanned(), batch)
    lengths.append([e.params["length"] for e in program.eqns if e.primitive.name == "scan"])
  assert lengths[0] == lengths[1] != [L]


def test_what_is_trained_stays_checkpointed():
  cache = make(checkpointed)
  batch = cache(model(), [3, 1, 0, 6], take([3, 1, 0, 6]))
  program = jax.make_jaxpr(cache.loss_fn)(model(), batch)
  inner = [e.params["jaxpr"] for e in program.eqns if "policy" in e.params]
  assert "dot_general" in str(inner)


def test_training_with_the_cache_equals_training_without_it():
  tx = optax_boost.freeze_layers(optax.adamw(0.05), GROUPS, optax_boost.fixed_freezing(3, 2))
  cache = make()
  plain = optax_boost.make_train_step(loss, tx)
  cached = optax_boost.make_train_step(cache.loss_fn, tx)
  a, b = plain.init(model()), cached.init(model())
  for epoch in range(3):
    for indices in (range(0, B), range(B, N)):
      batch = take(indices)
      a, _ = plain(a, batch)
      b, _ = cached(b, cache(b.params, indices, batch))
    assert cache.num_cached == N, epoch
  chex.assert_trees_all_close(a.params, b.params, rtol=1e-5)
  chex.assert_trees_all_equal(b.params["embed"], model()["embed"])


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_on_a_mesh_activations_from_the_cache_are_sharded_as_computed_ones(axis_type):
  axis_types = (getattr(jax.sharding.AxisType, axis_type),)
  mesh = jax.make_mesh((4,), ("x",), axis_types=axis_types, devices=jax.devices()[:4])

  def place(x, *spec):
    spec = jax.sharding.PartitionSpec(*spec)
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

  def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - y) ** 2)

  groups = ("body", "head")
  params = {"body": normal(D, 8), "head": normal(8, 2)}
  x, y = normal(N, D), normal(N, 2)
  with jax.set_mesh(mesh):
    params = jax.tree.map(place, params)
    batches = [(i, (place(x[i], "x"), place(y[i], "x"))) for i in np.split(np.arange(N), 2)]
    cache = optax_boost.cache_prefix(
      loss_fn, params, batches[0][1], groups, 1, num_examples=N, max_bytes=2**20
    )
    tx = optax_boost.freeze_layers(optax.sgd(0.1), groups, optax_boost.fixed_freezing(2, 1))
    step = optax_boost.make_train_step(cache.loss_fn, tx)
    state = step.init(params)
    shardings = []
    for indices, batch in 2 * batches:
      cached = cache(state.params, indices, batch)
      state, _ = step(state, cached)
      shardings.append([h.sharding for h in cached[1]])
    assert cache.num_cached == N
    assert shardings[2:] == shardings[:2]
    assert all(s.shard_shape((B, 8))[0] == 1 for s in jax.tree.leaves(shardings))
    assert step.cache_size() == 1


def test_arrays_of_several_processes_are_refused(monkeypatch):
  cache = make()
  monkeypatch.setattr(type(normal(1)), "is_fully_addressable", False)
  with pytest.raises(ValueError, match=r"on the devices of several.*`freeze_layers`"):
    cache(model(), range(B), take(range(B)))


def test_the_checksum_of_a_sharded_leaf_is_that_of_a_whole_one(tmp_path):
  axis_types = (jax.sharding.AxisType.Explicit,)
  mesh = jax.make_mesh((2,), ("x",), axis_types=axis_types, devices=jax.devices()[:2])
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))

  def loss_fn(params, batch):
    body = jax.sharding.reshard(params["body"], jax.sharding.PartitionSpec())
    return jnp.mean(jnp.tanh(batch @ body) @ params["head"])

  def of(params, batch):
    groups = ("body", "head")
    options = {"num_examples": N, "max_bytes": 2**20, "path": str(tmp_path)}
    return optax_boost.cache_prefix(loss_fn, params, batch, groups, 1, **options)

  params, x = {"body": normal(D, 8), "head": normal(8, 2)}, normal(B, D)
  with jax.set_mesh(mesh):
    replicated = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.P()))
    of(replicated, x)(replicated, range(B), x)
    sharded = replicated | {"body": jax.device_put(params["body"], sharding)}
    assert of(sharded, x).num_cached == B


def test_what_has_no_room_is_computed_each_time():
  size = make().bytes_per_example
  assert size == 4 * D
  cache = make(max_bytes=5 * size + 1)
  assert cache.capacity == 5
  for indices in ([0, 1, 2, 3], [4, 5, 6, 7], [2, 3, 4, 5]):
    given = cache(model(), indices, take(indices))
    expected = loss(model(), take(indices))
    np.testing.assert_allclose(cache.loss_fn(model(), given), expected, rtol=1e-6)
  assert cache.num_cached == 5


def test_abstract_params_tell_the_size_and_are_known_from_the_first_activations(tmp_path):
  abstract = jax.eval_shape(model)
  cache = make(params=abstract)
  assert cache.bytes_per_example == make().bytes_per_example
  cache(model(), range(B), take(range(B)))
  with pytest.raises(ValueError, match="not those that the cache was made with"):
    cache(model() | {"embed": model()["embed"] + 1}, range(B, N), take(range(B, N)))
  with pytest.raises(ValueError, match="`path` needs params that are arrays"):
    make(params=abstract, path=tmp_path)


def test_repeated_examples_take_one_place():
  cache = make()
  cache(model(), [2, 2, 2, 5], take([2, 2, 2, 5]))
  assert cache.num_cached == 2


def test_a_folder_keeps_activations_for_the_next_run(tmp_path):
  first = make(path=tmp_path / "cache")
  given = first(model(), range(B), take(range(B)))
  del first
  again = make(path=tmp_path / "cache")
  assert again.num_cached == B
  # The first batch is computed and compared, later ones are only read; none is added before.
  again(model(), range(B, N), take(range(B, N)))
  assert again.num_cached == B
  chex.assert_trees_all_equal(again(model(), range(B), given[0])[1], given[1])
  nowhere = jax.tree.map(lambda x: x * jnp.nan, model())
  chex.assert_trees_all_equal(again(nowhere, range(B), given[0])[1], given[1])
  again(model(), range(B, N), take(range(B, N)))
  assert again.num_cached == N


def test_a_folder_of_another_prefix_is_refused_and_left_alone(tmp_path):
  first = make(path=tmp_path)
  first(model(), range(B), take(range(B)))
  del first
  other = model() | {"embed": model()["embed"] + 1}
  with pytest.raises(ValueError, match="of another prefix: checksums differ"):
    make(params=other, path=tmp_path)
  assert make(path=tmp_path).num_cached == B
  # Trained params may differ.
  assert make(params=model() | {"head": normal(D, 2) + 1}, path=tmp_path).num_cached == B


@pytest.mark.parametrize("change", ["loss", "data", "params"])
@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [7, 6, 5, 3]])
def test_a_folder_is_refused_where_its_activations_are_not_those_of_the_batch(
  tmp_path, change, indices
):
  def edited(params, batch):
    return loss(params | {"blocks_0": 1.1 * params["blocks_0"]}, batch)

  first = make(path=tmp_path)
  first(model(), range(B), take(range(B)))
  del first
  cache = make(edited if change == "loss" else loss, path=tmp_path)
  batch, params = take(indices), model()
  if change == "data":
    batch["tokens"] = (batch["tokens"] + 1) % 7
  elif change == "params":
    params["embed"] *= 1.1
  cache(model(), [4, 5, 6, 7], take([4, 5, 6, 7]))  # not of the first run
  for _ in range(2):
    with pytest.raises(
      ValueError, match="not those that this prefix makes of this batch: the loss"
    ):
      cache(params, indices, batch)
  # Nor was anything added to it.
  assert cache.num_cached == B


def test_a_folder_without_its_header_begins_anew(tmp_path):
  make(path=tmp_path)(model(), range(B), take(range(B)))
  (tmp_path / "prefix.json").unlink()
  assert make(path=tmp_path).num_cached == 0


def test_a_folder_is_of_one_cache_at_a_time(tmp_path):
  first = make(path=tmp_path)
  step = optax_boost.make_train_step(first.loss_fn, optax.sgd(0.1))
  given = first(model(), range(B), take(range(B)))
  step(step.init(model()), given)
  with pytest.raises(ValueError, match="in use by another run, or by a cache of this process"):
    make(path=tmp_path)
  del first, step
  second = make(path=tmp_path)
  chex.assert_trees_all_equal(second(model(), range(B), given[0])[1], given[1])


def test_a_folder_is_of_one_process_until_it_ends(tmp_path):
  program = "import sys; from optax_boost._cached_prefix import _rows;" + (
    "rows = _rows.Rows(8, 8, 4, sys.argv[1], {}); print('ready', flush=True); input()"
  )
  other = subprocess.Popen(
    [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
  )
  with other:
    assert other.stdout.readline() == b"ready\n"
    with pytest.raises(ValueError, match="is in use by another run"):
      _rows.Rows(8, 8, 4, str(tmp_path), {})
    other.kill()
  assert _rows.Rows(8, 8, 4, str(tmp_path), {}).used == 0


@pytest.mark.parametrize("missing", ["fcntl", "locks"])
def test_a_folder_that_cannot_be_locked_warns(tmp_path, monkeypatch, missing):
  def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  if missing == "fcntl":
    monkeypatch.setattr(_files, "fcntl", None)
  else:
    monkeypatch.setattr(_files.fcntl, "flock", refuse)
  with pytest.warns(UserWarning, match=r"prefix\.lock' can't be locked: let no other run"):
    assert _files.lock(tmp_path / "prefix.lock") is not None


@pytest.mark.parametrize(
  ("name", "change", "text"),
  [
    ("rows.bin", lambda data: None, r"No such file .*rows\.bin"),
    ("examples.bin", lambda data: None, r"No such file .*examples\.bin"),
    ("rows.bin", lambda data: data[:-1], r"'rows\.bin' has 31 bytes instead of 32"),
    ("rows.bin", lambda data: data + b"0", r"'rows\.bin' has 33 bytes instead of 32"),
    ("examples.bin", lambda data: data[:8] * 2, r"'examples\.bin' holds array\(\[2, 2\]\)"),
    ("examples.bin", lambda data: b"\x08" + data[1:], r"holds array\(\[8, 5\]\)"),
    ("examples.bin", lambda data: b"\xff" * 8 + data[8:], r"holds array\(\[-1,  5\]\)"),
  ],
)
def test_damaged_files_are_refused(tmp_path, name, change, text):
  rows = np.arange(8, dtype=np.uint8).reshape(2, 4)
  _rows.Rows(8, 8, 4, str(tmp_path), {}).add(np.array([2, 5]), rows)
  changed = change((tmp_path / name).read_bytes())
  (tmp_path / name).unlink()
  if changed is not None:
    (tmp_path / name).write_bytes(changed)
  with pytest.raises(ValueError, match=rf"is truncated, damaged or of another kind: .*{text}"):
    _rows.Rows(8, 8, 4, str(tmp_path), {})


def test_a_full_disk_raises_and_leaves_whole_rows(tmp_path, monkeypatch):
  data = np.arange(32, dtype=np.uint8).reshape(8, 4)
  rows = _rows.Rows(8, 8, 4, str(tmp_path), {})
  rows.add(np.array([2, 5]), data[[2, 5]])
  write, room = os.write, 2 * 4 + 3

  def write_to_full_disk(file, content):
    nonlocal room
    if not room:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = write(file, content[:room])
    room -= written
    return written

  with monkeypatch.context() as patch:
    patch.setattr(os, "write", write_to_full_disk)
    with pytest.raises(OSError, match=r"No space .*: `cache_prefix` needs 24 bytes for 2") as info:
      rows.add(np.array([7, 1]), data[[7, 1]])
  assert (info.value.errno, info.value.filename) == (errno.ENOSPC, str(tmp_path))
  assert rows.used == 2
  del rows, info  # its traceback holds the rows
  rows = _rows.Rows(8, 8, 4, str(tmp_path), {})
  assert rows.used == 2
  rows.add(np.array([5, 0]), data[[5, 0]])
  np.testing.assert_array_equal(rows.read(np.array([5, 2, 0])), data[[5, 2, 0]])
  del rows
  rows = _rows.Rows(8, 8, 4, str(tmp_path), {})
  np.testing.assert_array_equal(rows.read(np.array([5, 2, 0])), data[[5, 2, 0]])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_back_bit_for_bit(dtype):
  def half(params, batch):
    return loss(jax.tree.map(lambda p: p.astype(dtype), params), batch)

  cache = make(half)
  _, computed = cache(model(), range(B), take(range(B)))
  _, read = cache(model(), range(B), take(range(B)))
  assert computed[0].dtype == dtype
  chex.assert_trees_all_equal(read, computed)


def test_examples_along_another_axis_of_the_activations():
  def turned(params, batch):
    x = jnp.swapaxes(params["embed"][batch["tokens"]], 0, 1)  # [length, batch, width]
    logits = x.mean(0) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

  cache = make(turned, frozen=1)
  _, computed = cache(model(), range(B), take(range(B)))
  assert computed[0].shape == (5, B, D) or computed[0].shape == (B, D)
  _, read = cache(model(), range(B)[::-1], take(range(B)[::-1]))
  axis = computed[0].shape.index(B)
  np.testing.assert_array_equal(read[0], np.flip(computed[0], axis))


def test_frozen_params_that_change_are_noticed():
  cache = make()
  cache(model(), range(B), take(range(B)))
  other = model() | {"blocks_0": model()["blocks_0"][::-1]}
  with pytest.raises(ValueError, match="frozen params are not those that the cache was made with"):
    cache(other, range(B, N), take(range(B, N)))


def test_dropout_in_the_prefix_is_refused_and_after_it_welcome():
  def dropout(place):
    def loss_fn(params, batch, rng):
      x = params["embed"][batch["tokens"]].mean(1)
      x = x * jax.random.bernoulli(rng, 0.5, x.shape) if place == "prefix" else x
      x = jnp.tanh(x @ params["blocks_0"]) @ params["head"]
      x = x * jax.random.bernoulli(rng, 0.5, x.shape)
      return optax.softmax_cross_entropy_with_integer_labels(x, batch["labels"]).mean()

    return loss_fn

  key = jax.random.key(0)
  with pytest.raises(ValueError, match="the frozen groups draw some from the loss's key"):
    make(dropout("prefix"), rng=key)
  cache = make(dropout("rest"), rng=key)
  given = cache(model(), range(B), take(range(B)))
  for rng in (key, jax.random.key(1)):
    expected = dropout("rest")(model(), given[0], rng)
    np.testing.assert_allclose(cache.loss_fn(model(), given, rng), expected, rtol=1e-6)


@pytest.mark.parametrize("mixing", ["statistics", "a constant key"])
def test_examples_that_depend_on_their_batch_are_refused(mixing):
  def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]].mean(1)
    if mixing == "statistics":
      x = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)
    else:
      x = x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    logits = jnp.tanh(x @ params["blocks_0"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

  cache = make(loss_fn)
  with pytest.raises(ValueError, match="activations that depend on their example alone"):
    cache(model(), range(B), take(range(B)))
  assert cache.num_cached == 0


@pytest.mark.parametrize("first", [[0], [0, 0, 0, 0]], ids=["one", "equal ones"])
def test_examples_are_checked_in_the_first_batch_of_different_ones(first):
  def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]].mean(1)
    x = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5)
    return jnp.mean(jnp.tanh(x @ params["blocks_0"]) @ params["head"])

  cache = make(loss_fn)
  cache(model(), first, take(first))
  with pytest.raises(ValueError, match="activations that depend on their example alone"):
    cache(model(), range(B, N), take(range(B, N)))


def test_batches_of_another_length_are_refused():
  def loss_fn(params, batch):
    x = jnp.tanh(params["embed"][batch["tokens"]] @ params["blocks_0"])
    return jnp.mean(x @ params["head"])

  cache = make(loss_fn)
  cache(model(), range(B), take(range(B)))
  shorter = jax.tree.map(lambda x: x[:, :3] if x.ndim > 1 else x, take(range(B, N)))
  with pytest.raises(ValueError, match=r"for all examples, \['\(5, 3\) float32'\]; .*'\(3, 3\) f"):
    cache(model(), range(B, N), shorter)


def test_frozen_leaves_without_entries_are_welcome():
  params = model() | {"embed_of_none": jnp.zeros((0, D))}
  cache = make(params=params)
  cache(params, range(B), take(range(B)))
  assert cache.num_cached == B


def test_activations_without_an_axis_of_examples_are_refused():
  def loss_fn(params, batch):
    mean = params["embed"][batch["tokens"]].mean((0, 1))
    return jnp.sum(mean @ params["blocks_0"] @ params["head"])

  with pytest.raises(ValueError, match="one axis along the examples"):
    make(loss_fn)


def test_examples_joined_with_another_axis_are_refused():
  def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]].reshape(-1, D)
    return jnp.mean(jnp.tanh(x @ params["blocks_0"]) @ params["head"])

  with pytest.raises(ValueError, match="one entry for each example; the frozen groups make 20"):
    make(loss_fn)


def test_a_prefix_that_is_trained_is_refused():
  with pytest.raises(ValueError, match="found no activations"):
    make(groups=("head", "."), frozen=1)


def test_a_loss_that_scans_over_micro_batches_is_refused_by_this_name():
  def micro_batches(params, batch):
    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    return jax.lax.scan(lambda total, part: (total + loss(params, part), None), 0.0, parts)[0]

  with pytest.raises(ValueError, match=r"scans over parts of the batch \(micro-batches\)"):
    make(micro_batches)


@pytest.mark.parametrize(
  ("indices", "error", "text"),
  [
    ([0, 1, 2], ValueError, "one number for each of the 4 examples"),
    ([0, 1, 2, N], ValueError, "from 0 to 7"),
    ([0, 1, 2, -1], ValueError, "from 0 to 7"),
    ([0.0, 1.0, 2.0, 3.0], TypeError, "must be integers"),
  ],
)
def test_wrong_indices_are_refused(indices, error, text):
  with pytest.raises(error, match=text):
    make()(model(), indices, take(range(B)))


def test_room_for_no_example_is_refused():
  with pytest.raises(ValueError, match="at least one example, 12 bytes; got 11"):
    make(max_bytes=11)
