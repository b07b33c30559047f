"""Methods, which rewrite updates or the model. No method imports another one.

``_layer_arguments`` checks the arguments `exclude`, `layers` and `axis_name`, which several methods
share.
"""
