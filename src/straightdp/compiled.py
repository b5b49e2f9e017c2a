"""A pure function of tensors, made fast: traced as one graph (its backward pass included), compiled, and on CUDA
replayed as a CUDA graph, once for each set of shapes.

What was made fast is not believed: on inputs that are made up it must give what the function itself gives. A compiled
step that is wrong would train a wrong network, and would clip private gradients to another bound than is declared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from straightdp import turns
from straightdp.errors import BadInput

CLOSE = 0.25  # of the values' length: rounding to bfloat16, in another order, stays far below, and no fault does

Function = Callable[..., Any]


class Compiled:
    """Calls `function(*tensors)`, made fast if `enabled`; otherwise the function itself.

    Parameters that the function closes over may change in place between calls, but not move. What a call returns is
    overwritten by the next one with the same shapes. The function must not draw random numbers, and must go through
    floating inputs between 0 and 1, and ids of 0, which it is traced, tried and checked with: what a call is given is
    seen by the finished step alone. Where it cannot be compiled, or is wrong compiled, it is captured as it is (CUDA),
    or runs itself, with a warning. Not `traced`, it is captured at once.

    `plain` gives what the function gives, and may take inputs that were `made_up` in its own way from such inputs.
    """

    def __init__(
        self,
        function: Function,
        *,
        enabled: bool,
        traced: bool = True,
        plain: Function | None = None,
        made_up: Callable[[list[Tensor]], list[Tensor]] = list,
    ):
        self._function, self.enabled, self._traced = function, enabled, traced
        self._plain, self._made_up = plain or function, made_up
        self._ready: dict[tuple, Function] = {}
        self._tried: list[tuple[Function, list[Tensor]]] = []

    def __call__(self, *inputs: Tensor) -> Any:
        if not self.enabled:
            return self._function(*inputs)
        key = tuple((x.shape, x.dtype, x.device) for x in inputs)
        if key not in self._ready:
            with turns.given_up():  # compiling takes a minute, and the device hardly at all
                self._ready[key] = self._prepare(inputs)
        return self._ready[key](*inputs)

    def off(self) -> float:
        """How far the fast ways in use are from the function now, on made-up inputs, in parts of its values' length."""
        return max((self._distance(fast, inputs) for fast, inputs in self._tried), default=0.0)

    def _prepare(self, inputs: Sequence[Tensor]) -> Function:
        inputs = self._made_up(_look_alikes(inputs))
        ways: dict[str, Callable[[list[Tensor]], Function]] = {"compiled": self._compiled} if self._traced else {}
        if inputs[0].is_cuda:
            ways["captured"] = lambda given: _replayed(self._function, given)
        for name, way in ways.items():
            try:
                fast = way(inputs)
                found = self._distance(fast, inputs)
            except BadInput:
                raise
            except Exception as error:  # no compiler on this machine, or one that cannot do this network
                why = " ".join(str(error).split())[:300] or repr(error)
                warnings.warn(f"not {name}, so slower: {why}", stacklevel=3)
                continue
            if found <= CLOSE:
                self._tried.append((fast, inputs))
                return fast
            warnings.warn(f"wrong when {name} (off by {found:.2g} of its length), so slower without", stacklevel=3)
        return self._function

    def _compiled(self, inputs: list[Tensor]) -> Function:
        from torch.fx.experimental.proxy_tensor import make_fx

        try:
            traced = make_fx(self._function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        except BadInput:
            raise
        except Exception as error:
            raise BadInput(
                f"the step cannot be traced ({' '.join(str(error).split())[:200]}): leave compilation off"
            ) from None
        compiled = torch.compile(traced, fullgraph=True, dynamic=False)

        def run(*tensors: Tensor) -> Any:
            with torch.no_grad():
                return compiled(*tensors)

        return _replayed(run, inputs) if inputs[0].is_cuda else run

    def _distance(self, fast: Function, inputs: list[Tensor]) -> float:
        """|fast - plain| / |plain|; infinite where one is not finite."""
        one, two = (_values(function(*inputs)) for function in (fast, self._plain))
        length, apart = float(two.norm()), float((one - two).norm())
        if not torch.isfinite(torch.tensor([length, apart])).all():
            return float("inf")
        return apart / length if length > 0 else float(apart > 0)


def _look_alikes(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and types where they are, with nothing of what is in them."""
    generator = torch.Generator().manual_seed(0)

    def look_alike(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros_like(x)
        return torch.empty_like(x, requires_grad=False).copy_(torch.rand(x.shape, generator=generator))

    return [look_alike(x) for x in inputs]


def _values(outputs: Any) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tree_leaves(outputs) if isinstance(x, Tensor)])


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


def _replayed(run: Function, inputs: Sequence[Tensor]) -> Function:
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

    replay.captured = run  # type: ignore[attr-defined]  # the graph holds addresses of what `run` owns, and not a hold on it
    return replay
