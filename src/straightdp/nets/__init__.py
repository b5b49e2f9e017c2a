"""Networks: the dual-stream MM-DiT, a U-Net in its place, their frozen caption encoder, and small classifiers."""
