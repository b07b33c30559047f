"""Arguments, trees, arrays and files: what every other room uses, and nothing of optimizers.

The modules, each of which imports those before it:

  _types          types of the trees and arrays that pass between modules
  _extras         the error where an extra's package is missing
  _files          files that are written whole or not at all
  _base           argument checks, warnings
  _progress       a progress bar
  _arrays         dtypes, sums, counters, places on devices
  _tree           leaf paths, patterns, checks of trees
  _path_mask      ``path_mask``: a mask that selects leaves by their path
  _masking        leaves that optax hides by masks, gradients among extra arguments
  _conditional    computations under a condition, in place where XLA can
  _full_gradient  ``full_gradient``: a mean over batches, which methods and train steps take
"""
