"""A pure function of tensors, made fast: traced as one graph (its backward pass included), compiled, and on CUDA
replayed as a CUDA graph, once for each set of shapes.

What was made fast is not believed: on inputs that are made up it must give what the function itself gives. A compiled
step that is wrong would train a wrong network, and would clip private gradients to another bound than is declared.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from straightdp import turns
from straightdp.errors import BadInput

CLOSE = 0.1  # of an output's length: well above what bfloat16's rounding, in another order, is reckoned to change
ATTENTION = {
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cpu": [SDPBackend.MATH],
}
"""Kernels that may compute it in bfloat16. Not cuDNN's: on Hopper its backward pass is reported to give NaN for some
shapes. Not the processor's own: its backward pass takes longer than all else together."""

Function = Callable[..., Any]

Speed = Literal["plain", "captured", "compiled"]
"""How a function runs: as it is; as it is, but replayed as a CUDA graph, which spares a GPU the wait for a processor
that names one small operation after another; or compiled first."""


def fastest(device: torch.device | str) -> Speed:
    """On a CPU compiling takes longer than it saves."""
    return "compiled" if torch.device(device).type == "cuda" else "plain"


class Compiled:
    """Calls `function(*tensors)` at a `speed`; on a CPU, what is to be captured runs as it is.

    Parameters that the function closes over may change in place between calls, but not move. What a call returns is
    overwritten by the next one with the same shapes. The function must not draw random numbers, and must go through
    floating inputs between 0 and 1, and ids of 0, which it is traced, tried and checked with: what a call is given is
    seen by the finished step alone. A function that cannot be traced is refused. Where it cannot be compiled, or is
    wrong compiled, it is captured (CUDA), or runs itself, with a warning.

    It is checked on inputs that `made_up` makes of such look-alikes, against `plain`, which gives what the function
    gives; all its outputs as one, or `each` by itself.
    """

    def __init__(
        self,
        function: Function,
        *,
        speed: Speed,
        plain: Function | None = None,
        made_up: Callable[[list[Tensor]], list[Tensor]] = list,
        each: bool = False,
    ):
        self._function, self.speed, self._each = function, speed, each
        self._plain, self._made_up = plain or function, made_up
        self._ready: dict[tuple, Function] = {}
        self._tried: list[tuple[Function, list[Tensor]]] = []

    def __call__(self, *inputs: Tensor) -> Any:
        if self.speed == "plain" or (self.speed == "captured" and not inputs[0].is_cuda):
            return self._function(*inputs)
        key = tuple((x.shape, x.dtype, x.device) for x in inputs)
        if key not in self._ready:
            with turns.given_up():  # compiling takes a minute, and the device hardly at all
                self._ready[key] = self._prepare(inputs)
        return self._ready[key](*inputs)

    def off(self) -> float:
        """How far the fast ways in use are from the function now, on made-up inputs, in parts of an output's length."""
        return max((self._distance(fast, inputs) for fast, inputs in self._tried), default=0.0)

    def _prepare(self, inputs: Sequence[Tensor]) -> Function:
        inputs = self._made_up(_look_alikes(inputs))
        ways: dict[str, Callable[[list[Tensor]], Function]] = {}
        if self.speed == "compiled":
            ways["compiled"] = self._compiled
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
            said = f"off by {found:.2g} of its length"
            if (uncaptured := getattr(fast, "captured", None)) is not None:  # where does the fault lie?
                said += f", by {self._distance(uncaptured, inputs):.2g} before it was captured"
            warnings.warn(f"wrong when {name} ({said}), so slower without", stacklevel=3)
            del fast  # and the device memory that it holds
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
        compiled = torch.compile(traced, fullgraph=True, dynamic=False, options=_without_known_faults())

        def run(*tensors: Tensor) -> Any:
            with torch.no_grad():
                return compiled(*tensors)

        return _replayed(run, inputs) if inputs[0].is_cuda else run

    def _distance(self, fast: Function, inputs: list[Tensor]) -> float:
        """|fast - plain| / |plain| of what differs most. Where the plain values are not finite there is nothing to
        compare with: 0."""
        pairs = zip(*(_outputs(function(*inputs)) for function in (fast, self._plain)), strict=True)
        if self._each:
            return max(_apart(one, two) for one, two in pairs)
        return _apart(*(torch.cat(values) for values in zip(*pairs, strict=True)))


def _without_known_faults() -> dict[str, Any]:
    """Mix-order reduction, on by default since torch 2.10, leaves parts of outputs unwritten that are concatenated, as
    a step's gradients are (pytorch issue 193061)."""
    from torch._inductor import config

    return {"triton.mix_order_reduction": False} if hasattr(config.triton, "mix_order_reduction") else {}


def _look_alikes(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same shapes and types where they are, with nothing of what is in them."""
    generator = torch.Generator().manual_seed(0)

    def look_alike(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros_like(x)
        return torch.empty_like(x, requires_grad=False).copy_(torch.rand(x.shape, generator=generator))

    return [look_alike(x) for x in inputs]


def _outputs(values: Any) -> list[Tensor]:
    return [x.detach().double().flatten() for x in tree_leaves(values) if isinstance(x, Tensor)]


def _apart(one: Tensor, two: Tensor) -> float:
    length, apart = float(two.norm()), float((one - two).norm())
    if not math.isfinite(length):
        return 0.0
    if not math.isfinite(apart):
        return math.inf
    return apart / length if length > 0 else float(apart > 0)


def half(network: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The network in bfloat16 where the device multiplies it (`halves`), else in float32."""
    halved = in_bfloat16(network)

    def run(x: Tensor, *others: Tensor) -> Tensor:
        return halved(x, *others) if halves(x.device) else network(x, *others).float()

    return run


def in_bfloat16(network: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The network's products in bfloat16; inputs, outputs and everything around it stay float32."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        kind = x.device.type
        with torch.autocast(kind, dtype=torch.bfloat16), sdpa_kernel(ATTENTION[kind]):
            return network(x, *others).float()

    return run


def halves(device: torch.device | str) -> bool:
    """Whether networks run in bfloat16 there: on a GPU, and on a processor that has instructions for its products."""
    kind = torch.device(device).type
    return kind == "cuda" or (kind == "cpu" and _processor_halves())


def arithmetic(device: torch.device | str) -> str:
    """The kind of device and of products: sums under one noise must be of one kind."""
    kind = torch.device(device).type
    return f"{kind} in bfloat16" if kind == "cpu" and halves(device) else kind


def _processor_halves() -> bool:
    """AVX-512's bfloat16 or AMX, unless STRAIGHTDP_BFLOAT16=off. Where the instructions are missing it is slower than
    float32."""
    if (wanted := os.environ.get("STRAIGHTDP_BFLOAT16", "on")) not in ("on", "off"):
        raise BadInput(f"STRAIGHTDP_BFLOAT16 is {wanted!r}; set it to on or off, or leave it out")
    if wanted == "off":
        return False
    known = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(one() for one in known if one is not None)


def _replayed(run: Function, inputs: Sequence[Tensor]) -> Function:
    """`run` captured as a CUDA graph over its own copies of the inputs."""
    static = [x.clone() for x in inputs]
    here, side, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(2):
            run(*static)
    here.wait_stream(side)
    try:
        with torch.cuda.graph(graph):
            outputs = run(*static)
    finally:
        torch.cuda.set_stream(here)  # where a capture fails, torch may leave its own

    def replay(*tensors: Tensor) -> Any:
        for mine, theirs in zip(static, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)
        graph.replay()
        return outputs

    replay.captured = run  # type: ignore[attr-defined]  # the graph has addresses of what `run` owns, and no hold on it
    return replay
