"""Measurements of the kernels and of the server, and what can be told of the kernels without a GPU."""
