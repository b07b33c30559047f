"""Levels and configurations: the reference's schema, the decision, and what is built of it."""

import dataclasses
import json
import pathlib
import re

import chex
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import auto
from optax_boost import auto_boost
from optax_boost.auto import BoostConfig
from optax_boost.auto import _methods
import optax_boost.linen as ob_linen
import optax_boost.nnx as ob_nnx
from tests.residual_models import LinenNet
from tests.residual_models import X
from tests.residual_models import filled_nnx_net

GOLDEN = pathlib.Path(__file__).parent / "golden"
CONFIGS = pathlib.Path(__file__).parent.parent / "examples" / "configs"
# What the reference documents, with all of its defaults.
DOCUMENTED = {
  "boost": {
    "mode": "auto",
    "less_bn": False,
    "grad_freeze": False,
    "adasum": False,
    "grad_accumulation": False,
    "dim_reduce": False,
    "loss_scale_group": False,
  },
  "common": {"device_number": 8},
  "less_bn": {"fn_flag": True, "gc_flag": True},
  "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.7, "total_steps": 65536},
  "grad_accumulation": {"grad_accumulation_step": 1},
  "dim_reduce": {
    "rho": 0.55,
    "gamma": 0.9,
    "alpha": 0.001,
    "sigma": 0.4,
    "n_components": 32,
    "pca_mat_path": None,
    "weight_load_dir": None,
  },
}


def test_the_documented_dict_is_read_and_written_as_it_is():
  config = BoostConfig.from_dict(DOCUMENTED)
  assert config.to_dict() == DOCUMENTED
  assert json.loads(config.to_json()) == DOCUMENTED


def test_the_defaults_are_the_documented_ones():
  assert BoostConfig().to_dict() == DOCUMENTED | {"boost": {"mode": "auto"}}


def test_the_levels_have_settings_of_their_own_and_the_references_stay_reachable():
  found = {level: auto_boost(level).config.grad_freeze for level in ("O1", "O2")}
  assert found["O1"] == auto.GradFreezeConfig(2, freeze_type=2, freeze_p=0.7, total_steps=None)
  assert found["O2"] == auto.GradFreezeConfig(2, freeze_type=2, freeze_p=0.55, total_steps=None)
  assert auto_boost("O1").config.less_bn == auto.LessBNConfig(fn_flag=False)
  for make in (auto_boost, ob_nnx.auto_boost, ob_linen.auto_boost):
    assert make("O1", reference=True).config == BoostConfig()
    assert make("O1", DOCUMENTED).config == BoostConfig.from_dict(DOCUMENTED)
    assert make("O2", BoostConfig()).config == BoostConfig()


def test_what_a_dict_or_a_file_leaves_out_is_the_levels_or_the_references(tmp_path):
  config = {"grad_freeze": {"param_groups": 3}}
  (tmp_path / "boost.json").write_text(json.dumps(config))
  for given in (config, tmp_path / "boost.json"):
    level = auto_boost("O2", given, total_steps=9)
    assert level.config.grad_freeze == auto.GradFreezeConfig(3, 2, 0.55, 9)
    reference = auto_boost("O2", given, reference=True)
    assert reference.config.grad_freeze == auto.GradFreezeConfig(3, 1, 0.7)


def test_the_levels_average_the_params_of_the_last_quarter():
  boost = auto_boost("O2", total_steps=16)
  assert boost.is_on("average")
  tx = boost.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  step = boost.train_step(loss_fn, tx, donate=False)
  state, snapshots = step.init(PARAMS), []
  for _ in range(16):
    state, _ = step(state, DATA)
    snapshots.append(state.params)
  mean = jax.tree.map(lambda *x: sum(x) / 4, *snapshots[12:])
  averaged = optax_boost.averaged_params(state.opt_state, state.params)
  chex.assert_trees_all_close(averaged, mean, rtol=1e-6)
  rows = {d.method: d for d in boost.decisions}
  assert rows["average"].settings == "about 20 snapshots in the last 25% of the steps"


@pytest.mark.parametrize("steps", [100, 150, 156, 400, 1250])
def test_an_average_takes_about_as_many_snapshots_as_it_says(steps):
  options = _methods.average_options(auto.AverageConfig(total_steps=steps))
  assert abs((steps - options["start"]) // options["every"] - 20) <= 5


def test_an_average_needs_the_length_of_the_training():
  reasons = {d.method: d.why for d in auto_boost("O1").decisions}
  assert reasons["average"] == "in level O1, but without total_steps=..."
  boost = auto_boost("O0", manual(average=True))
  with pytest.raises(ValueError, match=r"last 25% of the training, .* auto_boost\(\.\.\., total_s"):
    boost.optimizer(optax.sgd(0.1))
  for boost in (
    auto_boost("O1", reference=True, total_steps=9),
    auto_boost("O1", manual(dim_reduce=True), total_steps=9),
    auto_boost("O1", manual(average=False), total_steps=9),
    auto_boost("O0", total_steps=9),
  ):
    assert not boost.is_on("average")
  assert auto_boost("O1", manual(average=True), reference=True, total_steps=9).is_on("average")


def test_the_levels_freeze_at_the_end_of_the_training_level_two_sooner():
  def frozen(level, **freezing):
    boost = auto_boost(level, {"grad_freeze": freezing}, total_steps=20)
    tx = boost.optimizer(
      optax.sgd(0.1), groups=list("abc")[: boost.config.grad_freeze.param_groups]
    )
    params = dict.fromkeys("abc", jnp.ones((2, 2)))
    state, depths = tx.init(params), []
    update = jax.jit(tx.update)
    for _ in range(24):
      depths.append(int(optax.tree.get(state, "frozen_groups")))
      _, state = update(params, state, params)
    return depths

  assert frozen("O1") == 14 * [0] + 10 * [1]
  assert frozen("O2") == 11 * [0] + 13 * [1]
  assert frozen("O2", param_groups=3, freeze_p=0.5) == 10 * [0] + 5 * [1] + 9 * [2]
  with pytest.warns(optax_boost.NoEffectWarning):
    assert frozen("O1", freeze_p=1.0) == 24 * [0]


def test_freezing_at_the_end_needs_to_know_when_that_is():
  message = r"last 30% of the training, .* pass auto_boost\(\.\.\., total_steps=\.\.\.\)"
  with pytest.raises(ValueError, match=message):
    auto_boost("O1").optimizer(optax.sgd(0.1), groups=["a", "b"])
  with pytest.raises(
    ValueError, match=r"`grad_freeze.total_steps` must be an integer >= 1 .* or null; got 0"
  ):
    auto_boost("O1", {"grad_freeze": {"total_steps": 0}})
  assert auto_boost("O1", total_steps=np.int64(5)).config.grad_freeze.total_steps == 5
  # The argument goes before the configuration.
  given = {"grad_freeze": {"total_steps": 7}}
  assert auto_boost("O1", given).config.grad_freeze.total_steps == 7
  assert auto_boost("O1", given, total_steps=8).config.grad_freeze.total_steps == 8


def test_a_configuration_survives_dict_json_and_file(tmp_path):
  config = BoostConfig(
    boost=auto.BoostSwitches(mode="manual", grad_freeze=True, less_bn=False),
    common=auto.CommonConfig(device_number=None),
    dim_reduce=auto.DimReduceConfig(pca_mat_path="pca.npy", gamma=0),
  )
  assert BoostConfig.from_dict(config.to_dict()) == config
  assert BoostConfig.from_json(config.to_json()) == config
  (tmp_path / "boost.json").write_text(config.to_json())
  assert BoostConfig.load(tmp_path / "boost.json") == config
  assert auto_boost("O0", str(tmp_path / "boost.json"), key=1).config == config
  assert hash(config) == hash(BoostConfig.from_dict(config.to_dict()))


def test_numbers_of_numpy_are_read_and_written_as_pythons():
  freezing = auto.GradFreezeConfig(freeze_p=np.float32(0.5), total_steps=np.int64(70))
  config = BoostConfig(grad_freeze=freezing, boost=auto.BoostSwitches(adasum=np.bool_(False)))
  assert config.grad_freeze == auto.GradFreezeConfig(freeze_p=0.5, total_steps=70)
  assert BoostConfig.from_json(config.to_json()) == config


def test_what_is_left_out_comes_from_the_base():
  base = BoostConfig.from_dict({"grad_freeze": {"freeze_p": 0.5, "param_groups": 4}})
  config = BoostConfig.from_dict({"grad_freeze": {"param_groups": 6}}, base)
  assert config.grad_freeze == auto.GradFreezeConfig(param_groups=6, freeze_p=0.5)


WRONG = [
  ({"bost": {}}, r"has no block 'bost'. Did you mean 'boost'\?"),
  ({"freeze_p": 0.5}, r"has no block 'freeze_p'. It belongs to the block 'grad_freeze'"),
  ({"boost": {"lessbn": True}}, r"`boost` has no key 'lessbn'. Did you mean 'less_bn'\?"),
  ({"less_bn": {"freeze_p": 1}}, r"It belongs to the block 'grad_freeze'"),
  ({"common": {"zzz": 1}}, r"There are: device_number"),
  ({"boost": {"mode": "manaul"}}, r"`boost.mode` must be one of .*Did you mean 'manual'\?"),
  ({"boost": {"adasum": 1}}, r"`boost.adasum` must be true or false; got 1"),
  ({"less_bn": {"fn_flag": None}}, r"`less_bn.fn_flag` must be true or false; got None"),
  ({"grad_freeze": {"freeze_type": 3}}, r"must be one of \[0, 1, 2\]; got 3"),
  ({"grad_freeze": {"freeze_type": True}}, r"must be one of \[0, 1, 2\]; got True"),
  ({"grad_freeze": {"freeze_p": 0}}, r"`grad_freeze.freeze_p` must be a number > 0 and <= 1"),
  ({"grad_freeze": {"freeze_p": "0.7"}}, r"got '0.7'"),
  ({"grad_freeze": {"param_groups": 10.0}}, r"must be an integer >= 1 and <= 2147483647; got 10.0"),
  ({"grad_accumulation": {"grad_accumulation_step": 0}}, r"must be an integer >= 1 .*; got 0"),
  ({"dim_reduce": {"rho": 1.0}}, r"`dim_reduce.rho` must be a number > 0 and < 1"),
  ({"dim_reduce": {"alpha": float("nan")}}, r"must be a number >= 0; got nan"),
  ({"dim_reduce": {"timeout": 1800}}, r"`dim_reduce.timeout` has no effect here: no process waits"),
  ({"dim_reduce": {"pca_mat_path": ""}}, r"must be a path or null; got ''"),
  ({"common": {"gradient_split_groups": [50]}}, r"has no effect here: XLA groups .*Remove the key"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[str(c) for c, _ in WRONG])
def test_a_wrong_setting_is_an_error_that_names_it(config, message):
  with pytest.raises(ValueError, match=message):
    BoostConfig.from_dict(config)


def test_a_wrong_value_is_refused_however_the_configuration_is_made():
  with pytest.raises(ValueError, match=r"`grad_freeze.freeze_p` must be"):
    auto.GradFreezeConfig(freeze_p=2)
  with pytest.raises(ValueError, match=r"`boost.mode` must be"):
    dataclasses.replace(BoostConfig().boost, mode="O1")
  with pytest.raises(TypeError, match=r"`less_bn` must be a LessBNConfig; got True"):
    BoostConfig(less_bn=True)
  with pytest.raises(dataclasses.FrozenInstanceError):
    BoostConfig().less_bn.fn_flag = False


MALFORMED = [
  ('{\n  "boost": {"mode": "auto",}\n}', r"line 2, column 2\d"),
  ("", r"line 1, column 1"),
  ('{"dim_reduce": {"rho": NaN}}', r"has NaN, which is no JSON number"),
  ('{"boost": {"adasum": true, "adasum": false}}', r"'adasum' twice, to True and to False"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_malformed_json_is_an_error_with_its_place(text, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    BoostConfig.from_json(text)
  (tmp_path / "bad.json").write_text(text)
  with pytest.raises(ValueError, match=rf"bad\.json .*{message}"):
    auto_boost("O1", tmp_path / "bad.json")


@pytest.mark.parametrize("config", [[], {"boost": True}])
def test_a_configuration_that_is_no_mapping_is_refused(config):
  with pytest.raises(TypeError, match="must be a mapping"):
    BoostConfig.from_dict(config)
  with pytest.raises(ValueError, match=r"`text`: .*must be a mapping"):
    BoostConfig.from_json(json.dumps(config))
  with pytest.raises(TypeError, match=r"`config` must be a BoostConfig, a dict, the path"):
    auto_boost("O1", 7)
  with pytest.raises(TypeError, match=r"`text` must be JSON in a string; got b'\{\}'"):
    BoostConfig.from_json(b"{}")
  with pytest.raises(TypeError, match=r"`base` must be a BoostConfig or None; got \{\}"):
    BoostConfig.from_json("{}", {})


# Values that no key but those named takes, and the keys that do.
NOWHERE = [
  (True, {"less_bn", "grad_freeze", "adasum", "grad_accumulation", "dim_reduce",
          "loss_scale_group", "fn_flag", "gc_flag"}),
  (float("nan"), ()),
  (float("inf"), ()),
  (10**400, ()),
  (-(10**400), ()),
  (10**5000, ()),
  (-1, ()),
  (2**31, {"alpha"}),
  (2.5, {"alpha"}),
  ("3", {"pca_mat_path", "weight_load_dir"}),
  ("", ()),
  (b"x", ()),
  ({}, ()),
  ([True], ()),
  ([3, 10**400], ()),
  (object(), ()),
]  # fmt: skip


@pytest.mark.parametrize(("value", "taken_by"), NOWHERE, ids=lambda v: str(type(v).__name__))
def test_every_key_refuses_values_of_another_kind_by_its_name(value, taken_by):
  for block, keys in DOCUMENTED.items():
    for key in set(keys) - set(taken_by):
      with pytest.raises(ValueError, match=rf"`{block}.{key}` must be .*; got "):
        auto_boost("O1", {block: {key: value}})
    for key in set(keys) & set(taken_by):
      assert BoostConfig.from_dict({block: {key: value}}) is not None


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ('{"grad_freeze": {"param_groups": true}}', r"`grad_freeze.param_groups` must be .*; got True"),
    (
      '{"param_groups": true}',
      r"has no block 'param_groups'. It belongs to the block 'grad_freeze'",
    ),
    ('{"boost": true}', r"`boost` must be a mapping of keys to values; got True"),
    ("[]", r"must be a mapping of blocks; got \[\]"),
    ('{"dim_reduce": {"alpha": %s}}' % ("9" * 400), r"`dim_reduce.alpha` must be a number"),
    ('{"dim_reduce": {"rho": 1e999}}', r"`dim_reduce.rho` must be a number .*; got inf"),
    ('{"common": {"device_number": %s}}' % ("9" * 5000), r"has a number of 5000 digits"),
    ('{"boost": %s' % ("[" * 100_000), r"is nested too deeply"),
    ('{"boost": {"mode": [[[[]]]]}}', r"`boost.mode` must be one of"),
  ],
)
def test_a_file_that_is_refused_is_named(text, message, tmp_path):
  path = tmp_path / "boost.json"
  path.write_text(text)
  for make in (auto_boost, ob_nnx.auto_boost, ob_linen.auto_boost):
    with pytest.raises(ValueError, match=rf"boost\.json.* .*{message}"):
      make("O1", path)
  with pytest.raises(ValueError, match=message):
    BoostConfig.from_json(text)


def test_a_path_that_holds_no_configuration_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"none\.json"):
    auto_boost("O1", tmp_path / "none.json")
  with pytest.raises(ValueError, match=rf"must be a JSON file; got the directory '{tmp_path}'"):
    auto_boost("O1", tmp_path)
  (tmp_path / "boost.json").write_bytes(b'{"boost": {}}\xff')
  with pytest.raises(ValueError, match=r"boost\.json is not valid UTF-8"):
    auto_boost("O1", str(tmp_path / "boost.json"))
  with pytest.raises(ValueError, match=r"got JSON itself, .* Pass BoostConfig.from_json"):
    auto_boost("O1", '{"boost": {"mode": "auto"}}')


BAD_ARGUMENTS = [
  ({"level": ["O1"]}, TypeError, r"`level` must be one of .*; got \['O1'\]"),
  ({"level": 10**5000}, TypeError, r"`level` must be one of .*; got a value of type int"),
  ({"axis_name": 3}, TypeError, r"`axis_name` must be the name of a mesh axis"),
  ({"local_axis_name": []}, TypeError, r"`local_axis_name` must be the name of a mesh axis"),
  ({"local_axis_name": "near"}, ValueError, r"`local_axis_name` is the axis inside of a server"),
  ({"adasum_on": "weights"}, ValueError, r"`adasum_on` must be one of 'gradients', 'updates'"),
  ({"compose": 1}, TypeError, r"`compose` must be True or False; got 1"),
  ({"reference": "yes"}, TypeError, r"`reference` must be True or False; got 'yes'"),
  ({"key": 0.5}, TypeError, r"`key` must be a key of `jax.random.key` or an integer seed"),
  ({"key": 10**400}, ValueError, r"`key` must be a seed that fits 64 bits"),
  ({"total_steps": 2.5}, TypeError, r"`total_steps` must be a whole number; got 2.5"),
  ({"total_steps": True}, TypeError, r"`total_steps` must be a whole number; got True"),
  ({"total_steps": 0}, ValueError, r"`total_steps` must be >= 1; got 0"),
  ({"total_steps": 2**31}, ValueError, r"`total_steps` must be <= 2147483647"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_by_its_name(arguments, error, message):
  for make in (auto_boost, ob_nnx.auto_boost, ob_linen.auto_boost):
    with pytest.raises(error, match=message):
      make(**{"level": "O1"} | arguments)


def test_methods_refuse_bad_arguments_by_their_names():
  with pytest.raises(ValueError, match=r"There is no method \['adasum'\]"):
    auto_boost("O0").is_on(["adasum"])
  for make in (auto_boost, ob_nnx.auto_boost, ob_linen.auto_boost):
    with pytest.raises(TypeError, match=r"`tx` must be an optax.*; got 'adam'"):
      make("O1").optimizer("adam")
    with pytest.raises(TypeError, match=r"`decay` must be an optax.*; got 0.1"):
      make("O0").optimizer(optax.sgd(0.1), decay=0.1)
  with pytest.raises(TypeError, match=r"`model` must be an NNX module; got 3"):
    ob_nnx.auto_boost("O0").optimizer(optax.sgd(0.1), model=3)
  linen = ob_linen.auto_boost("O0")
  with pytest.raises(TypeError, match=r"`variables` must be a dict of collections.*; got 3"):
    linen.optimizer(optax.sgd(0.1), nn.Dense(2), nnx_loss, 3)
  with pytest.raises(ValueError, match=r"with a collection 'params'.* got the keys \['kernel'\]"):
    linen.optimizer(optax.sgd(0.1), nn.Dense(2), nnx_loss, {"kernel": 1})
  with pytest.raises(TypeError, match=r"`rng` must be one key of `jax.random.key`; got 3"):
    linen.optimizer(optax.sgd(0.1), nn.Dense(2), nnx_loss, {"params": {}}, DATA, 3)
  with pytest.raises(TypeError, match=r"`wrt` must be an NNX filter, as nnx.Param; got 3"):
    ob_nnx.auto_boost("O0").optimizer(optax.sgd(0.1), wrt=3)
  with pytest.raises(TypeError, match=r"`auto_boost` needs arrays as leaves; .* is 'w.npz'"):
    auto_boost("O1").optimizer(optax.sgd(0.1), loss_fn, "w.npz", DATA)
  # Without the params, the model or the variables there is nothing to trace the loss with.
  sgd, module = optax.sgd(0.1), nn.Dense(2)
  for optimizer in (
    lambda: auto_boost("O1", total_steps=9).optimizer(sgd, loss_fn, None, DATA),
    lambda: ob_nnx.auto_boost("O1", total_steps=9).optimizer(sgd, nnx_loss, None, DATA),
    lambda: ob_linen.auto_boost("O1", total_steps=9).optimizer(sgd, module, nnx_loss, None, DATA),
  ):
    with pytest.raises(ValueError, match=r"`grad_freeze` is on, .* or groups="):
      optimizer()


def on(boost):
  return [decision.method for decision in boost.decisions if decision.on]


def manual(**switches):
  return {
    "boost": {"mode": "manual"} | switches,
    "grad_accumulation": {"grad_accumulation_step": 2},
  }


def test_levels_turn_on_what_the_references_do():
  assert on(auto_boost("O0")) == []
  assert on(auto_boost("O1")) == ["less_bn", "grad_freeze"]
  assert on(auto_boost("O2", compose=True, axis_name="x")) == ["less_bn", "grad_freeze", "adasum"]


def test_modes_and_switches():
  assert on(auto_boost("O1", DOCUMENTED)) == ["less_bn", "grad_freeze"]
  assert on(auto_boost("O1", manual(less_bn=False))) == ["grad_freeze"]
  assert on(auto_boost("O0", manual(less_bn=True))) == ["less_bn"]
  assert on(auto_boost("O1", {"boost": {"mode": "disable_all"}})) == []


def test_freezing_goes_before_adasum_and_accumulation_unless_they_are_to_be_combined():
  config = manual(adasum=True, grad_accumulation=True)
  assert on(auto_boost("O1", config)) == ["less_bn", "grad_freeze"]
  why = {d.method: d.why for d in auto_boost("O1", config).decisions}
  assert why["adasum"] == "grad_freeze goes before it, as in MindSpore; axis_name=... combines them"
  both = ["adasum", "grad_accumulation"]
  assert on(auto_boost("O1", config, compose=True, axis_name="x"))[2:] == both
  # Replicas have gradients of their own: an axis keeps the summation on.
  assert on(auto_boost("O2", axis_name="x")) == ["less_bn", "grad_freeze", "adasum"]
  assert on(auto_boost("O2", axis_name="x", reference=True)) == ["less_bn", "grad_freeze"]
  assert on(auto_boost("O2")) == ["less_bn", "grad_freeze"]
  # Without freezing they are reached, which they never were in the reference.
  assert on(auto_boost("O2", manual(grad_freeze=False), axis_name="x")) == ["less_bn", "adasum"]


@pytest.mark.parametrize(
  ("options", "hint"),
  [
    ({}, "axis_name=... combines them"),
    ({"reference": True}, "axis_name=... and compose=True combine them"),
    ({"reference": True, "axis_name": "x"}, "compose=True combines them"),
  ],
)
def test_the_advice_to_combine_names_only_options_that_are_missing_and_works(options, hint):
  boost = auto_boost("O2", **options)
  adasum = next(d for d in boost.decisions if d.method == "adasum")
  assert adasum.why == f"grad_freeze goes before it, as in MindSpore; {hint}"
  advised = options | ({"axis_name": "x"} if "axis_name" in hint else {})
  advised |= {"compose": True} if "compose" in hint else {}
  assert "adasum" in on(auto_boost("O2", **advised))


CONTRADICTIONS = [
  ("O0", {"boost": {"less_bn": True}}, {}, r"`boost.mode` 'auto' contradicts `boost.less_bn` true"),
  (
    "O1",
    {"boost": {"mode": "disable_all", "adasum": True}},
    {},
    r"`boost.mode` 'disable_all' contradicts `boost.adasum` true",
  ),
  ("O2", None, {"compose": True}, r"level 'O2' .*`adasum` on, .*got axis_name=None"),
  ("O3", None, {}, r"There is no level 'O3'"),
  ("o1", None, {}, r"There is no level 'o1'. Did you mean 'O1'\?"),
]


@pytest.mark.parametrize(("level", "config", "options", "message"), CONTRADICTIONS)
def test_contradictions_and_unknown_levels_are_errors(level, config, options, message):
  for make in (auto_boost, ob_nnx.auto_boost, ob_linen.auto_boost):
    with pytest.raises(ValueError, match=message):
      make(level, config, **options)


def test_the_subspace_is_alone():
  boost = auto_boost("O2", {"boost": {"mode": "enable_all"}})
  assert on(boost) == ["dim_reduce"]
  assert "32 dimensions; the optimizer given is not used: steps in the" in boost.explain()
  assert "off  dim_reduce goes before it, as in MindSpore\n" in boost.explain()


def test_the_advice_against_a_subspace_beside_other_methods_works():
  everything = {"mode": "enable_all", "dim_reduce": False}
  message = r"beside `boost.less_bn`, .*Pass mode 'manual' with `boost.dim_reduce` false, or leave"
  with pytest.raises(ValueError, match=message):
    auto_boost("O1", {"boost": everything}, compose=True, axis_name="x")
  advised = {"boost": everything | {"mode": "manual"}}
  assert on(auto_boost("O1", advised, compose=True, axis_name="x")) == ["less_bn", "grad_freeze"]
  assert on(auto_boost("O1", {"boost": everything})) == ["dim_reduce"]


def test_it_explains_which_switches_a_mode_ignores():
  ignored = "boost.{} false is ignored: only mode 'manual' reads it"
  explained = auto_boost("O1", {"boost": {"mode": "enable_all", "dim_reduce": False}}).explain()
  assert f"mode 'enable_all'; {ignored.format('dim_reduce')}" in explained
  switches = {"grad_freeze": False, "adasum": False}
  explained = auto_boost("O1", {"boost": switches}).explain()
  assert f"in level O1; {ignored.format('grad_freeze')}" in explained
  assert "boost.adasum" not in explained
  assert "ignored" not in auto_boost("O1", manual(**switches)).explain()


@pytest.mark.parametrize(
  ("method", "block"),
  [
    ("grad_accumulation", {"grad_accumulation_step": 1}),
    ("grad_freeze", {"param_groups": 1}),
    ("grad_freeze", {"freeze_p": 1}),
  ],
)
def test_settings_that_leave_nothing_of_a_method_warn(method, block):
  config = {"boost": {"mode": "manual", method: True}, method: block}
  with pytest.warns(optax_boost.NoEffectWarning, match=r"is on with .* 1, which \w+ nothing\."):
    boost = ob_nnx.auto_boost("O1" if method == "grad_freeze" else "O0", config)
  row = next(line for line in boost.explain().splitlines() if line.startswith(method))
  assert re.search(rf"nothing: `{method}\.{next(iter(block))}` 1, which", row)
  assert "only grad_freeze saves time" not in boost.explain()


def test_it_explains_itself():
  config = {
    "boost": {"mode": "manual", "grad_accumulation": True},
    "grad_freeze": {"param_groups": 10, "freeze_type": 1, "freeze_p": 0.6},
    "less_bn": {"fn_flag": True},
  }
  lines = ob_nnx.auto_boost("O1", manual(grad_accumulation=True) | config).explain().splitlines()
  assert lines[0] == "level O1, mode manual"
  rows = {line.split()[0]: line for line in lines[1:]}
  assert "on   in level O1" in rows["less_bn"]
  assert "normalized head, centralized gradients" in rows["less_bn"]
  assert "interval, 10 groups, 40% of the steps" in rows["grad_freeze"]
  assert "backward pass in 40% of steps" in rows["grad_freeze"]
  assert "off  grad_freeze goes before it" in rows["grad_accumulation"]
  assert rows["dim_reduce"].split(maxsplit=2)[1:] == ["off", "not in level O1"]
  assert "at the end, 2 groups, 30% of the steps" in auto_boost("O1").explain()
  with pytest.raises(ValueError, match=r"no method 'freeze_layers'. .*'grad_freeze'"):
    auto_boost("O1").is_on("freeze_layers")


def test_it_explains_what_is_left_where_no_batch_norm_is_removed():
  row = auto_boost("O1").explain().splitlines()[3]
  assert row.split(maxsplit=1)[0] == "less_bn"
  assert re.search(r" centralized gradients +nothing: only the forms for Flax change", row)
  last = ob_linen.auto_boost("O2", axis_name="replicas").explain().splitlines()[-1]
  assert last.startswith("in a model without BatchNorms (a transformer), less_bn is centralized")
  assert last.endswith("gradients, and only grad_freeze saves time per step")
  config = manual(grad_freeze=False) | {"less_bn": {"gc_flag": False}}
  last = ob_nnx.auto_boost("O1", config).explain().splitlines()[-1]
  assert last.endswith("less_bn is without effect, and no method saves time per step")
  assert "without BatchNorms" not in ob_nnx.auto_boost("O0").explain()


def test_two_of_them_do_not_know_of_each_other():
  first = auto_boost("O1", {"grad_freeze": {"param_groups": 3}})
  second = auto_boost("O0")
  assert first.config.grad_freeze.param_groups == 3
  assert on(second) == []
  assert on(first) == ["less_bn", "grad_freeze"]


PARAMS = {"a_head": jnp.ones((4, 2)), "z_body": jnp.eye(4) + 0.1}
DATA = jax.random.normal(jax.random.key(0), (8, 4))


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["z_body"]) @ params["a_head"] - 1.0) ** 2)


def train(step, steps=8):
  state, depths = step.init(PARAMS), []
  for _ in range(steps):
    state, metrics = step(state, DATA)
    depths.append(int(metrics.get("frozen_groups", 0)))
  return state.params, depths


def small(**block):
  return {"grad_freeze": {"param_groups": 2, "freeze_type": 1, "freeze_p": 0.6} | block}


def test_the_optimizer_is_the_one_built_by_hand():
  boost = auto_boost("O1", small(), key=3)
  tx = boost.optimizer(optax.sgd(0.1, momentum=0.9), loss_fn, PARAMS, DATA)
  groups = optax_boost.layer_groups(loss_fn, PARAMS, DATA, num_groups=2)
  assert groups.groups[0] == ("z_body",)
  by_hand = optax_boost.freeze_layers(
    optax.chain(optax_boost.centralize(), optax.sgd(0.1, momentum=0.9)),
    groups,
    optax_boost.interval_freezing(2, 0.4),
    key=3,
  )
  found, depths = train(boost.train_step(loss_fn, tx))
  expected, same = train(optax_boost.make_train_step(loss_fn, by_hand))
  chex.assert_trees_all_equal(found, expected)
  assert depths == same
  assert sum(depths) == 3


@pytest.mark.parametrize("freezing", [False, True])
def test_a_loss_scale_per_group_goes_around_the_rest(freezing):
  config = small() | manual(loss_scale_group=True, grad_freeze=freezing)
  boost = auto_boost("O0", config)
  with pytest.raises(ValueError, match=r"`(grad_freeze|loss_scale_group)` is on, .* or groups="):
    boost.optimizer(optax.sgd(0.1))
  tx = boost.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  groups = optax_boost.layer_groups(loss_fn, PARAMS, DATA, num_groups=2)
  inner = optax.sgd(0.1)
  if freezing:
    inner = optax_boost.freeze_layers(inner, groups, optax_boost.interval_freezing(2, 0.4))
  by_hand = optax_boost.group_loss_scale(inner, groups)
  found, depths = train(boost.train_step(loss_fn, tx))
  expected, same = train(optax_boost.make_train_step(loss_fn, by_hand))
  chex.assert_trees_all_equal(found, expected)
  assert depths == same
  assert (sum(depths) > 0) == freezing


@pytest.mark.parametrize(
  ("kind", "schedule"),
  [
    (0, optax_boost.continuous_freezing(2, 0.5)),
    (2, optax_boost.progressive_freezing(2, 6, 0.5, anneal=False)),
  ],
)
def test_other_schedules_by_patterns_without_centralization(kind, schedule):
  config = small(freeze_type=kind, freeze_p=0.5) | {"less_bn": {"gc_flag": False}}
  boost = auto_boost("O1", config, total_steps=6)
  tx = boost.optimizer(optax.sgd(0.1), groups=["body", "head"])
  by_hand = optax_boost.freeze_layers(optax.sgd(0.1), ["body", "head"], schedule)
  found, depths = train(optax_boost.make_train_step(loss_fn, tx))
  chex.assert_trees_all_equal(found, train(optax_boost.make_train_step(loss_fn, by_hand))[0])
  assert 1 in depths


def test_level_zero_is_the_optimizer_alone():
  boost = auto_boost("O0")
  found, _ = train(boost.train_step(loss_fn, boost.optimizer(optax.adam(0.1))))
  expected, _ = train(optax_boost.make_train_step(loss_fn, optax.adam(0.1)))
  chex.assert_trees_all_equal(found, expected)


def test_combined_methods_nest_as_documented():
  boost = auto_boost(
    "O2", small() | manual(grad_accumulation=True), compose=True, axis_name="replicas"
  )
  assert on(boost) == ["less_bn", "grad_freeze", "adasum", "grad_accumulation"]
  tx = boost.optimizer(optax.sgd(0.1), groups=["body", "head"])
  by_hand = optax_boost.accumulate(
    optax_boost.freeze_layers(
      optax.chain(optax_boost.adasum("replicas"), optax_boost.centralize(), optax.sgd(0.1)),
      ["body", "head"],
      optax_boost.interval_freezing(2, 0.4),
    ),
    2,
  )

  def run(tx):
    def one(x):
      def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return (optax.apply_updates(params, updates), state), None

      (params, _), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), length=6)
      return params

    return jax.vmap(one, axis_name="replicas")

  replicas = DATA.reshape(2, 4, 4)
  assert str(jax.make_jaxpr(run(tx))(replicas)) == str(jax.make_jaxpr(run(by_hand))(replicas))
  found = jax.jit(run(tx))(replicas)
  np.testing.assert_array_equal(found["z_body"][0], found["z_body"][1])
  assert jnp.any(found["z_body"][0] != PARAMS["z_body"])


def test_a_decay_is_centralized_with_the_gradients_as_in_mindspore():
  decay = optax.add_decayed_weights(0.3)
  tx = auto_boost("O1", manual(grad_freeze=False)).optimizer(optax.sgd(0.1), decay=decay)
  found, _ = train(optax_boost.make_train_step(loss_fn, tx))
  by_hand = optax.chain(decay, optax_boost.centralize(), optax.sgd(0.1))
  chex.assert_trees_all_equal(found, train(optax_boost.make_train_step(loss_fn, by_hand))[0])
  after = optax.chain(optax_boost.centralize(), decay, optax.sgd(0.1))
  other, _ = train(optax_boost.make_train_step(loss_fn, after))
  assert np.abs(found["z_body"] - other["z_body"]).max() > 1e-3
  # Without centralization it is the decay alone.
  plain, _ = train(optax_boost.make_train_step(loss_fn, optax.chain(decay, optax.sgd(0.1))))
  tx = auto_boost("O0").optimizer(optax.sgd(0.1), decay=decay)
  chex.assert_trees_all_equal(train(optax_boost.make_train_step(loss_fn, tx))[0], plain)
  with pytest.raises(ValueError, match=r"`dim_reduce` runs alone, without weight decay.*`decay`"):
    auto_boost("O0", manual(dim_reduce=True)).optimizer(optax.sgd(0.1), params=PARAMS, decay=decay)


BATCHES = jax.random.normal(jax.random.key(1), (2, 2, 2, 4, 4))  # servers, devices, steps, ...


def on_servers(tx):
  """Two steps on two servers of two devices: the params, and each server's state."""
  mesh = jax.make_mesh((2, 2), ("far", "near"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def steps(params, x):
    state = tx.init(params)
    for t in range(2):
      mine = jax.tree.map(lambda p: jax.lax.pcast(p, ("far", "near"), to="varying"), params)
      updates, state = tx.update(jax.grad(loss_fn)(mine, x[0, 0, t]), state, params)
      params = optax.apply_updates(params, updates)
    return params, jax.tree.map(lambda s: s[None], state)

  return jax.jit(
    jax.shard_map(steps, mesh=mesh, in_specs=(P(), P("far", "near")), out_specs=(P(), P("far")))
  )(PARAMS, BATCHES)


def weight_deltas(inner):
  """MindSpore's AdaSum: mean gradient per server, its own optimizer, adaptive sum of the deltas."""
  params, states = PARAMS, [inner.init(PARAMS) for _ in range(2)]
  for t in range(2):
    deltas = []
    for s in range(2):
      grads = [jax.grad(loss_fn)(params, x) for x in BATCHES[s, :, t]]
      updates, states[s] = inner.update(optax.tree.scale(0.5, optax.tree.add(*grads)), states[s])
      deltas.append(updates)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *deltas)
    params = optax.apply_updates(params, optax_boost.adasum_reduce(stacked))
  return params


needs_pcast = pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="needs jax.lax.pcast")


def adasum_alone(**common):
  return {"boost": {"mode": "manual", "adasum": True}, "common": common}


@needs_pcast
def test_adasum_of_weight_deltas_over_servers_is_mindspores():
  boost = auto_boost(
    "O0",
    adasum_alone(device_number=2),
    axis_name="far",
    local_axis_name="near",
    adasum_on="updates",
  )
  assert "on updates, over 'far', mean over 'near'" in boost.explain()
  # The types of `shard_map` say that a server's devices hold the same state.
  params, state = on_servers(boost.optimizer(optax.adam(0.05)))
  expected = jax.jit(lambda: weight_deltas(optax.adam(0.05)))()
  chex.assert_trees_all_close(params, expected, rtol=1e-4, atol=1e-5)
  mu = optax.tree.get(state, "mu")["z_body"]
  assert np.abs(mu[0] - mu[1]).max() > 1e-3


@pytest.mark.parametrize("place", ["gradients", "updates"])
def test_each_place_of_adasum_is_the_chain_by_hand(place):
  boost = auto_boost("O0", adasum_alone(), axis_name="replicas", adasum_on=place)
  parts = [optax_boost.adasum("replicas"), optax.adam(0.05)]
  by_hand = optax.chain(*(parts if place == "gradients" else parts[::-1]))

  def program(tx):
    def one(x):
      updates, state = tx.update(jax.grad(loss_fn)(PARAMS, x), tx.init(PARAMS), PARAMS)
      return optax.apply_updates(PARAMS, updates), state

    return str(jax.make_jaxpr(jax.vmap(one, axis_name="replicas"))(BATCHES[0, :, 0]))

  assert program(boost.optimizer(optax.adam(0.05))) == program(by_hand)
  assert program(by_hand) != program(optax.chain(*parts if place == "updates" else parts[::-1]))
  assert f"on {place}, over 'replicas'" in boost.explain()


@needs_pcast
def test_a_server_must_have_the_devices_that_the_configuration_says():
  axes = {"axis_name": "far", "local_axis_name": "near"}
  for place in ("gradients", "updates"):
    boost = auto_boost("O0", adasum_alone(device_number=4), adasum_on=place, **axes)
    with pytest.raises(
      ValueError, match=r"`common.device_number` is 4, but .*'near' has 2 devices. Set"
    ):
      on_servers(boost.optimizer(optax.sgd(0.1)))
  # The levels leave the number open; MindSpore's default is 8.
  assert auto_boost("O1").config.common.device_number is None
  jax.eval_shape(
    lambda: on_servers(auto_boost("O0", adasum_alone(), **axes).optimizer(optax.sgd(0.1)))
  )
  boost = auto_boost("O2", reference=True, compose=True, axis_name="far")
  assert "on updates, over 'far' (device_number 8 needs local_axis_name=...)" in boost.explain()


def test_the_mean_over_a_server_refuses_gradients_that_shard_map_has_summed():
  boost = auto_boost(
    "O0", adasum_alone(), axis_name="far", local_axis_name="near", adasum_on="updates"
  )
  tx = boost.optimizer(optax.sgd(0.1))
  mesh = jax.make_mesh((2, 2), ("far", "near"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def step(params, x):
    return tx.update(jax.grad(loss_fn)(params, x[0, 0, 0]), tx.init(params), params)[0]

  with pytest.raises(ValueError, match=r"gradients that differ along the axis 'near'"):
    jax.shard_map(step, mesh=mesh, in_specs=(P(), P("far", "near")), out_specs=P())(PARAMS, BATCHES)


def test_the_optimizer_refuses_what_it_can_not_use():
  with pytest.raises(ValueError, match=r"`grad_freeze` is on, .* or groups="):
    auto_boost("O1").optimizer(optax.sgd(0.1), params=PARAMS)
  five = auto_boost("O1", {"grad_freeze": {"param_groups": 5}}, total_steps=10)
  with pytest.raises(ValueError, match=r"`grad_freeze.param_groups` is 5: .*2 blocks"):
    five.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  with pytest.raises(TypeError, match=r"Did you pass the factory"):
    auto_boost("O0").optimizer(optax.sgd)


def test_ten_lines_with_nnx():
  boost = ob_nnx.auto_boost("O1", {"less_bn": {"fn_flag": True}}, total_steps=3)
  original, other = filled_nnx_net(0), filled_nnx_net(5)
  model = boost.model(original, X)
  tx = boost.optimizer(optax.sgd(0.05), nnx_loss, model, X)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = boost.train_step(nnx_loss)
  metrics = [step(model, optimizer, X) for _ in range(3)]
  assert metrics[-1]["loss"] < metrics[0]["loss"]
  assert {int(m["frozen_groups"]) for m in metrics} == {0, 1}
  assert isinstance(model.last, ob_nnx.NormalizedDense)
  assert isinstance(model.blocks[0].norms[2], ob_nnx.RemovedBatchNorm)
  evaluated = boost.eval_model(other, model, X)
  model.eval()
  predict = nnx.jit(lambda model: model(X))
  np.testing.assert_array_equal(predict(evaluated), predict(model))
  # Level 0 hands the model through; its form for evaluation is a copy.
  plain = ob_nnx.auto_boost("O0")
  assert plain.model(original, X) is original
  copy = plain.eval_model(original, original, X)
  assert copy is not original
  assert copy.norm9.use_running_average
  assert not original.norm9.use_running_average


def nnx_loss(model, x):
  return jnp.mean((model(x) - 1) ** 2)


def test_ten_lines_with_linen():
  boost = ob_linen.auto_boost("O1", {"less_bn": {"fn_flag": True}}, total_steps=3)
  module = boost.model(LinenNet(), X, train=True)
  variables = jax.jit(module.init)(jax.random.key(0), X)

  def linen_loss(model, x):
    return jnp.mean((model(x, train=True) - 1) ** 2)

  tx = boost.optimizer(optax.sgd(0.05), module, linen_loss, variables, X)
  step = boost.train_step(module, linen_loss, tx)
  state, losses = step.init(variables), []
  for _ in range(3):
    state, metrics = step(state, X)
    losses.append(metrics["loss"])
  assert losses[-1] < losses[0]
  evaluated = boost.eval_model(LinenNet(), X)
  trained = ob_linen.variables(state)
  expected = jax.jit(module.apply)(trained, X)
  np.testing.assert_array_equal(jax.jit(evaluated.apply)(trained, X), expected)
  assert "multiplier" in state.params["last"]
  assert ob_linen.auto_boost("O0").model(module) is module


def train_three_steps(step, state):
  for _ in range(3):
    state, metrics = step(state, DATA)
  return state.params, metrics


def plain_form(config):
  boost = auto_boost("O0", config)
  tx = boost.optimizer(optax.sgd(0.1), params=PARAMS)
  step = boost.train_step(loss_fn, tx)
  return tx, lambda: train_three_steps(step, step.init(PARAMS))


def nnx_form(config):
  boost = ob_nnx.auto_boost("O0", config)
  model = boost.model(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
  tx = boost.optimizer(optax.sgd(0.1), model=model)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  step = boost.train_step(nnx_loss)

  def train():
    for _ in range(3):
      metrics = step(model, optimizer, DATA)
    return nnx.state(model, nnx.Param), metrics

  return tx, train


def linen_form(config):
  boost = ob_linen.auto_boost("O0", config)
  module = boost.model(nn.Dense(2))
  variables = module.init(jax.random.key(0), DATA)
  tx = boost.optimizer(optax.sgd(0.1), module, nnx_loss, variables)
  step = boost.train_step(module, nnx_loss, tx)
  return tx, lambda: train_three_steps(step, step.init(variables))


# How each form starts, and its loss as a function of the params.
def _nnx_pure(params, x):
  graphdef, _ = nnx.split(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
  return nnx_loss(nnx.merge(graphdef, params), x)


FORMS = {
  "plain": (plain_form, lambda: PARAMS, loss_fn),
  "nnx": (
    nnx_form,
    lambda: nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Param),
    _nnx_pure,
  ),
  "linen": (
    linen_form,
    lambda: nn.Dense(2).init(jax.random.key(0), DATA)["params"],
    lambda params, x: jnp.mean((nn.Dense(2).apply({"params": params}, x) - 1) ** 2),
  ),
}


def moved(params, step):
  """Params some way along a path that bends."""
  return jax.tree.map(lambda p: p + 0.1 * step * jnp.sin(p + step) + 0.01 * step**2, params)


def test_by_reference_the_subspace_takes_mindspores_steps_through_the_optimizer(tmp_path):
  with np.load(GOLDEN / "dimreduce_linear.npz") as file:
    trace = {key: file[key] for key in file.files}
  hyper = json.loads(str(trace["meta_json"]))["hyper"]
  params = [jnp.asarray(trace["init_w"]), jnp.asarray(trace["init_b"])]
  k, size = hyper["n_components"], params[0].size
  basis = [trace["P"][:, :size].reshape(k, *params[0].shape), trace["P"][:, size:]]
  ones = np.ones(k, np.float32)
  path = str(tmp_path / "pca.npz")
  optax_boost.Subspace(params, basis, ones, ones / k).save(path)
  block = {key: hyper[key] for key in ("rho", "gamma", "alpha", "sigma", "n_components")}
  config = manual(dim_reduce=True) | {"dim_reduce": block | {"pca_mat_path": path}}
  boost = auto_boost("O0", config, reference=True)
  assert "MindSpore's two trials, its steps go through the optimizer given" in boost.explain()

  def loss(params, batch):
    return jnp.mean((batch[0] @ params[0] + params[1] - batch[1]) ** 2)

  def run(tx, steps):
    step = boost.train_step(loss, boost.optimizer(tx, params=params))
    state = step.init(params)
    for t in range(steps):
      state, metrics = step(state, (trace["x"][t], trace["y"][t]))
      yield state.params, metrics["accepted_rho"]

  # The recorded optimizer is an SGD of rate 1.
  for t, (found, rho) in enumerate(run(optax.sgd(1.0), hyper["steps"])):
    np.testing.assert_allclose(rho, trace["rho"][t])
    np.testing.assert_allclose(found[0], trace["weight_w"][t], atol=5e-6)
    np.testing.assert_allclose(found[1], trace["weight_b"][t], atol=5e-6)
  ((slower, _),) = run(optax.sgd(0.1), 1)
  assert np.abs(slower[0] - trace["weight_w"][0]).max() > 1e-2


@pytest.mark.parametrize("path", [None, "nowhere.npz"])
def test_a_subspace_needs_a_file_and_the_params(path):
  config = manual(dim_reduce=True) | {"dim_reduce": {"pca_mat_path": path}}
  got = "None" if path is None else "'nowhere.npz', which does not exist"
  message = rf"`dim_reduce.pca_mat_path` must name a file of `Subspace.save`.*; got {got}\. Fit"
  for make in (plain_form, nnx_form, linen_form):
    with pytest.raises(ValueError, match=message):
      make(config)
  for make in (auto_boost, ob_nnx.auto_boost, ob_linen.auto_boost):
    with pytest.raises(ValueError, match=r"`dim_reduce` is on, .* pass the params; for a Flax"):
      make("O0", config).optimizer(optax.sgd(0.1))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.name)
def test_the_example_configurations_train(path):
  boost = auto_boost("O1", path)
  boost = dataclasses.replace(
    boost, config=BoostConfig.from_dict({"grad_freeze": {"param_groups": 2}}, boost.config)
  )
  tx = boost.optimizer(optax.sgd(0.1), loss_fn, PARAMS, DATA)
  params, _ = train(boost.train_step(loss_fn, tx), steps=4)
  assert loss_fn(params, DATA) < loss_fn(PARAMS, DATA)


def test_layers_of_a_scan_count_each_for_itself():
  def loss(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["blocks"])
    return jnp.mean(h @ params["head"])

  params = {"blocks": jnp.arange(48.0).reshape(3, 4, 4) / 48, "head": jnp.ones((4, 1))}
  boost = auto_boost("O1", {"less_bn": {"gc_flag": True}}, total_steps=10)
  tx = boost.optimizer(optax.sgd(1.0), loss, params, jnp.eye(4))
  updates, _ = tx.update(params, tx.init(params), params)
  expected = [w - jnp.mean(w, 0) for w in params["blocks"]]
  np.testing.assert_allclose(updates["blocks"], -jnp.stack(expected), rtol=1e-5, atol=1e-6)
  assert "nothing: only the forms for Flax change the model" in boost.explain()
