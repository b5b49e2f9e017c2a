"""A pure function of tensors, made fast: traced as one graph (its backward pass included), compiled, and on CUDA
replayed as a CUDA graph, once for each set of shapes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from straightdp import turns
from straightdp.errors import BadInput


class Compiled:
    """Calls `function(*tensors)`, compiled if `enabled`; otherwise the function itself.

    Parameters that the function closes over may change in place between calls, but not move. What a call returns is
    overwritten by the next one with the same shapes. The function must not draw random numbers. Where it cannot be
    compiled, the function itself runs, with a warning.
    """

    def __init__(self, function: Callable[..., Any], *, enabled: bool):
        self._function, self.enabled = function, enabled
        self._ready: dict[tuple, Callable[..., Any]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.enabled:
            return self._function(*inputs)
        key = tuple((x.shape, x.dtype, x.device) for x in inputs)
        if key not in self._ready:
            with turns.given_up():  # compiling takes a minute, and the device hardly at all
                self._ready[key] = self._prepare(inputs)
        return self._ready[key](*inputs)

    def _prepare(self, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            traced = make_fx(self._function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(
                f"the step cannot be traced ({' '.join(str(error).split())[:200]}): leave compilation off"
            ) from None

        def run(*tensors: Tensor) -> Any:
            with torch.no_grad():
                return compiled(*tensors)

        try:
            compiled = torch.compile(traced, fullgraph=True, dynamic=False)
            if inputs[0].is_cuda:
                return _replayed(run, inputs)
            run(*inputs)
            return run
        except Exception as error:  # no compiler on this machine, or one that cannot do this network
            why = " ".join(str(error).split())[:300] or repr(error)
            warnings.warn(f"not compiled, so slower: {why}", stacklevel=2)
            return self._function


def half(network: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The network in bfloat16 on a GPU; inputs, outputs and everything around it stay float32.

    cuDNN's attention is left out: on Hopper its backward pass is reported to give NaN for some shapes.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

    def run(x: Tensor, *others: Tensor) -> Tensor:
        if not x.is_cuda:
            return network(x, *others).float()
        with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel(kernels):
            return network(x, *others).float()

    return run


def _replayed(run: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
    """`run` captured as a CUDA graph over its own copies of the inputs."""
    static = [x.clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*static)

    def replay(*tensors: Tensor) -> Any:
        for mine, theirs in zip(static, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)
        graph.replay()
        return outputs

    return replay
