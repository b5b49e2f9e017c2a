"""DP-SGD: exact per-record clipping by book-keeping, and the trainer that spends declared steps."""
