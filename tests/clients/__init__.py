"""The client grid: unmodified clients of both protocols against a real server process."""
