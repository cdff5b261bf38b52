"""Device code, and nothing else: what a program computes. ``ops`` checks, chooses and launches."""
