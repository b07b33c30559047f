"""Compositions that are known to be wrong, which the tests expect to fail.

A test of one of these that passes fails, so that the list shrinks with the mending.
"""


def orders(text):
  return frozenset(tuple(line.strip().split(" > ")) for line in text.strip().splitlines())


IN_FLOAT32 = orders("""
  apply_if_finite > clip > dynamic_loss_scale
  apply_if_finite > freeze_continuous > accumulate_varying
  average_params > clip > dynamic_loss_scale
  average_params > inject_hyperparams > stochastic_rounding
  average_params > multi_steps > stochastic_rounding
  average_params > stochastic_rounding
  average_params_decay > freeze_gradual > apply_if_finite
  average_params_decay > layerwise_decay > stochastic_rounding
  average_params_decay > stochastic_rounding > clip
  average_params_every > freeze_continuous > dynamic_loss_scale
  average_params_every > freeze_interval > master_weights_key
  average_params_every > freeze_progressive > accumulate_varying
  clip > accumulate_keep > dynamic_loss_scale_hysteresis
  clip > dynamic_loss_scale_hysteresis
  clip > dynamic_loss_scale_hysteresis > apply_if_finite
  clip > dynamic_loss_scale_hysteresis > average_params_decay
  clip > dynamic_loss_scale_hysteresis > layerwise_decay
  clip > dynamic_loss_scale_hysteresis > stochastic_rounding
  clip > freeze_continuous > accumulate
  clip > freeze_continuous > apply_if_finite
  clip > freeze_interval > dynamic_loss_scale_hysteresis
  clip > freeze_progressive > master_weights
  clip_after > average_params_decay
  clip_after > master_weights
  clip_after > master_weights_key
  clip_after > stochastic_rounding
  dynamic_loss_scale > freeze_interval > accumulate_varying
  freeze_continuous > accumulate_varying > master_weights
  freeze_continuous > apply_if_finite
  freeze_continuous > dynamic_loss_scale_hysteresis > clip
  freeze_continuous > stochastic_rounding
  freeze_continuous > switch_after > apply_if_finite
  freeze_fixed > accumulate > dynamic_loss_scale_hysteresis
  freeze_fixed > accumulate_keep > clip
  freeze_fixed > apply_if_finite > clip
  freeze_fixed > apply_if_finite > multi_steps
  freeze_fixed > master_weights
  freeze_gradual > accumulate > apply_if_finite
  freeze_gradual > accumulate_keep
  freeze_gradual > dynamic_loss_scale_hysteresis > master_weights
  freeze_gradual > master_weights_key > layerwise_decay
  freeze_gradual > switch_after > accumulate
  freeze_interval > accumulate_varying > layerwise_decay
  freeze_interval > apply_if_finite > layerwise_decay
  freeze_interval > apply_if_finite > master_weights_key
  freeze_interval > dynamic_loss_scale
  freeze_interval > dynamic_loss_scale_hysteresis > apply_if_finite
  freeze_interval > inject_hyperparams > master_weights
  freeze_interval > stochastic_rounding > clip
  freeze_progressive > dynamic_loss_scale_hysteresis > layerwise_decay
  freeze_progressive > master_weights_key
  freeze_progressive > multi_steps
  inject_hyperparams > clip > dynamic_loss_scale
  layerwise_decay > accumulate_keep > master_weights_key
  layerwise_decay > accumulate_varying > average_params_every
  layerwise_decay > apply_if_finite > average_params_decay
  layerwise_decay > apply_if_finite > stochastic_rounding
  layerwise_decay > average_params_every
  layerwise_decay > clip > average_params_every
  layerwise_decay > clip > dynamic_loss_scale_hysteresis
  layerwise_decay > clip > master_weights_key
  layerwise_decay > dynamic_loss_scale_hysteresis > average_params_every
  layerwise_decay > dynamic_loss_scale_hysteresis > master_weights_key
  layerwise_decay > freeze_fixed > stochastic_rounding
  layerwise_decay > freeze_gradual > dynamic_loss_scale_hysteresis
  layerwise_decay > freeze_progressive > accumulate_keep
  layerwise_decay > freeze_progressive > apply_if_finite
  layerwise_decay > master_weights
  layerwise_decay > master_weights_key
  layerwise_decay > master_weights_key > average_params_every
  layerwise_decay > partition > stochastic_rounding
  layerwise_decay > stochastic_rounding
  masked > layerwise_decay > average_params_decay
  master_weights > clip > dynamic_loss_scale
  master_weights_key > freeze_continuous > dynamic_loss_scale
  master_weights_key > freeze_progressive > accumulate_keep
  multi_steps > clip_after > master_weights
  stochastic_rounding > freeze_gradual > apply_if_finite
  switch_after > stochastic_rounding
""")

IN_BFLOAT16 = orders("""
  apply_if_finite > master_weights
  apply_if_finite > master_weights_key
  apply_if_finite > stochastic_rounding
  average_params > stochastic_rounding
  average_params_decay > master_weights_key > dynamic_loss_scale
  freeze_continuous > master_weights
  freeze_continuous > master_weights_key
  layerwise_decay > master_weights
  layerwise_decay > master_weights_key
  master_weights_key > accumulate
  master_weights_key > clip
  master_weights_key > dynamic_loss_scale
  master_weights_key > freeze_continuous
  master_weights_key > inject_hyperparams
  master_weights_key > multi_steps
  master_weights_key > switch_after
""")

# Around an optimizer that makes NaN of ordinary gradients.
POISONED = orders("""
  accumulate > master_weights
  average_params > accumulate > master_weights
  average_params > master_weights
  average_params > stochastic_rounding
  dynamic_loss_scale > master_weights
  dynamic_loss_scale > stochastic_rounding
  master_weights
  master_weights > accumulate
  master_weights > freeze_continuous
  master_weights_key
  stochastic_rounding
  stochastic_rounding > accumulate
""")

# Fields that are wrong in whichever composition; the orders are compared without them.
FIELDS = ("MasterWeightsState.count", "StochasticRoundingState.count")

# `dynamic_loss_scale` around such an optimizer counts nothing.
SCALE_IS_SILENT = True

# The doors that let `optax.chain(svrg(...), dynamic_loss_scale(...))` in.
SVRG_BEFORE_A_SCALE = ("apply_gradients",)

# Wrappers inside `average_params`, and doors, whose snapshots in bfloat16 are not rounded.
UNROUNDED_AVERAGES = (
  ((), "update"),
  ((), "apply_gradients"),
  ((), "train_step"),
  (("accumulate_one",), "update"),
)
