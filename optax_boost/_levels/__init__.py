"""``auto_boost``: several methods at once, by a level or by MindSpore's configuration.

The modules, each of which imports those before it:

  _config             reads a configuration
  _decisions          which methods a level or a configuration turns on, and why
  _mindspore_methods  makes the transformations that MindSpore's settings describe
  _build              ``AutoBoost``, which changes the model and wraps the optimizer
"""

from optax_boost._levels._build import AutoBoost as AutoBoost, auto_boost as auto_boost
