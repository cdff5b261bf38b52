"""Calling of tools: what the model is told, how its answer is constrained and read."""
