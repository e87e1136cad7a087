"""The smallest calls, for compute-sanitizer: `compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py`.

Exits with 1 where a result is wrong. No TileLang, no guard zones, no slack behind the index arrays, and every tensor
an allocation of its own, so that an access past an end is one that the tool sees.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from bench.inputs import Geometry, Request, build
from bench.library import load, prefill
from bench.outputs import make_outputs
from bench.reference import LSE_TOLERANCE, OUT_TOLERANCE, attention, lse_error, out_error

REQUESTS = {
    "one row": (Request(1, 1),),
    "ragged": (Request(65, 70), Request(0, 0), Request(3, 129), Request(10, 4)),
}


def main() -> int:
    """Runs every case on every group; prints one line each."""
    library = load()
    wrong = 0
    for group, (name, requests), bad_page in itertools.product((4, 8, 16), REQUESTS.items(), (False, True)):
        device = torch.device("cuda")
        batch = build(Geometry(group, 1), requests, device=device, tail_rows=0, spare_page_ids=0, slack=0)
        if bad_page:
            batch.page_ids[0] = batch.num_pages
        outputs = make_outputs(batch, guard=0)
        prefill(library, batch, outputs, host_indptr=not bad_page)
        torch.cuda.synchronize()
        expected = attention(batch)
        out = out_error(outputs.out[expected.rows], expected.out)
        lse = lse_error(outputs.lse[expected.rows], expected.lse)
        bits = outputs.status_bits()
        right = out <= OUT_TOLERANCE and lse <= LSE_TOLERANCE and bits == (library.STATUS_BAD_PAGE_ID if bad_page else 0)
        wrong += not right
        verdict = "right" if right else "WRONG"
        print(f"group {group}, {name}, bad page {bad_page}: {verdict}, out {out:.1e} lse {lse:.1e} status {bits}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
