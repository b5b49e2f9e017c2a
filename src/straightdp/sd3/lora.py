"""Low-rank adapters on a frozen SD3 transformer: what DP-SGD or distillation trains, and all that is released of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from straightdp.errors import BadInput

TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def add_adapters(net: nn.Module, rank: int, seed: int) -> None:
    """Put W + B A beside every map W of the joint attention of `net.transformer`, in place; freeze everything else.

    A is drawn from N(0, 1/rank^2) and B is zero, so the network still is what it was; alpha = rank, no dropout. Both
    are float32 whatever W is. The values hang on `seed` and the shapes alone, on every device; the global generator
    is left as it is.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise BadInput("adapters need the package peft: pip install straightdp[sd3]") from None
    transformer = net.requires_grad_(False).get_submodule("transformer")
    config = LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=_targets(transformer))
    devices = sorted({p.device.index or 0 for p in net.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices):  # peft's own start, which is not kept
        inject_adapter_in_model(config, transformer)
    generator = torch.Generator().manual_seed(seed)
    for name, p in _adapters(net).items():
        values = torch.randn(p.shape, generator=generator) / rank if ".lora_A." in name else torch.zeros(p.shape)
        p.data = values.to(p.device)
    net.train(net.training)  # what was added too


def _targets(transformer: nn.Module) -> list[str]:
    """All but the last block's `add_q_proj`: nothing hears its caption's answer, so it never has a gradient."""
    maps = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    found = [name for name in maps if name.partition(".attn.")[2] in TARGETS]
    last = f"transformer_blocks.{max(int(name.split('.')[1]) for name in found)}.attn.add_q_proj"
    return [name for name in found if name != last]


def _adapters(net: nn.Module) -> dict[str, nn.Parameter]:
    """By the name that diffusers gives them in a file."""
    return {name.replace(".default.", "."): p for name, p in net.named_parameters() if p.requires_grad}


def adapter_state(net: nn.Module) -> dict[str, Tensor]:
    """Copies of the adapters' values, on the CPU, named as `pipeline.load_lora_weights` of diffusers expects them."""
    return {name: p.detach().cpu().clone() for name, p in _adapters(net).items()}


def load_adapter_state(net: nn.Module, state: dict[str, Tensor]) -> None:
    """Put values into the adapters that `add_adapters` made; every name and shape must be as there."""
    mine = _adapters(net)
    if odd := sorted(mine.keys() ^ state.keys()):
        side = "are missing from the file" if odd[0] in mine else "do not belong to this network"
        raise BadInput(f"adapters {side}, {odd[0]} for one: take the file and the model that were trained together")
    for name, p in mine.items():
        if state[name].shape != p.shape:
            raise BadInput(
                f"adapter {name} has shape {tuple(state[name].shape)}, expected {tuple(p.shape)}: take the rank and "
                "the model that it was trained with"
            )
    with torch.no_grad():
        for name, p in mine.items():
            p.copy_(state[name])
