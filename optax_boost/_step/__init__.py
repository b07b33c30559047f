"""The step of an optimizer and the wrappers around it: one configuration, one state, one function.

Each wrapper (``accumulate``, ``average_params``, ...) fills a slot of a ``Step``. A wrapper around
wrappers fills a further slot of the same step, so the order in which they are nested has no
meaning. :mod:`_run` has the only order.

The modules, each of which imports those before it; wrappers don't import each other:

  _state            ``StepState``: the state of all slots
  _slots            ``Step``: an optimizer and its slots
  _kept_leaves      keeps leaves that no step trains from the optimizer
  _nesting          refuses a step below the root that must be the root
  _addition         adds gradients to a window inside of the backward pass
  _device_sums      keeps a window's sum of gradients on each device, and reduces these sums
  _run              makes the state, and makes a step: a list of paragraphs
  _wrapper          fills a slot, and makes the transformation of a step
  _apply_gradients  ``apply_gradients``: a step in place
  _accumulation     ``accumulate``: windows of micro-batches
  _average_params   ``average_params``, and the functions that read averages
  _freezing         ``freeze_layers`` and its schedules
  _layerwise_decay  ``layerwise_decay``: a learning rate factor for each group of layers
  _precision        ``dynamic_loss_scale``, ``master_weights``, ``stochastic_rounding``
  _skip_spikes      ``skip_spikes``: leaves out a batch whose gradient norm or loss is a spike
"""
