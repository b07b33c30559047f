"""The functions that return a transformation."""

import optax_boost
from tests import registry
from tests.bad_input import kinds
from tests.bad_input import problem
from tests.bad_input import shared
from tests.bad_input.kinds import Bad


def entries() -> list[tuple[str, shared.Entry]]:
  axis_name = shared.AXIS_NAME
  lars = {
    "trust_coefficient": shared.POSITIVE,
    "weight_decay": shared.NOT_NEGATIVE,
    "eps": shared.NOT_NEGATIVE,
    "clip": kinds.number(-1, optional=True),
    "exclude": shared.SELECTOR,
    "weight_decay_mask": shared.SELECTOR,
    "layers": shared.LAYERS,
    "axis_name": axis_name,
  }
  layouts = {"layout": shared.NAME, "fan_in_axes": shared.AXES, "stacked_axes": shared.AXES}
  return [
    shared.factory(
      "accumulate",
      inner=shared.TX,
      every=kinds.count(schedule=True),
      not_finite=kinds.name(optional=True),
      axis_name=axis_name,
    ),
    shared.factory(
      "adasum",
      problem.use_on_replicas,
      axis_name=kinds.axis_name(optional=False),
      local_axis_name=axis_name,
      groups=kinds.patterns_or_none(),
      shard_axis_name=axis_name,
      layers=shared.LAYERS,
    ),
    shared.factory(
      "average_params",
      inner=shared.TX,
      start=kinds.count(0, optional=True) | {"and decay": Bad(0, ValueError)},
      decay=kinds.number(0, 1, -1, optional=True),
      every=shared.COUNT,
    ),
    shared.factory(
      "centralize",
      exclude=shared.SELECTOR,
      layout=shared.NAME,
      layers=shared.LAYERS,
      axis_name=axis_name,
    ),
    shared.factory(
      "dim_reduce",
      subspace=shared.SUBSPACE,
      rho=kinds.number(0, 1, -1),
      sigma=shared.SHARE,
      gamma=shared.SHARE,
      alpha=kinds.number(-1, schedule=True),
      max_search=kinds.without(kinds.count(optional=True, static=True), "text")
      | {"name": Bad("fast", shared.EITHER)},
      groups=kinds.without(kinds.groups(optional=True), "dict"),
      inner=kinds.without(shared.TX, "None"),
      min_curvature=kinds.number(-1, optional=True),
    ),
    shared.factory(
      "dynamic_loss_scale",
      inner=shared.TX,
      initial_scale=kinds.number(0, -1, 1e39, 1e-50),
      growth_interval=kinds.count(optional=True),
      hysteresis=shared.COUNT,
      growth_factor=shared.GROWTH,
      backoff_factor=shared.BACKOFF,
      minimum=kinds.number(0, -1, 2.0**30),
      maximum=kinds.number(0, -1, 0.5, 1e39),
      axis_name=axis_name,
      check_params=shared.FLAG,
    ),
    shared.factory(
      "freeze_layers",
      inner=shared.TX,
      groups=shared.GROUPS,
      schedule=kinds.kind(
        {"None": None, "text": "interval", "number": 2, "function": len, "class": type(None)},
        {"of other groups": optax_boost.continuous_freezing(5, 0.5)},
      ),
      key=shared.KEY,
    ),
    shared.factory(
      "laperm",
      inner=shared.TX,
      sync_every=kinds.count(schedule=True),
      exclude=shared.SELECTOR,
      **layouts,
    ),
    shared.factory(
      "lars",
      learning_rate=kinds.number(-1, schedule=True),
      momentum=kinds.number(-0.1, 1, optional=True),
      nesterov=shared.FLAG,
      clip_ratio=shared.FLAG,
      **lars,
    ),
    shared.factory("layerwise_decay", groups=shared.GROUPS, decay=kinds.number(0, -1, 1.5)),
    shared.factory(
      "master_weights", inner=shared.TX, key=kinds.key(optional=True), axis_name=axis_name
    ),
    shared.factory("stochastic_rounding", inner=shared.TX, key=kinds.key(), axis_name=axis_name),
    shared.factory(
      "record_trajectory",
      every=shared.COUNT,
      capacity=kinds.count(static=True),
      dtype=shared.FLOAT_DTYPE,
      axis_name=axis_name,
    ),
    shared.factory(
      "scale_by_lars_trust_ratio",
      clip_ratio=kinds.number(-1, optional=True, schedule=True),
      **lars,
    ),
    shared.factory(
      "sgperm",
      alpha=shared.NOT_NEGATIVE,
      lamda=kinds.number(0, -1, 1.5),
      beta1=kinds.number(0, -1, 1.5),
      beta2=shared.POSITIVE,
      alpha_min=shared.NOT_NEGATIVE,
      lamda_max=kinds.number(0, -1, 1.5),
      momentum_lr=shared.NOT_NEGATIVE,
      momentum=shared.SHARE,
      partition_size_min=kinds.count(static=True),
      include_partition_remainder=shared.FLAG,
      method=shared.NAME,
      backend=shared.NAME,
      key=kinds.key() | {"None": Bad(None, ValueError)},
      **layouts,
    ),
    shared.factory("switch_after", step=kinds.count(0), first=shared.TX, second=shared.TX),
    *(
      shared.factory(row.factory, **row.bad_values)
      for row in registry.ROWS
      if row.bad_values is not None
    ),
  ]
