"""The serving shell: configuration, command line and HTTP APIs over ``astrai_triton``."""
