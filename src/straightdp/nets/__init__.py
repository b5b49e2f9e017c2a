"""Networks: the dual-stream MM-DiT, its frozen caption encoder, and small classifiers."""
