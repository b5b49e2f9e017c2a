"""How good a release is: utility and quality, each number beside its references."""
