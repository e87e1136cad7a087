"""gelu_mul: against PyTorch's gelu_tanh, over column bands, and past the extremes of bf16."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from .harness import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("library")]

FILL = 0x7FA5  # a NaN that no rounding gives
GUARD = 64  # elements of nobody on either side of out


def gelu_mul(library: ModuleType, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The library on bf16 [rows, columns], views of wider rows allowed; checks that nothing around the result is written."""
    rows, columns = gate.shape
    buffer = torch.empty(rows * columns + 2 * GUARD, dtype=torch.bfloat16, device=DEVICE)
    buffer.view(torch.int16).fill_(FILL)
    out = buffer[GUARD : GUARD + rows * columns].view(rows, columns)
    bands: dict[str, int] = {}
    for name, part in (("gate", gate), ("up", up)):
        offset = part.storage_offset()
        bands |= {
            f"{name}_in": part.data_ptr() - 2 * offset,
            f"{name}_band_offset": offset,
            f"{name}_band_length": columns,
            f"{name}_row_stride": part.stride(0),
        }
    stream = torch.cuda.current_stream().cuda_stream
    library.gelu_mul(out=out.data_ptr(), rows=rows, columns=columns, stream=stream, **bands)
    torch.cuda.synchronize()
    assert (buffer[:GUARD].view(torch.int16) == FILL).all() and (buffer[-GUARD:].view(torch.int16) == FILL).all()
    return out


def reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """transformers' GELUTanh on bf16, then the product: both rounded. In fp64, so that 1 + tanh does not cancel."""
    activated = torch.nn.functional.gelu(gate.double(), approximate="tanh").to(torch.bfloat16)
    return activated * up


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within a bf16 ulp: the activation may round the other way next to a tie. fp64 loses 1 + tanh below about 1e-15,
    and below bf16's normal numbers an ulp is no share of the value."""
    off = (found.float() - wanted.float()).abs()
    assert (off <= 2.0**-7 * wanted.float().abs() + 1e-13).all(), f"off by {float(off.max())}"
    share = float((found.view(torch.int16) == wanted.contiguous().view(torch.int16)).float().mean())
    assert share >= 0.98, f"only {share:.1%} of the bits are equal"


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (2 * torch.randn(shape, device=DEVICE, generator=generator)).to(torch.bfloat16)


@pytest.mark.parametrize("columns", [8, 1024, 1032, 2112, 6144, 21504])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_against_pytorch(library: ModuleType, rows: int, columns: int) -> None:
    gate, up = normal(rows, columns, seed=1), normal(rows, columns, seed=2)
    assert_close(gelu_mul(library, gate, up), reference(gate, up))


def test_more_rows_than_a_grid_has(library: ModuleType) -> None:
    gate, up = normal(70_001, 16, seed=3), normal(70_001, 16, seed=4)
    assert_close(gelu_mul(library, gate, up), reference(gate, up))


def test_bands_of_a_fused_row(library: ModuleType) -> None:
    columns = 2112
    fused = torch.full((33, 2 * columns + 3 * 40), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    gate, up = fused[:, 40 : 40 + columns], fused[:, 80 + columns : 80 + 2 * columns]
    gate.copy_(normal(33, columns, seed=5))
    up.copy_(normal(33, columns, seed=6))
    found = gelu_mul(library, gate, up)
    apart = gelu_mul(library, gate.contiguous(), up.contiguous())
    assert torch.equal(found.view(torch.int16), apart.view(torch.int16))
    assert_close(found, reference(gate, up))


def test_every_bf16_number(library: ModuleType) -> None:
    """All 65,536 patterns as the gate: no NaN but from a NaN or minus infinity, and the identity far above zero."""
    patterns = torch.arange(-(1 << 15), 1 << 15, device=DEVICE).to(torch.int16).view(torch.bfloat16).view(64, 1024)
    found = gelu_mul(library, patterns, torch.ones_like(patterns))
    finite = patterns.isfinite()
    assert found[finite].isfinite().all()
    high = finite & (patterns > 10)
    assert torch.equal(found[high], patterns[high])
    assert (found[finite & (patterns < -20)] == 0).all()
    middle = finite & (patterns.abs() < 5)
    assert_close(found[middle], reference(patterns[middle], torch.ones_like(patterns[middle])))
    assert (found[patterns == float("inf")] == float("inf")).all()
    assert found[patterns.isnan()].isnan().all()


def test_a_rows_bits_are_its_own(library: ModuleType) -> None:
    gate, up = normal(20, 6144, seed=7), normal(20, 6144, seed=8)
    whole = gelu_mul(library, gate, up)
    for row in (0, 7, 19):
        alone = gelu_mul(library, gate[row : row + 1].clone(), up[row : row + 1].clone())
        assert torch.equal(alone[0].view(torch.int16), whole[row].view(torch.int16))


def test_no_rows(library: ModuleType) -> None:
    gelu_mul(library, normal(0, 64), normal(0, 64))
