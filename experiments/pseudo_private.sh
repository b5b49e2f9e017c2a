#!/usr/bin/env bash
# The MNIST recipe with Fashion-MNIST in MNIST's place: what knobs may be looked at on.
#   experiments/pseudo_private.sh OUT [--set section.key=value ...]
set -euo pipefail
out=$1; shift
exec python3 -m straightdp run experiments/mnist.toml --out "$out" --resume \
  --set 'private.data="fashion-mnist:train"' --set 'private.holdout="fashion-mnist:test"' \
  --set 'private.classes=["t-shirt","trouser","pullover","dress","coat","sandal","shirt","sneaker","bag","ankle boot"]' \
  --set 'private.caption="the garment {label}"' \
  --set 'privacy.pinned_key="00000000000000000000000000000000000000000000000000000000000000aa"' "$@"
