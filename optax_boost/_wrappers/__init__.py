"""Wrappers, which hold an optimizer; none imports another.

A wrapper decides which gradients the optimizer gets, whether the optimizer makes its step, and what
happens to the result.

  _accumulation     ``accumulate``: windows of micro-batches, and which of these are dropped
  _average_params   ``average_params``, and the functions that read averages
  _freezing         ``freeze_layers`` and its schedules
  _layerwise_decay  ``layerwise_decay``: a learning rate factor for each group of layers
  _precision        ``dynamic_loss_scale``, ``master_weights``, ``stochastic_rounding``
  _skip_spikes      ``skip_spikes``: skips a step whose gradient norm is far above the usual
  _switch           ``switch_after``: one transformation for some steps, then another
"""
