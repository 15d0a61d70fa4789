"""Which operations of this machine's torch give a row the same bits, whatever the other rows are?

    python benchmarks/exactness.py [--device cuda]

docs/decisions/0002-exactness.md uses this measurement. Every operation runs on 64 rows and on other numbers of rows; a
number is listed if one of the common rows came out with other bits. Run the script on a new CPU or a new torch to see
whether the promise of equal bits can hold there.

"fixed" is what `exact=True` relies on on a GPU (docs/decisions/0014-cuda-runner.md): the number of rows is always the
same, a row moves to another place, and the rows around it change. A place is listed if the row came out with other
bits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ROWS = [*range(1, 70), 96, 100, 127, 128, 129, 200, 255, 256, 257, 512, 777, 1000, 1024, 1025, 2048, 2049, 4096]
FIXED_ROWS = 256
"""As `EXACT_ROWS` in model/runner.py."""
SHIFTS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 64, 100, 127, 128, 129, 200, 255]
LENGTHS = [*range(1, 140), 1000, 32768, 32769, 34048, 50001, 70003, 131077, 199999]


def deviating_rows(op: Callable[[Tensor], Tensor], rows: Tensor, counts: Iterable[int]) -> list[int]:
    """Numbers of rows at which `op` gives one of the first 64 rows other bits than among 64.

    Small numbers are tried with several choices of first rows, because few elements may differ.
    """
    reference = op(rows[:64])

    def deviates(count: int) -> bool:
        starts = range(0, 64, max(count, 4)) if count < 64 else (0,)
        windows = ((start, min(start + count, 64)) for start in starts)
        return any(not torch.equal(op(rows[a : a + count])[: b - a], reference[a:b]) for a, b in windows)

    return [count for count in counts if deviates(count)]


def linear(dtype: torch.dtype, inner: int, outer: int) -> list[int]:
    weight, bias = torch.randn(outer, inner).mul_(0.02).to(dtype), torch.randn(outer).to(dtype)
    return deviating_rows(lambda x: F.linear(x, weight, bias), torch.randn(4096, inner).to(dtype), ROWS)


def batched_product(inner: int, outer: int, batch: int) -> list[int]:
    right = torch.randn(batch, inner, outer)
    rows = torch.randn(4096, batch, inner)
    return deviating_rows(lambda x: torch.bmm(x.transpose(0, 1), right).transpose(0, 1), rows, ROWS)


def row_operation(op: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> list[int]:
    return deviating_rows(op, torch.randn(4096, width).to(dtype), ROWS)


def elementwise(op: Callable[[Tensor], Tensor], dtype: torch.dtype) -> int:
    """The number of lengths (of 148) and offsets (of 5) at which an element of a vector came out with other bits."""
    values = (3 * torch.randn(200_000)).to(dtype)
    reference = op(values)
    by_length = sum(not torch.equal(op(values[:n].clone()), reference[:n]) for n in LENGTHS)
    offsets = (1, 3, 7, 17, 33)
    return by_length + sum(not torch.equal(op(values[o : o + 5000].clone()), reference[o : o + 5000]) for o in offsets)


def deviating_places(op: Callable[[Tensor], Tensor], rows: Tensor) -> list[int]:
    """The distances of a move, with other rows replaced, after which a moved row came out with other bits.

    `rows` [2 * FIXED_ROWS, ...]: the first half are compared, the second half take the places of those moved away.
    """
    own, others = rows[:FIXED_ROWS], rows[FIXED_ROWS:]
    reference = op(own)

    def deviates(shift: int) -> bool:
        down, up = torch.cat((others[:shift], own[:-shift])), torch.cat((own[shift:], others[:shift]))
        return not (
            torch.equal(op(down)[shift:], reference[:-shift]) and torch.equal(op(up)[:-shift], reference[shift:])
        )

    return [shift for shift in SHIFTS if deviates(shift)]


def fixed_shapes() -> dict[str, object]:
    """The operations of a model, on a number of rows that is always the same."""
    found: dict[str, object] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for inner, outer in ((896, 896), (896, 4864), (4864, 896), (8192, 896), (896, 32000), (100, 50)):
            weight, bias = torch.randn(outer, inner).mul_(0.02).to(dtype), torch.randn(outer).to(dtype)
            rows = torch.randn(2 * FIXED_ROWS, inner).to(dtype)
            found[f"linear {name} {inner}->{outer}"] = deviating_places(
                lambda x, w=weight, b=bias: F.linear(x, w, b), rows
            )
        for width in (40, 896, 4864):
            rows = torch.randn(2 * FIXED_ROWS, width).to(dtype)
            for label, op in (("rms_norm", rms_norm), ("softmax", lambda x: x.float().softmax(-1)), ("silu", F.silu)):
                found[f"{label} {name} {width}"] = deviating_places(op, rows)
    return found


def rms_norm(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where to compute (default: cpu)")
    parser.add_argument("--fixed-only", action="store_true", help="measure only what exact=True needs on a GPU")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, f"--device {args.device}: torch {torch.__version__} sees no CUDA device here\n")
    torch.set_default_device(args.device)
    torch.manual_seed(0)
    result = {"fixed": fixed_shapes()} if args.fixed_only else measure()
    where = torch.backends.cpu.get_cpu_capability() if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {where}, {torch.get_num_threads()} threads")
    kinds = {"elementwise": "number of the 153 cases", "fixed": f"places among {FIXED_ROWS} rows"}
    for kind, figures in result.items():
        print(f"\n{kind}: {kinds.get(kind, 'numbers of rows')} with other bits")
        for label, found in figures.items():
            print(f"  {label:34s} {found if found else 'none'}")
    print(json.dumps(result))


def measure() -> dict[str, dict[str, object]]:
    """Measures all operations. Returns what deviates, by kind and operation."""
    result: dict[str, dict[str, object]] = {"linear": {}, "bmm": {}, "rows": {}, "elementwise": {}}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for inner, outer in ((896, 896), (896, 4864), (4864, 896), (8192, 896), (896, 32000), (100, 50)):
            result["linear"][f"{name} {inner}->{outer}"] = linear(dtype, inner, outer)
        for width in (40, 64, 896, 4096):
            for label, op in (("rms_norm", rms_norm), ("softmax", lambda x: x.float().softmax(-1))):
                result["rows"][f"{label} {name} {width}"] = row_operation(op, width, dtype)
        for label, function in (
            ("exp", torch.exp),
            ("tanh", torch.tanh),
            ("cos", torch.cos),
            ("silu", F.silu),
            ("gelu", F.gelu),
            ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
            ("sigmoid", torch.sigmoid),
        ):
            result["elementwise"][f"{label} {name}"] = elementwise(function, dtype)
    for inner, outer in ((64, 256), (256, 64), (128, 256), (40, 256)):
        for batch in (1, 2, 8):
            result["bmm"][f"float32 {batch}x[rows,{inner}]x[{inner},{outer}]"] = batched_product(inner, outer, batch)
    result["fixed"] = fixed_shapes()
    return result


if __name__ == "__main__":
    main()
