"""Reads from a traced loss the axes of its params, and groups layers by name.

Methods that act layer by layer must know where a layer begins: LARS takes a norm of each layer, and
centralization a mean over the inputs of each output. The names and shapes of params do not tell the
axes of layers and inputs, but the program of the loss does. So the analyses trace the loss, and
follow each leaf of the params to the equations that use the leaf. The analyses compute no arrays.
In which order layers run, the user says by name (``_layer_groups``). Terms:

  leaf        an array of the params. A leaf has *axes*, another value has *dimensions*.
  data        a value that is computed from the batch.
  use         an equation in which a leaf *meets data*: one operand is computed from the leaf,
              another is data, as in ``dot_general`` of a kernel and activations.
  axis map    for a value computed from a leaf: which axis of the leaf runs along each dimension.
  fan-in      the axes of a leaf that a product with its input sums over.
  stacked     the axes along which a leaf holds several kernels, biases or scales: every use of the
              leaf takes one entry along them by a number that the program counts, or `vmap` does.
  layer       one slice of a leaf along its stacked axes; a leaf without stacked axes is one layer.
  block       leaves, or one layer of each of several stacked leaves, that a name stands for.
  group       one block or several blocks in a row. The first groups can be frozen.

An example. The loss scans over two layers, whose kernels are one leaf, and has a head:

>>> import jax, jax.numpy as jnp
>>> params = {"head": jnp.ones((8, 3)), "hidden": jnp.ones((2, 8, 8))}
>>> def loss_fn(params, x):
...   def layer(x, kernel):
...     return jnp.tanh(x @ kernel), None
...   x, _ = jax.lax.scan(layer, x, params["hidden"])
...   return (x @ params["head"]).sum()

*From the loss to its jaxpr.* The leaves are the first arguments of the program:

>>> from optax_boost._trace import _losses
>>> program = _losses.trace(loss_fn, params, (jnp.ones((4, 8)),))
>>> [str(variable.aval) for variable in program.jaxpr.invars]
['float32[8,3]', 'float32[2,8,8]', 'float32[4,8]']
>>> [equation.primitive.name for equation in program.jaxpr.eqns]
['scan', 'dot_general', 'reduce_sum']

*From the jaxpr to uses.* ``_leaf_uses`` interprets the program with abstract values instead of
arrays. An abstract value tells whether it is data, and which axes of a leaf run along its
dimensions. Each step of the scan gets one slice of ``hidden``:

        x [4, 8]                  hidden [2, 8, 8]            head [8, 3]
        data                       axes   0  1  2             axes  0  1
          |                               |  |  |                   |  |
   +------|-------- scan: 2 steps --------|--|--|------+            |  |
   |      |                      sliced --+  |  |      |            |  |
   |      |                                  |  |      |            |  |
   |      v  [4, 8]           kernel [8, 8]  |  |      |            |  |
   |  dot_general  <----- a use of `hidden` -+--+      |            |  |
   |      |   sums over axis 1: the fan-in             |            |  |
   |      |   keeps axis 2: the outputs                |            |  |
   |      v                                            |            |  |
   |     tanh                                          |            |  |
   +------|--------------------------------------------+            |  |
          v  [4, 8]                                                 |  |
      dot_general  <------------- a use of `head` ------------------+--+
          |   sums over axis 0: the fan-in
          |   keeps axis 1: the outputs
          v
      reduce_sum

>>> from optax_boost._trace import _leaf_uses
>>> findings = _leaf_uses.follow(program, params)
>>> (head_use,), (hidden_use, _) = findings.uses  # the other one: a scan slices the leaf
>>> hidden_use.leaf, hidden_use.kind.name, set(hidden_use.fan_in), set(hidden_use.stacked)
(1, 'CONTRACTED', {1}, {0})
>>> head_use.leaf, head_use.kind.name, set(head_use.fan_in), set(head_use.stacked)
(0, 'CONTRACTED', {0}, set())

*From uses to axes.* The uses of a leaf tell which of its axes are layers, fan-in and outputs:

>>> from optax_boost._trace import _layer_axes
>>> described = _layer_axes.layer_axes(loss_fn, params, jnp.ones((4, 8)))
>>> print(described)
head: fan-in (0,), outputs (1,)
hidden: layers (0,), fan-in (1,), outputs (2,)

*From names to groups.* The user gives the names of the layers in the order of the forward pass:

>>> from optax_boost._trace import _layer_groups
>>> print(_layer_groups.layer_groups(params, ["hidden[*]", "head"]))
group 0: 64 parameters (42.1 %), frozen first: hidden[0:1]
group 1: 64 parameters (42.1 %): hidden[1:2]
group 2: 24 parameters (15.8 %), never frozen: head

*Back to the loss.* If the first group is frozen, ``_frozen_scans`` computes the program again with
``hidden`` in two parts, of which the first has no derivative. The scan becomes two scans, and JAX
leaves out the backward pass of the first scan.

The modules, each of which imports those before it:

  _jaxpr          an interpreter of jaxprs; the analyses are its subclasses
  _axis_map       axis maps
  _losses         calls and traces losses, and tells which arguments of a loss are data
  _primitives     ``RULES``: how each primitive moves axis maps. If a primitive has no rule, the
                  axes of the leaves that enter the primitive are unknown, except those that a scan
                  has sliced before, and methods warn
  _uses           what one equation does with a leaf
  _numbers        the integers that a program alone tells, such as the index of a layer
  _data_kinds     which arguments and constants count as data
  _leaf_walk      the interpreter that notes where leaves meet data
  _leaf_uses      ``follow``: the uses of each leaf
  _layer_axes     ``layer_axes``: the axes of each leaf, as its uses tell
  _layer_groups   ``layer_groups``: makes groups of layers from their names
  _position_tables  finds the tables of learned positions
  _frozen_scans   evaluates a loss with frozen layers in its scans
  _leaf_scans     finds the leaves that only scans slice, and evaluates a loss with such leaves
  _summing_scans  evaluates a loss whose backward pass adds gradients to sums, layer by layer
  _layer_results  computes the results of an optimizer's step one layer at a time
  _updating_scans  evaluates a loss whose backward pass updates params, layer by layer
"""
