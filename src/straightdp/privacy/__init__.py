"""The only room that sees private records. Everything that leaves it is noised, or goes to `private/`."""
