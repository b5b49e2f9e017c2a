"""Stage 1: class moments released once, the analytic field they define, and the two ports it is used through."""
