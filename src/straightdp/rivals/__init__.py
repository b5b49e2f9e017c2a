"""Other methods under the same protocol: what the paper compares StraightDP with."""
