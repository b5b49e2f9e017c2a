"""Triton kernels for CUDA: a record's gradient norm, and the weighted sum, without writing a gradient out.

A program forms one tile of a record's g^T a on the tensor cores, with float32 accumulation of exact bfloat16 products.
`outer_norms` squares the tile and adds it up; `weighted_outer` multiplies it by the record's factor, in float32, and
adds it to the tile of the sum. No value is rounded to bfloat16 on the way, and no two programs add to one number, so a
repeated run gives the same bits. Without Triton, `factors` has the same formulas in plain torch.

Tile sizes were chosen on an H200. What must not happen in an inner loop: a branch, a reduction
across threads, or a load that waits for another; each costs more than the products themselves.
"""

# pyright: reportMissingImports=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

EPS = 2.0**-22  # of one accumulation step on the tensor cores, which align and cut off rather than round
COLUMNS = 256  # of one program that sums over tokens
PROGRAMS = 512  # about as many as keep the largest GPUs busy


def usable(x: Tensor) -> bool:
    known = x.dtype in (torch.bfloat16, torch.float32) and len(x) < 2**16  # as many as a grid's second axis takes
    return triton is not None and x.is_cuda and known


if triton is not None:

    @triton.jit
    def _token_sums(x_ptr, sum_ptr, square_ptr, column, T, C, x_t, BC: tl.constexpr, SUMS: tl.constexpr):
        """For BC columns: sum_t x_t if SUMS, and sum_t |x_t|^2."""
        c = column * BC + tl.arange(0, BC)
        total = tl.zeros((16, BC), tl.float32)
        squares = tl.zeros((16, BC), tl.float32)
        for start in range(0, T, 16):
            row = start + tl.arange(0, 16)[:, None]
            x = tl.load(x_ptr + row * x_t + c[None, :], (row < T) & (c[None, :] < C), 0.0).to(tl.float32)
            total += x
            squares += x * x
        if SUMS:
            tl.store(sum_ptr + c, tl.sum(total, axis=0), c < C)
        tl.store(square_ptr + column, tl.sum(squares))

    @triton.jit
    def _record_sums(a_ptr, g_ptr, aa_ptr, gg_ptr, sum_ptr, i, column, T, D, P, a_t, g_t, BC: tl.constexpr):
        """The token sums of record i's columns, g's first; a_ptr and g_ptr stand at the record."""
        columns_p = tl.cdiv(P, BC)
        if column < columns_p:
            _token_sums(g_ptr, sum_ptr + i * P, gg_ptr + i * columns_p, column, T, P, g_t, BC, True)
        else:
            _token_sums(a_ptr, sum_ptr, aa_ptr + i * tl.cdiv(D, BC), column - columns_p, T, D, a_t, BC, False)

    @triton.jit
    def _direct_norms(
        a_ptr, g_ptr, square_ptr, aa_ptr, gg_ptr, sum_ptr, T, D, P, a_n, a_t, g_n, g_t,
        BT: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Program (tile, i): squares[i, tile] = ||tile of g^T a||^2. A record's last programs: its token sums."""
        tile = tl.program_id(0)
        i = tl.program_id(1).to(tl.int64)
        tiles_d = tl.cdiv(D, BD)
        tiles = tiles_d * tl.cdiv(P, BP)
        a_ptr += i * a_n
        g_ptr += i * g_n
        if tile < tiles:
            d = (tile % tiles_d) * BD + tl.arange(0, BD)
            p = (tile // tiles_d) * BP + tl.arange(0, BP)
            product = tl.zeros((BP, BD), tl.float32)
            for start in range(0, T, BT):
                row = start + tl.arange(0, BT)[:, None]
                g = tl.load(g_ptr + row * g_t + p[None, :], (row < T) & (p[None, :] < P), 0.0)
                a = tl.load(a_ptr + row * a_t + d[None, :], (row < T) & (d[None, :] < D), 0.0)
                product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
            tl.store(square_ptr + i * tiles + tile, tl.sum(product * product))
        else:
            _record_sums(a_ptr, g_ptr, aa_ptr, gg_ptr, sum_ptr, i, tile - tiles, T, D, P, a_t, g_t, BC)

    @triton.jit
    def _ghost_norms(
        a_ptr, g_ptr, square_ptr, aa_ptr, gg_ptr, sum_ptr, T, D, P, a_n, a_t, g_n, g_t,
        BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Program (tile, i): one tile of token pairs of (a a^T) * (g g^T). A record's last programs: its token sums."""
        tile = tl.program_id(0)
        i = tl.program_id(1).to(tl.int64)
        across = tl.cdiv(T, BT)
        tiles = across * across
        a_ptr += i * a_n
        g_ptr += i * g_n
        if tile < tiles:
            s = (tile % across) * BT + tl.arange(0, BT)[:, None]
            u = (tile // across) * BT + tl.arange(0, BT)[:, None]
            aa = tl.zeros((BT, BT), tl.float32)
            gg = tl.zeros((BT, BT), tl.float32)
            for start in range(0, D, BK):
                c = start + tl.arange(0, BK)[None, :]
                left = tl.load(a_ptr + s * a_t + c, (s < T) & (c < D), 0.0)
                right = tl.load(a_ptr + u * a_t + c, (u < T) & (c < D), 0.0)
                aa = tl.dot(left, tl.trans(right), aa, input_precision=PRECISION)
            for start in range(0, P, BK):
                c = start + tl.arange(0, BK)[None, :]
                left = tl.load(g_ptr + s * g_t + c, (s < T) & (c < P), 0.0)
                right = tl.load(g_ptr + u * g_t + c, (u < T) & (c < P), 0.0)
                gg = tl.dot(left, tl.trans(right), gg, input_precision=PRECISION)
            tl.store(square_ptr + i * tiles + tile, tl.sum(aa * gg))
        else:
            _record_sums(a_ptr, g_ptr, aa_ptr, gg_ptr, sum_ptr, i, tile - tiles, T, D, P, a_t, g_t, BC)

    @triton.jit
    def _weighted(
        a_ptr, g_ptr, factor_ptr, weight_ptr, N, T, D, P, a_n, a_t, g_n, g_t, CHUNK,
        BT: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Program (tile, chunk): one tile of the sum over one chunk of records of factor * g^T a."""
        tile = tl.program_id(0)
        chunk = tl.program_id(1)
        tiles_d = tl.cdiv(D, BD)
        d = (tile % tiles_d) * BD + tl.arange(0, BD)
        p = (tile // tiles_d) * BP + tl.arange(0, BP)
        product = tl.zeros((BP, BD), tl.float32)
        blocks = tl.cdiv(T, BT)
        first = chunk * CHUNK
        last = tl.minimum(first + CHUNK, N)
        for block in range(first * blocks, last * blocks):
            i = block // blocks
            row = (block % blocks) * BT + tl.arange(0, BT)[:, None]
            at = i.to(tl.int64)
            g = tl.load(g_ptr + at * g_n + row * g_t + p[None, :], (row < T) & (p[None, :] < P), 0.0)
            a = tl.load(a_ptr + at * a_n + row * a_t + d[None, :], (row < T) & (d[None, :] < D), 0.0)
            factor = tl.load(factor_ptr + i)
            part = tl.dot(tl.trans(g), a, input_precision=PRECISION)
            product += factor * tl.where(factor > 0, part, 0.0)  # a record left out may hold anything, NaN too
        weight_at = weight_ptr + chunk.to(tl.int64) * P * D + p[:, None] * D + d[None, :]
        tl.store(weight_at, product, (p[:, None] < P) & (d[None, :] < D))


def _over(size: int, block: int) -> int:
    return -(-size // block)


def _power(size: int, largest: int) -> int:
    """The smallest power of two that holds `size`, between 16 and `largest`."""
    return max(16, min(largest, 1 << (size - 1).bit_length()))


def _strides(a: Tensor, g: Tensor) -> tuple[int, ...]:
    return a.stride(0), a.stride(1), g.stride(0), g.stride(1)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _norm_tiles(tokens: int, d: int, p: int, ghost: bool) -> int:
    return _over(tokens, _power(tokens, 64)) ** 2 if ghost else _over(d, _power(d, 128)) * _over(p, _power(p, 128))


def _norm_shapes(a: Tensor, g: Tensor, ghost: bool) -> list[tuple[int, int]]:
    (n, tokens, d), p = a.shape, g.shape[2]
    return [(n, _norm_tiles(tokens, d, p, ghost)), (n, _over(d, COLUMNS)), (n, _over(p, COLUMNS)), (n, p)]


@torch.library.custom_op("straightdp::outer_norms", mutates_args=())
def outer_norms(a: Tensor, g: Tensor, ghost: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a (n, T, d) and g (n, T, p), as parts (n, parts) to be added up: ||sum_t g_t a_t^T||^2, |a|^2 and |g|^2; and
    sum_t g_t, (n, p)."""
    a, g = _rows(a), _rows(g)
    (n, tokens, d), p = a.shape, g.shape[2]
    out = [a.new_empty(shape, dtype=torch.float32) for shape in _norm_shapes(a, g, ghost)]
    grid = (sum(x.shape[1] for x in out[:3]), n)
    arguments = (a, g, *out, tokens, d, p, *_strides(a, g))
    if ghost:
        _ghost_norms[grid](*arguments, BT=_power(tokens, 64), BK=64, BC=COLUMNS, PRECISION=_precision(a))
    else:
        tile = {"BT": 32, "BD": _power(d, 128), "BP": _power(p, 128), "BC": COLUMNS}
        _direct_norms[grid](*arguments, **tile, PRECISION=_precision(a), num_warps=4, num_stages=4)
    return out[0], out[1], out[2], out[3]


@outer_norms.register_fake
def _(a: Tensor, g: Tensor, ghost: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    squares, aa, gg, sums = (a.new_empty(shape, dtype=torch.float32) for shape in _norm_shapes(a, g, ghost))
    return squares, aa, gg, sums


def _sum_tiles(n: int, d: int, p: int) -> tuple[int, int, int, int]:
    """(tile's width, tile's height, tiles, records a chunk): enough programs, few partial sums to write."""
    bd, bp = _power(d, 64), _power(p, 64)
    tiles = _over(d, bd) * _over(p, bp)
    return bd, bp, tiles, _over(n, max(1, min(n, PROGRAMS // tiles)))


@torch.library.custom_op("straightdp::weighted_outer", mutates_args=())
def weighted_outer(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    """sum_i factor_i sum_t g_t a_t^T of a (n, T, d) and g (n, T, p), as parts (parts, p, d) to be added up."""
    a, g, factor = _rows(a), _rows(g), factor.contiguous()
    (n, tokens, d), p = a.shape, g.shape[2]
    bd, bp, tiles, chunk = _sum_tiles(n, d, p)
    weight = a.new_empty(_over(n, chunk), p, d, dtype=torch.float32)
    _weighted[(tiles, len(weight))](
        a, g, factor, weight, n, tokens, d, p, *_strides(a, g), chunk,
        BT=_power(tokens, 128), BD=bd, BP=bp, PRECISION=_precision(a), num_warps=4, num_stages=3,
    )  # fmt: skip
    return weight


@weighted_outer.register_fake
def _(a: Tensor, g: Tensor, factor: Tensor) -> Tensor:
    chunk = _sum_tiles(len(a), a.shape[2], g.shape[2])[3]
    return a.new_empty(_over(len(a), chunk), g.shape[2], a.shape[2], dtype=torch.float32)
