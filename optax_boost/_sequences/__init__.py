"""Sequences that begin short: the schedule, the cut, and what lengths cost on a device.

The modules, each of which imports only modules above it:

  _schedule         ``sequence_length_warmup``: the length of each step
  _cut              ``cut_sequences``: cuts the sequences of a batch into windows
  _length_prices    ``length_prices``: the time of a step on windows, by their length
  _loss_of_windows  whether a loss can take windows, and which params are tables of positions
"""

from optax_boost._sequences._cut import (
  LeafAxes as LeafAxes,
  cut as cut,
  cut_sequences as cut_sequences,
  match_axes as match_axes,
)
from optax_boost._sequences._length_prices import length_prices as length_prices
from optax_boost._sequences._loss_of_windows import (
  check_first_windows as check_first_windows,
  position_tables as position_tables,
)
from optax_boost._sequences._schedule import (
  HIGHEST_PRICE as HIGHEST_PRICE,
  LengthSchedule as LengthSchedule,
  read_prices as read_prices,
  sequence_length_warmup as sequence_length_warmup,
)
