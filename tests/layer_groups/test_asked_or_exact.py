"""Blocks of models with the names of other libraries are the plain ones, or asked for.

If blocks are asked for, the first line of the question, pasted back, gives the plain ones.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_boost
from optax_boost import LayerSlice
from tests import meshes

X = jnp.ones((2, 4))
RNG = np.random.default_rng(0)


def kernel(*shape):
  return jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32)


def block():
  return {"up": kernel(8, 8), "down": kernel(8, 8)}


def residual(params, h, names):
  for name in names:
    h += jnp.tanh(h @ params[name]["up"]) @ params[name]["down"]
  return h


def model_of(names):
  """Residual blocks with these names in a row, with an embedding and a head; and their loss."""
  params = {"embed": kernel(4, 8), "head": kernel(8, 2)} | {name: block() for name in names}

  def loss(params, x):
    return jnp.mean((residual(params, x @ params["embed"], names) @ params["head"]) ** 2)

  return loss, params


def towers_of(left, right):
  """Two towers of residual blocks side by side, each with an embedding; and their loss."""
  params = {name: kernel(4, 8) for name in ("embed_a", "embed_b")} | {"head": kernel(8, 2)}
  params |= {name: block() for name in (*left, *right)}

  def loss(params, x):
    h = residual(params, x @ params["embed_a"], left)
    h += residual(params, x @ params["embed_b"], right)
    return jnp.mean((h @ params["head"]) ** 2)

  return loss, params


def modules(plan):
  """For each group, the sorted names at the root, in one string."""
  groups = ({str(entry).split("/")[0] for entry in group} for group in plan.groups)
  return [" ".join(sorted(names)) for names in groups]


def answers(loss, params, *args):
  """Checks that layer_groups asks; returns the values of `blocks` that the question proposes."""
  with pytest.raises(ValueError, match="must be told") as question:
    optax_boost.layer_groups(loss, params, *args)
  codes = re.findall(r"blocks=(\(.*?\)|\".*?\")", str(question.value))
  assert len(codes) == len(set(codes)) > 0
  values = [eval(code, {}) for code in codes]
  for value in values:  # each of them is accepted
    optax_boost.layer_groups(loss, params, *args, blocks=value)
  return values


def pasted(loss, params, *args):
  """The modules of the groups that the first line of the question gives."""
  return modules(
    optax_boost.layer_groups(loss, params, *args, blocks=answers(loss, params, *args)[0])
  )


@pytest.mark.parametrize(
  ("names", "pattern"),
  [
    (["block", "block_1", "block_2", "block_3"], "block|block_*"),
    (["conv2d", "conv2d_1", "conv2d_2"], "conv2d|conv2d_*"),
    (["layer_0_enc", "layer_1_enc", "layer_2_enc"], "layer_*_enc"),
    (["stage1_unit1", "stage1_unit2", "stage2_unit1", "stage2_unit2"], "stage*_unit*"),
    (["Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a"], "Mixed_*"),
    ([f"h{i}" for i in range(11)], "h[0-9]*"),
  ],
)
def test_a_number_may_stand_anywhere_in_a_name_and_the_first_block_may_lack_it(names, pattern):
  loss, params = model_of(names)
  plan = optax_boost.layer_groups(loss, params, X)
  assert modules(plan) == ["embed", *names, "head"]
  assert f'blocks: "{pattern}"' in str(plan)
  assert optax_boost.layer_groups(loss, params, X, blocks=pattern) == plan


def test_modules_of_haiku_are_blocks():
  names = [f"net/~/block{suffix}" for suffix in ("", "_1", "_2")]
  params = {"net/~/embed": {"w": kernel(4, 8)}, "net/~/head": {"w": kernel(8, 2)}}
  for name in names:
    params |= {f"{name}/~/linear{suffix}": {"w": kernel(8, 8)} for suffix in ("", "_1")}

  def loss(params, x):
    h = x @ params["net/~/embed"]["w"]
    for name in names:
      up, down = (params[f"{name}/~/linear{suffix}"]["w"] for suffix in ("", "_1"))
      h += jnp.tanh(h @ up) @ down
    return jnp.mean((h @ params["net/~/head"]["w"]) ** 2)

  plan = optax_boost.layer_groups(loss, params, X)
  assert plan.groups == (
    ("net/~/embed/w",),
    *((f"{name}/~/linear/w", f"{name}/~/linear_1/w") for name in names),
    ("net/~/head/w",),
  )


def test_a_module_before_number_zero_is_no_block():
  names = ["block_0", "block_1", "block_2"]
  loss, params = model_of(["block", *names])
  assert modules(optax_boost.layer_groups(loss, params, X)) == ["block embed", *names, "head"]


MODALITIES = ("rgb", "spectrogram")


def bottleneck_transformer(layers=4, first_fused=2):
  """MBT's names: two towers that exchange tokens from one of the layers on."""
  names = [[f"encoderblock_{i}_{modality}" for i in range(layers)] for modality in MODALITIES]
  _, params = towers_of(*names)

  def loss(params, x):
    towers = [x @ params["embed_a"], x @ params["embed_b"]]
    shared = jnp.zeros_like(towers[0])
    for i, pair in enumerate(zip(*names, strict=True)):
      shared = shared if i >= first_fused else jnp.zeros_like(shared)
      towers = [residual(params, h + shared, [n]) for h, n in zip(towers, pair, strict=True)]
      shared = sum(towers) / 2
    return jnp.mean((sum(towers) @ params["head"]) ** 2)

  return loss, params


@pytest.mark.parametrize(
  ("model", "left", "right"),
  [
    (bottleneck_transformer(), *((f"encoderblock_*_{m}") for m in MODALITIES)),
    (
      towers_of([f"block_{i}" for i in range(4)], [f"block_{i}_spec" for i in range(4)]),
      "block_[0-9]",
      "block_*_spec",
    ),
    (
      towers_of(*([f"tower_{t}_block_{i}" for i in range(4)] for t in range(2))),
      "tower_0_block_*",
      "tower_1_block_*",
    ),
  ],
  ids=["MBT", "a number in the middle", "two numbers"],
)
def test_towers_are_asked_about_and_the_first_answer_has_them_side_by_side(model, left, right):
  assert answers(*model, X)[0] == (left, right)
  embed, *blocks, head = pasted(*model, X)
  assert (embed, head) == ("embed_a embed_b", "head")
  names = [[name.split() for name in blocks][i] for i in range(4)]
  assert all(
    len(pair) == 2 and all(str(i) in name for name in pair) for i, pair in enumerate(names)
  )


def test_a_second_tower_without_numbers_is_asked_about():
  loss, params = towers_of([f"block_{i}" for i in range(4)], ["first", "second", "third"])
  assert answers(loss, params, X)[0] == ("block_*", "first|second|third")
  assert pasted(loss, params, X) == [
    "embed_a",
    *("block_0 embed_b", "block_1 first", "block_2 second", "block_3 third"),
    "head",
  ]


def test_modules_of_a_second_tower_are_proposed_not_the_tower_as_one_block():
  names = [[f"block_{i}" for i in range(4)], ["first", "second", "third"]]
  params = {"image": {n: block() for n in names[0]}, "text": {n: block() for n in names[1]}}

  def loss(params, x):
    towers = [residual(params[t], x, n) for t, n in zip(("image", "text"), names, strict=True)]
    return jnp.mean(towers[0] * towers[1])

  expected = ("image/block_*", "text/first|text/second|text/third")
  assert answers(loss, params, jnp.ones((2, 8)))[0] == expected


def test_a_body_without_numbers_before_numbered_modules_is_asked_about():
  names = ["stem", "trunk", "tail", "proj_0", "proj_1"]
  assert pasted(*model_of(names), X) == ["embed", *names, "head"]


def test_a_few_kernels_beside_the_blocks_are_not_asked_about():
  loss, params = model_of([f"block_{i}" for i in range(3)])
  params |= {"time": kernel(4, 2)}

  def with_time(params, x):
    return loss(params, x) + jnp.mean(x @ params["time"])

  plan = optax_boost.layer_groups(with_time, params, X)
  assert modules(plan) == ["embed", "block_0", "block_1", "block_2", "head time"]


def flat(layers, first_dense, form):
  """Attention and dense layers beside each other, numbered one by one; and the blocks' modules."""

  def name(stem, i):
    return stem if i == 0 and form == "haiku" else f"{stem}_{i}"

  params = {"embed" if first_dense == 0 else name("dense", 0): {"w": kernel(4, 8)}}
  embed = next(iter(params))
  blocks = []
  for i in range(layers):
    k = 2 * i + first_dense
    blocks.append([name("attention", i), name("dense", k), name("dense", k + 1)])
    leaves = ("q", "k", "o") if form != "one kernel" else ("w",)
    params |= {blocks[-1][0]: {leaf: kernel(8, 8) for leaf in leaves}}
    params |= {dense: {"w": kernel(8, 8)} for dense in blocks[-1][1:]}
  params["head"] = {"w": kernel(8, 2)}

  def loss(params, x):
    h = x @ params[embed]["w"]
    for attention, up, down in blocks:
      p = params[attention]
      if form == "one kernel":
        h += jnp.tanh((h @ p["w"]) * (h @ params[up]["w"])) @ params[down]["w"]
      else:
        h += jnp.tanh(h @ p["q"]) * (h @ p["k"]) @ p["o"]
        h += jnp.tanh(h @ params[up]["w"]) @ params[down]["w"]
    return jnp.mean((h @ params["head"]["w"]) ** 2)

  return (loss, params), [embed, *map(" ".join, blocks), "head"]


@pytest.mark.parametrize("first_dense", [0, 1])
@pytest.mark.parametrize("form", ["linen", "haiku", "one kernel"])
def test_blocks_of_several_modules_beside_each_other_are_asked_about(first_dense, form):
  model, expected = flat(3, first_dense, form)
  assert answers(*model, X)[0].count("&") == 6
  assert pasted(*model, X) == [" ".join(sorted(group.split())) for group in expected]


def test_halves_of_blocks_in_modules_of_their_own_are_one_block_each():
  halves = {"attention": "qko", "mlp": "ab"}
  params = {
    half: {f"layer_{i}": {n: kernel(8, 8) for n in names} for i in range(3)}
    for half, names in halves.items()
  }

  def loss(params, x):
    for i in range(3):
      p, m = (params[half][f"layer_{i}"] for half in halves)
      x += jnp.tanh((x @ p["q"]) * (x @ p["k"])) @ p["o"]
      x += jnp.tanh(x @ m["a"]) @ m["b"]
    return jnp.mean(x)

  x = jnp.ones((2, 8))
  first = answers(loss, params, x)[0]
  plan = optax_boost.layer_groups(loss, params, x, blocks=first)
  assert [set(group) for group in plan.groups] == [
    {f"{half}/layer_{i}/{n}" for half, names in halves.items() for n in names} for i in range(3)
  ]


def test_modules_that_a_block_joins_must_select_something():
  loss, params = model_of(["block_0", "block_1"])
  with pytest.raises(ValueError, match=r"has 'block_0&none', which selects nothing"):
    optax_boost.layer_groups(loss, params, X, blocks="block_0&none")


def test_dense_layers_inside_of_blocks_are_not_proposed():
  params = {
    name: {m: {"w": kernel(8, 8)} for m in ("q", "k", "Dense_0", "Dense_1")}
    for name in ("encoder", "decoder", "refiner")
  }

  def loss(params, x):
    for p in params.values():
      x += jnp.tanh((x @ p["q"]["w"]) * (x @ p["k"]["w"]))
      x += jnp.tanh(x @ p["Dense_0"]["w"]) @ p["Dense_1"]["w"]
    return jnp.mean(x)

  proposed = answers(loss, params, jnp.ones((2, 8)))
  assert proposed[0] == "decoder|encoder|refiner"
  assert not any("Dense" in str(value) for value in proposed)


# ---- Layers that the program takes from a leaf by an index

LAYERS = 4


def stack_of(length):
  return {
    "up": kernel(length, 8, 8),
    "down": kernel(length, 8, 8),
    "bias": kernel(length, 8),
    "scale": kernel(length),
  }


STACK = stack_of(LAYERS)


def layer(h, p):
  return h + p["scale"] * jnp.tanh(h @ p["up"] + p["bias"]) @ p["down"]


def at(stack, i):
  return jax.tree.map(lambda leaf: leaf[i], stack)


def scanned(numbers, index=lambda i: i, **options):
  def run(stack, h):
    return jax.lax.scan(lambda h, i: (layer(h, at(stack, index(i))), None), h, numbers, **options)[
      0
    ]

  return run


def in_segments(stack, h):
  """A scan of scans over a leaf's layers, as levanter nests them to rematerialize segments."""
  inner = lambda h, p: (layer(h, p), None)  # noqa: E731
  outer = jax.checkpoint(lambda h, ps: jax.lax.scan(inner, h, ps))
  return jax.lax.scan(outer, h, jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), stack))[0]


def counted(stack, h):
  def body(carry, _):
    h, i = carry
    return (layer(h, at(stack, i)), i + 1), None

  return jax.lax.scan(body, (h, 0), None, length=LAYERS)[0][0]


def in_python(order, take=at):
  return lambda stack, h: functools.reduce(lambda h, i: layer(h, take(stack, i)), order, h)


def unstacked(leaf, i):
  return jnp.unstack(leaf)[i] if leaf.ndim > 1 else leaf[i]


UP, DOWN = range(LAYERS), range(LAYERS)[::-1]
INDEXED = {
  "slices": (lambda stack, h: jax.lax.scan(lambda h, p: (layer(h, p), None), h, stack)[0], UP),
  "segments": (in_segments, UP),
  "scan of arange": (scanned(jnp.arange(LAYERS)), UP),
  "scan of numpy": (scanned(np.arange(LAYERS)), UP),
  "scan backwards": (scanned(jnp.arange(LAYERS), reverse=True), DOWN),
  "scan from the last": (scanned(jnp.arange(LAYERS), lambda i: LAYERS - 1 - i), DOWN),
  "scan of negative indices": (scanned(jnp.arange(LAYERS), lambda i: i - LAYERS), UP),
  "counter": (counted, UP),
  "fori_loop": (
    lambda stack, h: jax.lax.fori_loop(0, LAYERS, lambda i, h: layer(h, at(stack, i)), h),
    UP,
  ),
  "two in an iteration": (
    lambda stack, h: jax.lax.scan(
      lambda h, i: (layer(layer(h, at(stack, 2 * i)), at(stack, 2 * i + 1)), None),
      h,
      jnp.arange(LAYERS // 2),
    )[0],
    UP,
  ),
  "python": (in_python(UP), UP),
  "python from the last": (in_python(DOWN), DOWN),
  "take": (
    in_python(UP, lambda stack, i: jax.tree.map(lambda leaf: jnp.take(leaf, i, 0), stack)),
    UP,
  ),
  "unstack": (
    in_python(UP, lambda stack, i: {k: unstacked(leaf, i) for k, leaf in stack.items()}),
    UP,
  ),
  "split": (
    in_python(UP, lambda s, i: jax.tree.map(lambda leaf: jnp.split(leaf, LAYERS)[i][0], s)),
    UP,
  ),
}


def stacked_model(run):
  def loss(params, x):
    return jnp.mean((run(params["blocks"], x @ params["embed"]) @ params["head"]) ** 2)

  return loss, {"embed": kernel(4, 8), "blocks": STACK, "head": kernel(8, 2)}


@pytest.mark.parametrize("form", INDEXED)
def test_layers_that_the_program_indexes_are_blocks_as_those_of_a_scan(form):
  run, order = INDEXED[form]
  loss, params = stacked_model(run)
  plan = optax_boost.layer_groups(loss, params, X)
  layers = [{LayerSlice(f"blocks/{name}", 0, i, i + 1) for name in params["blocks"]} for i in order]
  assert [set(group) for group in plan.groups] == [{"embed"}, *layers, {"head"}]
  assert 'blocks: "blocks[*]" (4 stacked layers)' in str(plan)
  assert optax_boost.layer_groups(loss, params, X, blocks="blocks[*]") == plan


@pytest.mark.parametrize("form", ["python", "fori_loop", "segments"])
def test_groups_of_indexed_layers_freeze_and_decay_as_those_of_a_scan(form):
  states = []
  for run in (INDEXED["slices"][0], INDEXED[form][0]):
    loss, params = stacked_model(run)
    plan = optax_boost.layer_groups(loss, params, X)
    tx = optax_boost.layerwise_decay(optax.sgd(0.1), plan, 0.5)
    tx = optax_boost.freeze_layers(tx, plan, optax_boost.fixed_freezing(6, 3))
    step = optax_boost.make_train_step(loss, tx, donate=False)
    start = {"embed": jnp.ones((4, 8)), "blocks": STACK, "head": jnp.ones((8, 2))}
    states.append(step(step.init(start), X)[0].params)
  assert np.array_equal(states[1]["blocks"]["up"][:2], STACK["up"][:2])
  assert not np.array_equal(states[1]["blocks"]["up"][2], STACK["up"][2])
  for a, b in zip(*map(jax.tree.leaves, states), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_loops_of_a_jitted_function_are_as_many_as_its_calls():
  @jax.jit
  def run(stack, h):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ stack[i]), h)

  params = {name: kernel(LAYERS, 8, 8) for name in ("encoder", "decoder")}

  def loss(params, x):
    return jnp.mean(run(params["decoder"], run(params["encoder"], x)))

  plan = optax_boost.layer_groups(loss, params, jnp.ones((2, 8)))
  assert plan.groups == tuple(
    (LayerSlice(name, 0, i, i + 1),) for name in ("encoder", "decoder") for i in range(LAYERS)
  )


def test_layers_of_params_that_are_one_array_have_a_name():
  def loss(stack, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0])

  plan = optax_boost.layer_groups(loss, kernel(2, 8, 8), jnp.ones((2, 8)))
  assert "never frozen: params[1:2]" in str(plan)
  whole = optax_boost.layer_groups(lambda w, x: jnp.mean(x @ w), kernel(4, 2), X)
  assert "never frozen: params\n" in str(whole)


@pytest.mark.parametrize("scanned", [False, True])
def test_two_stacks_in_one_module_are_asked_about_by_different_names(scanned):
  params = {"net": {name: kernel(4, 8, 8) for name in ("a", "a_out", "b", "b_out")}}

  def loss(params, x):
    for name in "ab":
      stack = params["net"][name], params["net"][f"{name}_out"]
      if scanned:
        x, _ = jax.lax.scan(lambda h, p: (h + jnp.tanh(h @ p[0]) @ p[1], None), x, stack)
      else:
        for i in range(4):
          x += jnp.tanh(x @ stack[0][i]) @ stack[1][i]
    return jnp.mean(x)

  x = jnp.ones((2, 8))
  first = answers(loss, params, x)[0]
  assert first == "net/a[*]|net/b[*]"
  plan = optax_boost.layer_groups(loss, params, x, blocks=first)
  assert [str(group[0]) for group in plan.groups] == [
    f"net/{name}[{i}:{i + 1}]" for name in "ab" for i in range(4)
  ]


def numbered_stacks(side_by_side):
  """Two stacks of three and four layers, each scanned, in modules named by numbers; their loss."""
  lengths = (3, 4)
  params = {f"stage_{i}": {"scan": stack_of(n)} for i, n in enumerate(lengths)}

  def loss(params, x):
    outputs = []
    for stage in params.values():
      start = x if side_by_side or not outputs else outputs[-1]
      outputs += [jax.lax.scan(lambda h, p: (layer(h, p), None), start, stage["scan"])[0]]
    return jnp.mean(sum(outputs) if side_by_side else outputs[-1])

  return loss, params


def test_numbered_stacks_in_a_row_are_one_series_of_layers():
  loss, params = numbered_stacks(side_by_side=False)
  plan = optax_boost.layer_groups(loss, params, jnp.ones((2, 8)))
  assert [set(group) for group in plan.groups] == [
    {LayerSlice(f"stage_{stage}/scan/{name}", 0, i, i + 1) for name in STACK}
    for stage, length in enumerate((3, 4))
    for i in range(length)
  ]
  assert 'blocks: "stage_*[*]" (7 stacked layers)' in str(plan)
  assert optax_boost.layer_groups(loss, params, jnp.ones((2, 8)), blocks="stage_*[*]") == plan


def test_numbered_stacks_side_by_side_are_asked_about():
  loss, params = numbered_stacks(side_by_side=True)
  assert answers(loss, params, jnp.ones((2, 8)))[0] == ("stage_0[*]", "stage_1[*]")


@pytest.mark.parametrize("times", [1, 2])
def test_experts_that_the_program_indexes_are_no_layers(times):
  params = {"embed": kernel(4, 8), "gate": kernel(8, 4), "head": kernel(8, 2)}
  params |= {"up": kernel(4, 8, 8), "down": kernel(4, 8, 8)}

  def loss(params, x):
    h = x @ params["embed"]
    for _ in range(times):
      gates = jax.nn.softmax(h @ params["gate"])
      experts = [jnp.tanh(h @ params["up"][i]) @ params["down"][i] for i in range(4)]
      h += sum(gates[:, [i]] * expert for i, expert in enumerate(experts))
    return jnp.mean((h @ params["head"]) ** 2)

  plan = optax_boost.layer_groups(loss, params, X, num_groups=2)
  assert not any(isinstance(entry, LayerSlice) for group in plan.groups for entry in group)


def test_a_model_that_samples_by_a_detached_pass_has_a_group_for_each_layer():
  params = {"embed": kernel(4, 8), "head": kernel(8, 2)}
  params |= {f"layer_{i}": {"w": kernel(8, 8)} for i in range(3)}

  def network(params, x):
    h = x @ params["embed"]
    for i in range(3):
      h = jnp.tanh(h @ params[f"layer_{i}"]["w"])
    return h @ params["head"]

  def refined(params, x):
    weights = jax.lax.stop_gradient(jax.nn.softmax(network(params, x)))
    return jnp.mean(network(params, x) ** 2) + jnp.mean(network(params, x * weights[:, :1]) ** 2)

  plan = optax_boost.layer_groups(refined, params, X)
  assert modules(plan) == ["embed", "layer_0", "layer_1", "layer_2", "head"]


def test_positions_that_a_recurrence_takes_step_by_step_are_no_layers():
  params = {
    "cell": {"w": kernel(8, 8), "u": kernel(4, 8)},
    "pos": kernel(2, 8),
    "head": kernel(8, 2),
  }

  def loss(params, x):
    cell = params["cell"]

    def step(h, i):
      return jnp.tanh(h @ cell["w"] + params["pos"][i] + x[i] @ cell["u"]), None

    h, _ = jax.lax.scan(step, jnp.zeros(8), jnp.arange(2))
    return jnp.mean((h @ params["head"]) ** 2)

  assert modules(optax_boost.layer_groups(loss, params, X)) == ["cell pos", "head"]


def test_two_stacks_of_alphafold_are_asked_about_layer_by_layer():
  stacks = {"__layer_stack/extra": 3, "__layer_stack_1/evoformer": 4}
  names = {name: [f"net/{name}/row//{part}" for part in ("up", "down")] for name in stacks}
  params = {"net/embed": {"w": kernel(4, 8)}, "net/head": {"w": kernel(8, 2)}}
  for name, length in stacks.items():
    params |= {part: {"w": kernel(length, 8, 8)} for part in names[name]}

  def loss(params, x):
    h = x @ params["net/embed"]["w"]
    for name, length in stacks.items():
      up, down = (params[part]["w"] for part in names[name])
      h = jax.lax.fori_loop(0, length, lambda i, h, u=up, d=down: h + jnp.tanh(h @ u[i]) @ d[i], h)
    return jnp.mean((h @ params["net/head"]["w"]) ** 2)

  first = answers(loss, params, X)[0]
  plan = optax_boost.layer_groups(loss, params, X, blocks=first)
  assert [set(group) for group in plan.groups] == [
    {"net/embed/w"},
    *(
      {LayerSlice(f"{part}/w", 0, i, i + 1) for part in names[name]}
      for name, length in stacks.items()
      for i in range(length)
    ),
    {"net/head/w"},
  ]


def test_parts_of_a_slice_of_a_scan_are_no_layers():
  params = {"qkv": kernel(4, 3, 8, 8), "out": kernel(4, 8, 8)}

  def body(h, p):
    q, k, v = (h @ p["qkv"][i] for i in range(3))
    return h + jnp.tanh(q * k * v) @ p["out"], None

  def loss(params, x):
    return jnp.mean(jax.lax.scan(body, x, params)[0])

  plan = optax_boost.layer_groups(loss, params, jnp.ones((2, 8)))
  assert plan.groups == tuple(
    tuple(LayerSlice(name, 0, i, i + 1) for name in ("qkv", "out")) for i in range(4)
  )


def test_layers_of_a_shard_are_layers():
  params = {"w": kernel(4, 8, 8), "head": kernel(8, 2)}
  mesh = meshes.mesh((1,), ("data",))
  everywhere = jax.sharding.PartitionSpec()

  def loss(params, x):
    for i in range(4):
      x += jnp.tanh(x @ params["w"][i])
    return jnp.mean((x @ params["head"]) ** 2)

  on_mesh = jax.shard_map(
    loss, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=everywhere, check_vma=False
  )
  plan = optax_boost.layer_groups(on_mesh, params, jnp.ones((2, 8)))
  assert plan == optax_boost.layer_groups(loss, params, jnp.ones((2, 8)))
  assert len(plan.groups) == 5
