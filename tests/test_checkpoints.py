"""Snapshots from directories that Orbax wrote."""

import builtins
import shutil
from typing import NamedTuple

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import optax_boost


class Weights(NamedTuple):
  kernel: jax.Array
  bias: list


def state(step):
  """What a train step's state looks like, with values that tell the step."""
  params = Weights(jnp.full((8, 2), step, jnp.float32), [jnp.full(3, -step, jnp.bfloat16)])
  return {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": step}


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
  """A manager's directory, its steps not in the order of their names."""
  folder = tmp_path_factory.mktemp("managed")
  with ocp.CheckpointManager(folder) as manager:
    for step in (0, 5, 10, 100):
      manager.save(step, args=ocp.args.StandardSave(state(step)))
  return folder


def test_snapshots_come_in_the_order_of_the_steps(managed):
  found = optax_boost.checkpoint_snapshots(managed, subtree="params")
  assert found.steps == [0, 5, 10, 100]
  assert len(found) == 4
  assert [snapshot["kernel"][1, 1] for snapshot in found] == [0, 5, 10, 100]
  assert found[-1]["bias"][0].dtype == jnp.bfloat16
  assert {type(x) for x in jax.tree.leaves(found[0])} == {np.ndarray}


def test_a_slice_is_a_sequence_of_snapshots(managed):
  found = optax_boost.checkpoint_snapshots(managed, subtree="params/bias")[1:3]
  assert found.steps == [5, 10]
  assert [float(snapshot[0][2]) for snapshot in found] == [-5, -10]


def test_numbers_in_a_subtree_count_the_entries_of_lists(managed):
  found = optax_boost.checkpoint_snapshots(managed, subtree="params/bias/0")
  assert found[1].tolist() == [-5, -5, -5]
  momentum = optax_boost.checkpoint_snapshots(managed, state(0)["params"], subtree="opt_state/0/mu")
  assert isinstance(momentum[0], Weights)
  with pytest.raises(ValueError, match=r"has no '7', but \['0', '1'\]"):
    optax_boost.checkpoint_snapshots(managed, subtree="opt_state/7")[0]


def test_snapshots_take_the_tree_and_the_devices_of_the_params(managed):
  mesh = jax.make_mesh((8,), ("x",))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  abstract = jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)
  like = Weights(abstract, [np.zeros(3, np.float32)])
  found = optax_boost.checkpoint_snapshots(managed, like, subtree="params")[1]
  assert isinstance(found, Weights)
  assert found.kernel.sharding.is_equivalent_to(sharding, 2)
  assert np.asarray(found.kernel)[7, 1] == 5
  assert found.bias[0].dtype == np.float32
  assert found.bias[0].tolist() == [-5, -5, -5]


def test_a_flax_state_is_read_back_as_one(tmp_path):
  state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "1", state)
  (found,) = optax_boost.checkpoint_snapshots(tmp_path, like=state)
  chex.assert_trees_all_equal(found, state)


class Attention(NamedTuple):
  query: jax.Array
  value: jax.Array


@pytest.mark.parametrize("make", [Attention, lambda q, v: {"query": q, "value": v}])
def test_a_leaf_that_is_called_value_is_read_back_beside_others(tmp_path, make):
  state = {"attention": make(jnp.zeros(2), jnp.ones(3)), "critic": {"value": jnp.ones(1)}}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "1", state)
  (found,) = optax_boost.checkpoint_snapshots(tmp_path, like=state)
  chex.assert_trees_all_equal(found, state)


def test_the_params_are_read_out_of_a_whole_flax_state(tmp_path):
  rngs = nnx.Rngs(0)
  layers = [nnx.Linear(3, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)]
  model = nnx.Sequential(*layers)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "1", {"model": nnx.state(model)})
  params = nnx.state(model, nnx.Param)
  (found,) = optax_boost.checkpoint_snapshots(tmp_path, like=params, subtree="model")
  chex.assert_trees_all_equal(found, params)


def test_leaves_that_the_params_lack_are_not_read(tmp_path):
  saved = {"attention": {"value": jnp.ones(2), "key": jnp.ones(3)}, "layers": [jnp.ones(4)]}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "1", saved)
  like = {"attention": {"value": jnp.zeros(2)}}
  (found,) = optax_boost.checkpoint_snapshots(tmp_path, like=like)
  chex.assert_trees_all_equal(found, {"attention": {"value": np.ones(2, np.float32)}})


def test_folders_named_by_step_and_nothing_else_are_read(tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    for step in (9, 10):
      checkpointer.save(tmp_path / f"step_{step}", {"w": jnp.full(2, step, jnp.float32)})
  (tmp_path / "step_11.orbax-checkpoint-tmp-7").mkdir()
  (tmp_path / "logs").mkdir()
  (tmp_path / "readme1").write_text("no checkpoint")
  found = optax_boost.checkpoint_snapshots(tmp_path)
  assert found.steps == [9, 10]
  assert found[0]["w"].tolist() == [9, 9]


def test_one_of_several_items_is_read_by_name(tmp_path):
  with ocp.CheckpointManager(tmp_path) as manager:
    items = {
      "params": ocp.args.StandardSave({"w": jnp.ones(2)}),
      "average": ocp.args.StandardSave({"w": jnp.zeros(2)}),
    }
    manager.save(3, args=ocp.args.Composite(**items))
  assert optax_boost.checkpoint_snapshots(tmp_path, item="average")[0]["w"].tolist() == [0, 0]
  with pytest.raises(ValueError, match=r"'3' has \['average', 'params'\] and `item` is None"):
    optax_boost.checkpoint_snapshots(tmp_path)


def test_a_subspace_is_fitted_to_checkpoints(tmp_path):
  rng = np.random.default_rng(0)
  snapshots = [{"w": np.float32(rng.normal(size=(4, 5)))} for _ in range(6)]
  with ocp.StandardCheckpointer() as checkpointer:
    for step, snapshot in enumerate(snapshots):
      checkpointer.save(tmp_path / str(step), snapshot)
  expected = optax_boost.fit_subspace(snapshots, 2)
  found = optax_boost.checkpoint_snapshots(tmp_path, like=snapshots[0])
  chex.assert_trees_all_equal(optax_boost.fit_subspace(found, 2), expected)


def test_iterating_shows_progress(managed, capsys):
  list(optax_boost.checkpoint_snapshots(managed, subtree="params", progress=True))
  assert "reading checkpoints: 100%" in capsys.readouterr().err


def test_a_directory_without_checkpoints_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"folder per checkpoint whose name ends .* found none in"):
    optax_boost.checkpoint_snapshots(tmp_path)
  with pytest.raises(FileNotFoundError, match="nowhere"):
    optax_boost.checkpoint_snapshots(tmp_path / "nowhere")


def test_a_folder_among_the_steps_that_holds_no_checkpoint_is_refused(managed, tmp_path):
  folder = shutil.copytree(managed, tmp_path / "copy")
  (folder / "7").mkdir()
  with pytest.raises(ValueError, match=r"'7' has \[\] and `item` is None"):
    optax_boost.checkpoint_snapshots(folder)


def test_a_folder_beside_the_steps_may_end_with_a_number(managed, tmp_path):
  folder = shutil.copytree(managed, tmp_path / "copy")
  for name in ("logs2024", "plots7", "step_"):
    (folder / name / "2025").mkdir(parents=True)
  assert optax_boost.checkpoint_snapshots(folder).steps == [0, 5, 10, 100]


def test_one_series_of_checkpoints_is_read(tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    for name in ("best_2", "last_2", "9", "10"):
      checkpointer.save(tmp_path / name, {"w": jnp.ones(2)})
  assert optax_boost.checkpoint_snapshots(tmp_path).steps == [9, 10]
  for name in ("9", "10"):
    shutil.rmtree(tmp_path / name)
  with pytest.raises(ValueError, match=r"one series of .* those of \['best_', 'last_'\]"):
    optax_boost.checkpoint_snapshots(tmp_path)


@pytest.mark.parametrize(
  "bad",
  [{"directory": 3}, {"subtree": 3}, {"item": 3}, {"progress": "yes"}, {"like": {"w": "x"}}],
  ids=str,
)
def test_arguments_of_another_kind_are_refused(managed, bad):
  with pytest.raises(TypeError, match=rf"`{next(iter(bad))}` must be"):
    optax_boost.checkpoint_snapshots(**{"directory": managed} | bad)


def test_a_subtree_that_is_not_there_is_refused(managed):
  found = optax_boost.checkpoint_snapshots(managed, subtree="model/params")
  with pytest.raises(ValueError, match=r"has no 'model', but \['opt_state', 'params', 'step'\]"):
    found[0]


def test_params_of_another_model_are_refused(managed):
  like = {"kernel": jnp.zeros((8, 2)), "bias": [jnp.zeros(4)]}
  found = optax_boost.checkpoint_snapshots(managed, like, subtree="params")
  with pytest.raises(ValueError, match=r"at 'bias/0' .* has \(3,\) and `like` has \(4,\)"):
    found[0]
  like = {"kernel": jnp.zeros((8, 2)), "bias": [jnp.zeros(3)], "scale": jnp.zeros(2)}
  found = optax_boost.checkpoint_snapshots(managed, like, subtree="params")
  with pytest.raises(ValueError, match=r"at 'scale' .* has nothing and `like` has \(2,\)"):
    found[0]


def test_says_that_it_needs_orbax(managed, monkeypatch):
  real = builtins.__import__

  def without_orbax(name, *args, **kwargs):
    if name.startswith("orbax"):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", without_orbax)
  with pytest.raises(ImportError, match=r'needs Orbax. .*`pip install "\.\[checkpoints\]"` in'):
    optax_boost.checkpoint_snapshots(managed)
