"""Analyses of a traced loss: the axes of leaves, their order, groups of layers, frozen scans."""
