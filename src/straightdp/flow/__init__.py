"""The straight path and everything that walks along it."""
