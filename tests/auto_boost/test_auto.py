"""Levels, and MindSpore's configuration word for word: the decision, and what is built of it."""

import functools
import json
import pathlib
import warnings

import chex
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost
from optax_boost import auto_boost
from optax_boost._levels import _mindspore_methods
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests import meshes
from tests.auto_boost.table import rows_of
from tests.less_bn.residual_models import LinenNet, NnxNet, X, filled_nnx_net

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
# Word for word as in MindSpore's documentation of AutoBoost.
DOCUMENTED = json.loads((CONFIGS / "documented.json").read_text(encoding="utf-8"))
# Ten layers, as the documented groups need them, by name in their order.
LAYERS = ["layer*"]
PARAMS = {f"layer{i}": jnp.eye(4) * 0.9 + 0.05 for i in range(9)} | {"layer9": jnp.ones((4, 2))}
DATA = jax.random.normal(jax.random.key(0), (8, 4))


def loss_fn(params, x):
  for i in range(9):
    x = jnp.tanh(x @ params[f"layer{i}"])
  return jnp.mean((x @ params["layer9"] - 1.0) ** 2)


def train(tx, steps=8, params=PARAMS, data=DATA):
  step = optax_boost.make_train_step(loss_fn, tx)
  state, depths = step.init(params), []
  for _ in range(steps):
    state, metrics = step(state, data)
    depths.append(int(metrics.get("frozen_groups", 0)))
  return state.params, depths


@pytest.mark.parametrize("mode", ["auto", "manual", "enable_all", "disable_all"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_the_documented_configuration_is_taken_word_for_word(level, mode, tmp_path):
  config = DOCUMENTED | {"boost": DOCUMENTED["boost"] | {"mode": mode}}
  path = tmp_path / "boost.json"
  path.write_text(json.dumps(config), encoding="utf-8")
  on = {"enable_all": {"dim_reduce"}, "disable_all": set(), "manual": set()}.get(mode)
  if mode == "auto":  # At O2 freezing rules adaptive summation out.
    on = set() if level == "O0" else {"less_bn", "grad_freeze"}
  for given in (config, json.dumps(config), path, str(path)):
    with pytest.warns(optax_boost.NoEffectWarning) as caught:
      boost = auto_boost(level, config=given)
    (warning,) = caught
    assert warning.filename == __file__
    assert set(boost.on) == on
    for key in (
      "`common.gradient_split_groups` (XLA groups",
      "`common.device_number` (the mesh axis",
      "`grad_freeze.total_steps` (the schedules",
      "`dim_reduce.timeout` (no process",
    ):
      assert key in str(warning.message)
      assert key in boost.explain()
    # All switches are false, which only mode 'manual' reads.
    named = {name for name in DOCUMENTED["boost"] if f"`boost.{name}` (false" in boost.ignored}
    assert named == on
  with pytest.warns(optax_boost.NoEffectWarning):
    boost = auto_boost(level, config=config)
  if mode == "enable_all":
    with pytest.raises(ValueError, match=r"`dim_reduce.pca_mat_path` must .*; got None and None"):
      boost.optimizer(optax.sgd(0.1), None, PARAMS)
  else:
    tx = boost.optimizer(optax.sgd(0.01), loss_fn, PARAMS, DATA, groups=LAYERS)
    trained, depths = train(tx)
    assert loss_fn(trained, DATA) < loss_fn(PARAMS, DATA)
    assert (max(depths) > 0) == ("grad_freeze" in on)


@pytest.mark.parametrize("mode", [None, "auto", "manual", "enable_all", "disable_all"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_key_whose_value_is_none_has_its_default_without_a_warning(level, mode, tmp_path):
  config = {block: dict.fromkeys(keys) for block, keys in DOCUMENTED.items()}
  config["boost"]["mode"] = mode
  (tmp_path / "boost.json").write_text(json.dumps(config), encoding="utf-8")
  expected = auto_boost(level, config={"boost": {"mode": mode or "auto"}}).on
  for given in (config, tmp_path / "boost.json"):
    assert auto_boost(level, config=given).on == expected


def manual(block=None, **switches):
  return {"boost": {"mode": "manual"} | switches} | (block or {})


HEAD = {"less_bn": {"fn_flag": True, "gc_flag": True}}
NO_GC = {"less_bn": {"fn_flag": True, "gc_flag": False}}
FREEZING = {"grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7}}
HALF = {"grad_freeze": {"param_groups": 10, "freeze_type": 0, "freeze_p": 0.5}}
FOUR = {"grad_accumulation": {"grad_accumulation_step": 4}}
UPDATES = {"adasum": {"on": "updates", "axis_name": "x", "local_axis_name": None}}
NEVER = {"grad_freeze": {"freeze_p": 1}}
EVERY = manual(FOUR, grad_freeze=False, grad_accumulation=True)
# A level, a configuration, the axis, the settings of what is on, switches without effect.
DECISIONS = [
  ("O0", {}, None, {}, []),
  ("O1", {}, None, HEAD | FREEZING, []),
  ("O2", {}, "x", HEAD | FREEZING, []),
  ("O1", {"boost": {"mode": None}, "less_bn": {"fn_flag": None}}, None, HEAD | FREEZING, []),
  ("O1", {"less_bn": {"gc_flag": False}}, None, NO_GC | FREEZING, []),
  ("O1", {"grad_freeze": {"freeze_p": 0.5, "freeze_type": 0}}, None, HEAD | HALF, []),
  ("O1", manual(less_bn=False), None, FREEZING, []),
  ("O0", manual(less_bn=True), None, HEAD, []),
  ("O0", manual(FOUR, grad_accumulation=True), None, FOUR, []),
  ("O0", manual(grad_accumulation=True), None, {}, ["grad_accumulation"]),
  ("O1", manual(FOUR, grad_accumulation=True), None, HEAD | FREEZING, ["grad_accumulation"]),
  ("O2", EVERY, "x", HEAD | UPDATES | FOUR, []),
  ("O0", manual(adasum=True), "x", UPDATES, []),
  ("O0", manual(adasum=True), None, {}, ["adasum"]),
  ("O0", manual(adasum=True, grad_freeze=True), "x", FREEZING, ["adasum"]),
  ("O1", manual(NEVER, grad_freeze=True), None, HEAD, ["grad_freeze"]),
  ("O1", {"grad_freeze": {"param_groups": 1}}, None, HEAD, []),
  ("O0", {"boost": {"less_bn": True, "adasum": False}}, None, {}, ["less_bn"]),
  ("O1", {"boost": {"mode": "disable_all", "less_bn": True}}, None, {}, ["less_bn"]),
]


@pytest.mark.parametrize(("level", "config", "axis", "on", "ignored"), DECISIONS)
def test_a_configuration_has_the_meaning_that_mindspore_gives_it(level, config, axis, on, ignored):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    boost = auto_boost(level, config=config, axis_name=axis)
  assert boost.on == on
  assert len(caught) == bool(ignored)
  assert [key for key in boost.why if f"`boost.{key}`" in boost.ignored] == ignored


def test_explain_lists_which_methods_are_on_and_why():
  with pytest.warns(optax_boost.NoEffectWarning):
    boost = auto_boost("O1", config=manual(NO_GC | FOUR, grad_accumulation=True))
  lines = boost.explain().splitlines()
  assert lines[0] == "MindSpore's configuration, level O1, mode manual"
  rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:-1]}
  assert rows["less_bn"] == "on in MindSpore's level O1 fn_flag=True, gc_flag=False"
  assert rows["grad_accumulation"] == "off grad_freeze rules it out, as in MindSpore"
  assert rows["adasum"] == "off not in MindSpore's level O1"
  assert "`boost.grad_accumulation` (true, but grad_freeze rules it out" in lines[-1]
  ours = auto_boost("O2", total_steps=100).explain()
  assert "adasum                 off  one replica: axis_name is None" in ours
  assert (
    "an SGD of rate 1 takes the optimizer's place"
    in auto_boost(config={"boost": {"mode": "enable_all"}}).explain()
  )


@pytest.mark.parametrize("form", ["nnx", "linen"])
@pytest.mark.parametrize(("sizes", "removed"), [((3, 3), 0), ((1, 3, 1), 4)])
@pytest.mark.parametrize("gc_flag", [True, False])
def test_explain_says_which_batch_norms_were_removed(form, sizes, removed, gc_flag):
  config = manual({"less_bn": {"fn_flag": False, "gc_flag": gc_flag}}, less_bn=True)
  boost = auto_boost("O1", config=config)
  assert rows_of(boost)["less_bn"].startswith("on boost.less_bn is true")
  model, less_bn = NnxNet(sizes), ob_nnx.less_bn
  if form == "linen":
    model, less_bn = LinenNet(sizes), functools.partial(ob_linen.less_bn, train=True)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", optax_boost.NoEffectWarning)
    boost.model(less_bn, model, X)
  row = rows_of(boost)["less_bn"]
  norms = 2 * len(sizes) + 2
  assert row.startswith("on" if removed or gc_flag else "off")
  effect = f"{removed} of {norms} BatchNorms removed"
  assert row.endswith(f"| {effect}{'; the optimizer centralizes gradients' if gc_flag else ''}")


def test_explain_says_whether_a_last_layer_was_normalized():
  boost = auto_boost("O1", config=manual({"less_bn": {"gc_flag": False}}, less_bn=True))
  boost.model(ob_nnx.less_bn, NnxNet(), X)
  assert rows_of(boost)["less_bn"].endswith("removed, last normalized")


def test_explain_says_whether_layers_are_frozen():
  boost = auto_boost("O1", total_steps=10)
  boost.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  row = rows_of(boost)["freeze_layers"]
  assert row.startswith("off")
  assert row.endswith(
    "| no layers frozen: pass the layers by name, in the order of the forward pass"
    ", as `groups=['stem', 'blocks/*', 'head']`"
  )
  boost.optimizer(optax.sgd(0.1), params=PARAMS, groups=LAYERS)
  row = rows_of(boost)["freeze_layers"]
  assert row.startswith("on")
  assert "| layers in 2 groups" in row
  assert row.endswith("the first is frozen from step 7 on")


def test_explain_names_the_methods_of_a_level_by_their_public_names():
  boost = auto_boost("O2", total_steps=100)
  for name in rows_of(boost):
    assert name == "less_bn" or hasattr(optax_boost, name)


def test_explain_says_which_methods_of_a_level_the_optimizer_applies():
  boost = auto_boost("O1", total_steps=100)
  boost.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  rows = rows_of(boost)
  assert "of 10 leaves are centralized" in rows["centralize"]
  assert rows["average_params"].endswith(
    "| from step 75 on, each step adds its params to the average, which is for evaluation"
  )
  assert rows["less_bn"].startswith("off")
  assert rows["less_bn"].endswith("| `boost.model` was not called")
  assert "BatchNorm" not in boost.explain()


ERRORS = [
  ({"common": {"device_num": 8}}, r"`common` has no key 'device_num'. .* 'device_number'\?"),
  ({"dim_reduce": {"n_component": 8}}, r"`dim_reduce` has no key .* 'n_components'\?"),
  ({"bost": {}}, r"`config` has no block 'bost'. Did you mean 'boost'\?"),
  ({"average": {}}, r"`config` has no block 'average'. There are: boost, common"),
  ({"boost": {"lessbn": True}}, r"`boost` has no key 'lessbn'. Did you mean 'less_bn'\?"),
  ({"boost": {"mode": "manaul"}}, r"`boost.mode` must be .*; got 'manaul'. .* 'manual'\?"),
  ({"boost": {"mode": ["auto"]}}, r"`boost.mode` must be one of 'auto'"),
  ({"boost": {"adasum": 1}}, r"`boost.adasum` must be true or false; got 1"),
  (manual(loss_scale_group=True), r"`boost.loss_scale_group` must be .*dynamic_loss_scale"),
  ({"common": {"gradient_split_groups": "50"}}, r"must be a list of integers; got '50'"),
  ({"common": {"device_number": 0}}, r"must be an integer >= 1 and <= 2147483647; got 0"),
  ({"common": {"gradient_split_groups": [50, "100"]}}, r"list of integers; got \[50, '100'\]"),
  ({"grad_freeze": {"freeze_type": 2}}, r"`grad_freeze.freeze_type` must be 0 or 1; got 2"),
  ({"grad_freeze": {"freeze_type": True}}, r"must be 0 or 1; got True"),
  ({"grad_freeze": {"freeze_p": 0}}, r"must be a number > 0 and <= 1; got 0"),
  ({"grad_freeze": {"freeze_p": "0.7"}}, r"got '0.7'"),
  ({"grad_freeze": {"param_groups": 10.0}}, r"got 10.0"),
  ({"dim_reduce": {"rho": 1.0}}, r"`dim_reduce.rho` must be a number > 0 and < 1; got 1.0"),
  ({"dim_reduce": {"gamma": 1}}, r"must be a number >= 0 and < 1"),
  ({"dim_reduce": {"alpha": float("nan")}}, r"must be a number >= 0; got nan"),
  ({"dim_reduce": {"alpha": 10**400}}, r"must be a number >= 0; got "),
  ({"dim_reduce": {"pca_mat_path": ""}}, r"must be a path; got ''"),
]


@pytest.mark.parametrize(("config", "message"), ERRORS, ids=[str(c)[:50] for c, _ in ERRORS])
def test_a_setting_that_cannot_be_honoured_is_an_error(config, message, tmp_path):
  (tmp_path / "boost.json").write_text(json.dumps(config), encoding="utf-8")
  for given in (config, json.dumps(config), tmp_path / "boost.json"):
    with pytest.raises(ValueError, match=message):
      auto_boost("O1", config=given)


NOT_JSON = {
  '{\n  "boost": {"mode": "auto",}\n}': "line 2 column 2",
  "[]": "must be a dict of blocks",
  '{"boost": %s' % ("[" * 100_000): "recursion",
  '{"common": {"device_number": %s}}' % ("9" * 5000): "digits",
  '{"boost": "\udcff"}': "utf-8",
  '{"boost": {}}\0': "Extra data",
}


@pytest.mark.parametrize("text", NOT_JSON, ids=NOT_JSON.values())
def test_a_file_without_a_configuration_is_named(text, tmp_path):
  (tmp_path / "boost.json").write_text(text, encoding="utf-8", errors="surrogateescape")
  with pytest.raises(ValueError, match=rf"boost\.json is not JSON of Mind.*{NOT_JSON[text]}"):
    auto_boost("O1", config=tmp_path / "boost.json")
  with pytest.raises(FileNotFoundError, match=r"none\.json"):
    auto_boost("O1", config=tmp_path / "none.json")


ARGUMENTS = [
  ({"level": "O3"}, ValueError, r"There is no level 'O3'"),
  ({"level": "o1"}, ValueError, r"There is no level 'o1'. Did you mean 'O1'\?"),
  ({"level": ["O1"]}, TypeError, r"`level` must be one of .*; got \['O1'\]"),
  ({"total_steps": None}, ValueError, r"`total_steps` must be .* at level 'O1'; got None"),
  ({"config": []}, TypeError, r"`config` must be a dict of blocks"),
  ({"local_axis_name": "near"}, ValueError, r"`axis_name` must be the axis over servers"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ARGUMENTS)
def test_a_bad_argument_is_refused_by_its_name(arguments, error, message):
  with pytest.raises(error, match=message):
    auto_boost(**{"level": "O1", "total_steps": 9} | arguments)


def test_an_optimizer_without_its_required_arguments_is_refused():
  boost = auto_boost("O1", total_steps=9)
  with pytest.raises(ValueError, match=r"must be given `params`, too, .*layer_groups\(params"):
    boost.optimizer(optax.sgd(0.1), groups=LAYERS)
  with pytest.raises(TypeError, match=r"`tx` must be an optax.*; got 'adam'"):
    boost.optimizer("adam")
  with pytest.raises(ValueError, match=r"`dim_reduce` is on, so the optimizer needs the params"):
    auto_boost(config=manual(dim_reduce=True)).optimizer(optax.sgd(0.1))
  thirty = auto_boost("O1", config={"grad_freeze": {"param_groups": 30}})
  with pytest.raises(ValueError, match=r"the layers by name.*, since `grad_freeze` is on"):
    thirty.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  with pytest.raises(ValueError, match=r"`num_groups` must be .*10; got 30"):
    thirty.optimizer(optax.sgd(0.1), params=PARAMS, groups=LAYERS)


@pytest.mark.parametrize(("level", "unfrozen"), [("O1", 14), ("O2", 11)])
@pytest.mark.parametrize("form", [None, "names", "groups"])
def test_a_level_is_the_chain_by_hand_and_freezes_the_half_of_the_named_layers(
  level, unfrozen, form
):
  trace, half = (loss_fn, PARAMS, DATA), optax_boost.layer_groups(PARAMS, LAYERS, num_groups=2)
  assert half.groups[0] == tuple(f"layer{i}" for i in range(5))
  groups = {"names": LAYERS, "groups": half}.get(form)
  tx = auto_boost(level, total_steps=20).optimizer(optax.adam(0.01), *trace, groups=groups)
  by_hand = optax.chain(
    optax_boost.centralize(layers=optax_boost.layer_axes(*trace)), optax.adam(0.01)
  )
  if form is not None:
    schedule = optax_boost.progressive_freezing(2, 20, unfrozen / 20, anneal=False)
    by_hand = optax_boost.freeze_layers(by_hand, half, schedule)
  by_hand = optax_boost.average_params(by_hand, start=15, every=1)
  assert str(jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)) == str(
    jax.make_jaxpr(by_hand.update)(PARAMS, by_hand.init(PARAMS), PARAMS)
  )
  # About 20 snapshots in the last quarter of a longer training.
  assert auto_boost(level, total_steps=1250).on["average_params"] == {"start": 938, "every": 16}


def test_a_level_takes_axes_that_the_user_says():
  params = {"kernel": jnp.arange(12.0).reshape(3, 4)}
  trace = (lambda params, x: jnp.sum(x @ params["kernel"]), params, jnp.ones((2, 3)))
  said = optax_boost.layer_axes(*trace, axes={"kernel": ("outputs", "fan-in")})
  tx = auto_boost("O1", total_steps=20).optimizer(optax.sgd(1.0), *trace, layers=said)
  updates, _ = tx.update(params, tx.init(params), params)
  kernel = np.arange(12.0).reshape(3, 4)
  np.testing.assert_allclose(updates["kernel"], kernel.mean(1, keepdims=True) - kernel, atol=1e-6)
  with pytest.raises(TypeError, match="`layers` must be the result of"):
    auto_boost("O1", total_steps=20).optimizer(optax.sgd(1.0), *trace, layers=params)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_configuration_freezes_each_of_many_groups_at_its_own_depth(kind):
  schedule = _mindspore_methods.schedule(20, freeze_type=kind, freeze_p=0.1)
  assert np.unique(schedule.depths).tolist() == list(range(20))


@pytest.mark.parametrize("kind", [0, 1])
def test_a_configuration_is_the_chain_by_hand(kind):
  config = {"grad_freeze": {"param_groups": 2, "freeze_type": kind, "freeze_p": 0.5}}
  tx = auto_boost("O1", config=config, seed=3).optimizer(
    optax.sgd(0.1), params=PARAMS, groups=LAYERS
  )
  schedule = optax_boost.continuous_freezing(2, 0.5)
  if kind == 1:
    schedule = optax_boost.interval_freezing(2, 0.5, max_depths=2, seed=3)
  inner = optax.chain(optax_boost.centralize(), optax.sgd(0.1))
  by_hand = optax_boost.freeze_layers(inner, ["layer[0-4]", "layer[5-9]"], schedule)
  found, depths = train(tx)
  expected, same = train(by_hand)
  chex.assert_trees_all_equal(found, expected)
  assert depths == same
  assert sum(depths) == 4


def test_a_decay_before_it_is_centralized_with_the_gradients_as_in_mindspore():
  decay, config = optax.add_decayed_weights(0.3), manual(less_bn=True)
  found, _ = train(optax.chain(decay, auto_boost(config=config).optimizer(optax.sgd(0.1))))
  by_hand = optax.chain(decay, optax_boost.centralize(), optax.sgd(0.1))
  chex.assert_trees_all_equal(found, train(by_hand)[0])
  within = auto_boost(config=config).optimizer(optax.chain(decay, optax.sgd(0.1)))
  assert np.abs(found["layer9"] - train(within)[0]["layer9"]).max() > 1e-3


def test_layers_of_a_scan_are_layers_each():
  def loss(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["blocks"])
    return jnp.mean(h @ params["head"])

  params = {"blocks": jnp.arange(48.0).reshape(3, 4, 4) / 48, "head": jnp.ones((4, 1))}
  tx = auto_boost("O1", total_steps=10).optimizer(optax.sgd(1.0), loss, params, jnp.eye(4))
  updates, _ = tx.update(params, tx.init(params), params)
  expected = [jnp.mean(w, 0) - w for w in params["blocks"]]
  np.testing.assert_allclose(updates["blocks"], jnp.stack(expected), rtol=1e-5, atol=1e-6)


SMALL = {"a_head": jnp.ones((4, 2)), "z_body": jnp.eye(4) + 0.1}
BATCHES = jax.random.normal(jax.random.key(1), (2, 2, 2, 4, 4))  # servers, devices, steps, ...


def small_loss(params, x):
  return jnp.mean((jnp.tanh(x @ params["z_body"]) @ params["a_head"] - 1.0) ** 2)


def on_servers(tx, cast=True):
  """Two steps on two servers of two devices: the params, and each server's state."""
  mesh = meshes.mesh((2, 2), ("far", "near"))

  def steps(params, x):
    state = tx.init(params)
    for t in range(2):
      mine = params
      if cast:
        mine = jax.tree.map(lambda p: jax.lax.pcast(p, ("far", "near"), to="varying"), params)
      updates, state = tx.update(jax.grad(small_loss)(mine, x[0, 0, t]), state, params)
      params = optax.apply_updates(params, updates)
    return params, jax.tree.map(lambda s: s[None], state)

  return jax.jit(
    jax.shard_map(steps, mesh=mesh, in_specs=(P(), P("far", "near")), out_specs=(P(), P("far")))
  )(SMALL, BATCHES)


@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="needs jax.lax.pcast")
def test_adasum_of_weight_deltas_over_servers_equals_mindspores():
  boost = auto_boost(config=manual(adasum=True), axis_name="far", local_axis_name="near")
  # The types of `shard_map` say that a server's devices hold the same state.
  params, state = on_servers(boost.optimizer(optax.adam(0.05)))
  # MindSpore: mean gradient per server, its own optimizer, adaptive sum of the deltas.
  inner, expected = optax.adam(0.05), SMALL

  @jax.jit
  def server_update(params, batches, state):
    grads = [jax.grad(small_loss)(params, x) for x in batches]
    return inner.update(optax.tree.scale(0.5, optax.tree.add(*grads)), state)

  states = [inner.init(SMALL) for _ in range(2)]
  for t in range(2):
    deltas = []
    for s in range(2):
      updates, states[s] = server_update(expected, BATCHES[s, :, t], states[s])
      deltas.append(updates)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *deltas)
    delta = jax.jit(optax_boost.adasum_reduce)(stacked)
    expected = optax.apply_updates(expected, delta)
  chex.assert_trees_all_close(params, expected, rtol=1e-4, atol=1e-5)
  mu = optax.tree.get(state, "mu")["z_body"]
  assert np.abs(mu[0] - mu[1]).max() > 1e-3
  with pytest.raises(ValueError, match=r"gradients that differ along the axis 'near'"):
    on_servers(boost.optimizer(optax.sgd(0.1)), cast=False)


def test_a_level_applies_adasum_to_gradients_and_a_configuration_applies_it_to_updates():
  adasum, adam = optax_boost.adasum("x"), optax.adam(0.05)
  level = auto_boost("O2", total_steps=4, axis_name="x")
  only = manual(adasum=True, less_bn=False, grad_freeze=False)
  config = auto_boost("O2", config=only, axis_name="x")
  inner = optax.chain(adasum, optax_boost.centralize(), adam)
  schedule = optax_boost.progressive_freezing(2, 4, 0.55, anneal=False)
  by_hand = optax_boost.freeze_layers(inner, ["z_body", "a_head"], schedule)
  pairs = [
    (
      level.optimizer(adam, params=SMALL, groups=["z_body", "a_head"]),
      optax_boost.average_params(by_hand, start=3),
    ),
    (config.optimizer(adam), optax.chain(adam, adasum)),
  ]
  for pair in pairs:
    programs = [
      jax.make_jaxpr(jax.vmap(lambda g, tx=tx: tx.update(g, tx.init(SMALL), SMALL), axis_name="x"))
      for tx in pair
    ]
    grads = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), SMALL)
    assert len({str(program(grads)) for program in programs}) == 1


def nnx_loss(model, x):
  return jnp.mean((model(x) - 1) ** 2)


def test_ten_lines_with_nnx():
  boost = auto_boost("O1", total_steps=3)
  original = filled_nnx_net(0)
  model = boost.model(ob_nnx.less_bn, original, X)
  split = ob_nnx.split_loss(nnx_loss, model)
  tx = boost.optimizer(optax.sgd(0.01), *split, X, groups=["first|norm9", "blocks/*", "last"])
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = ob_nnx.make_train_step(nnx_loss)
  metrics = [step(model, optimizer, X) for _ in range(3)]
  assert metrics[-1]["loss"] < metrics[0]["loss"]
  assert {int(m["frozen_groups"]) for m in metrics} == {0, 1}
  assert not isinstance(model.last, ob_nnx.NormalizedDense)
  assert not isinstance(model.blocks[0].norms[2], nnx.BatchNorm)
  assert auto_boost("O0").model(ob_nnx.less_bn, original, X) is original


def test_ten_lines_with_linen():
  def linen_loss(model, x):
    return jnp.mean((model(x, train=True) - 1) ** 2)

  boost = auto_boost("O1", config={"grad_freeze": {"param_groups": 2}})
  module = boost.model(ob_linen.less_bn, LinenNet(), X, train=True)
  variables = jax.jit(module.init)(jax.random.key(0), X)
  loss, *arrays = ob_linen.split_loss(linen_loss, module, variables)
  groups = ["first|norm9", "blocks_*", "last"]
  tx = boost.optimizer(optax.sgd(0.01), loss, *arrays, X, groups=groups)
  step = optax_boost.make_train_step(loss, tx)
  state, losses = step.init(*arrays), []
  for _ in range(3):
    state, metrics = step(state, X)
    losses.append(metrics["loss"])
  assert losses[-1] < losses[0]
  # MindSpore's level has a normalized head, ours hasn't.
  assert "multiplier" in state.params["last"]
  assert auto_boost("O0").model(ob_linen.less_bn, module) is module


def test_dim_reduce_takes_mindspores_steps_in_the_place_of_the_optimizer(tmp_path):
  with np.load(ROOT / "tests" / "golden" / "dimreduce_linear.npz") as file:
    trace = {key: file[key] for key in file.files}
  hyper = json.loads(str(trace["meta_json"]))["hyper"]
  params = [jnp.asarray(trace["init_w"]), jnp.asarray(trace["init_b"])]
  path = str(tmp_path / "pca_mat.npy")  # MindSpore's own file
  np.save(path, trace["P"])
  block = {key: hyper[key] for key in ("rho", "gamma", "alpha", "sigma", "n_components")}
  config = manual({"dim_reduce": block | {"pca_mat_path": path}}, dim_reduce=True)

  def loss(params, batch):
    return jnp.mean((batch[0] @ params[0] + params[1] - batch[1]) ** 2)

  tx = auto_boost("O1", config=config).optimizer(optax.adam(3.0), None, params)
  step = optax_boost.make_train_step(loss, tx)
  state = step.init(params)
  for t in range(hyper["steps"]):
    state, metrics = step(state, (trace["x"][t], trace["y"][t]))
    np.testing.assert_allclose(metrics["accepted_rho"], trace["rho"][t])
    np.testing.assert_allclose(state.params[0], trace["weight_w"][t], atol=5e-6)
    np.testing.assert_allclose(state.params[1], trace["weight_b"][t], atol=5e-6)
  config["dim_reduce"]["n_components"] = 3
  with pytest.raises(ValueError, match=rf"n_components` must be .*, {len(trace['P'])}; got 3"):
    auto_boost("O1", config=config).optimizer(optax.sgd(0.1), None, params)


STARTS = {"plain": SMALL, "nnx": nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param)}


@pytest.mark.parametrize("form", STARTS)
def test_a_subspace_is_fitted_to_checkpoints(form, tmp_path):
  params = STARTS[form]
  path = [jax.tree.map(lambda p, t=t: p + jnp.sin(t * p) + t**2, params) for t in range(4)]
  with ocp.CheckpointManager(tmp_path / "weights") as manager:
    for step, snapshot in enumerate(path):
      manager.save(step, args=ocp.args.StandardSave(snapshot))
  block = {"n_components": 2, "alpha": 0.05, "weight_load_dir": str(tmp_path / "weights")}
  boost = auto_boost(config=manual({"dim_reduce": block}, dim_reduce=True))
  found = boost.optimizer(optax.sgd(0.1), None, params).init(params)
  subspace = optax_boost.fit_subspace(path, 2)
  expected = optax_boost.dim_reduce(subspace, alpha=0.05, max_search=2).init(params)
  chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("name", ["accumulate.json", "freeze_only.json"])
def test_the_example_configurations_train(name):
  boost = auto_boost("O1", config=CONFIGS / name)
  assert not boost.ignored
  tx = boost.optimizer(optax.sgd(0.01), loss_fn, PARAMS, DATA, groups=LAYERS)
  assert loss_fn(train(tx)[0], DATA) < loss_fn(PARAMS, DATA)
