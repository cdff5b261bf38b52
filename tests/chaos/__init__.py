"""Chaos: everything at once against a real server process, beside canaries whose answers must not change."""
