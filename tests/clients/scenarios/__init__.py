"""What each Python client is asked to do: with that client and the standard library, in its environment."""
