"""Several methods at once: by a level of ours, or by the configuration of MindSpore's AutoBoost.

The modules, each of which imports those before it:

  _config           reads a configuration
  _decisions        which methods a level or a configuration turns on, and why
  _method_settings  the transformations that MindSpore's settings of single methods stand for
  _first_windows    computes the loss of a level's first windows once, and refuses positions past a
                    table
  _build            from a level or a configuration to the model and the transformation
"""

from optax_boost._levels._build import AutoBoost as AutoBoost, auto_boost as auto_boost
