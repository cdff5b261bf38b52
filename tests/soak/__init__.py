"""A long life of an engine: ``python -m soak`` with ``tests`` on the path, or ``nox -s soak``."""
