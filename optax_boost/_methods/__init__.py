"""Methods, which rewrite gradients or the model. No method imports another method.

``_layer_arguments`` checks the arguments `exclude`, `layers` and `axis_name` of several methods.
"""
