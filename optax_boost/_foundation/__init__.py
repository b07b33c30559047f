"""Functions on arguments, trees, arrays and files; none depends on an optimizer or a method.

The modules, each of which imports those before it:

  _types            types of the trees and arrays that pass between modules
  _missing_package  the error for a missing package that an extra of optax_boost installs
  _files            a function that writes a whole file, or no file if writing fails
  _paths            paths of leaves
  _leaf_names       names of leaves that mean a bias, a normalization, a kernel, or an embedding
  _warnings         ``NoEffectWarning``, and warnings that point to the user's line
  _checks           checks of arguments: numbers, names, functions, random keys, transformations
  _progress         a progress bar
  _placement        shardings, and the memory that holds an array
  _arrays           dtypes, sums, counters, stacks of small leaves
  _mesh_axes        names of mesh axes, and the mesh axes along which an array varies
  _conditionals     computations that run if a condition holds, in place where XLA can
  _masks            leaves that ``optax.masked`` or ``optax.partition`` hides
  _patterns         patterns (globs) of the paths of leaves
  _selectors        arguments that select leaves: patterns, trees of bools, functions
  _path_mask        ``path_mask``: a mask that selects leaves by their path
  _trees            maps over trees, nodes of trees, functions that run once per tree
  _tree_checks      checks of gradients, params and states
  _extra_args       extra arguments of ``update``: gradients, functions of params
  _full_gradient    ``full_gradient``: the mean of gradients over batches, which methods use
"""
