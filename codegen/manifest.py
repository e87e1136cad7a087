"""share/tilepress/manifest.json: what the library holds and what made it. No times, no paths: two builds agree on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from codegen import abi
from codegen.cache import digest_file
from codegen.gates import Resources
from codegen.lowered import Lowered
from codegen.tree import Tree


def manifest(tree: Tree, nvcc: str, resources: Mapping[str, Resources]) -> str:
    """The manifest's text. resources: of each kernel, as the compiler reported them. nvcc: its version, or none."""
    context = tree.context
    record = {
        "library": context.table.library.name,
        "version": context.table.library.version,
        "tier": context.tier,
        "arch": {"name": context.arch.name, "target": context.arch.target},
        "tilelang": context.table.library.tilelang,
        "nvcc": nvcc,
        "symbols": list(abi.public_symbols(context.table)),
        "entries": [_entry(entry) for entry in abi.entries(context.table)],
        "incumbent": _incumbent(tree),
        "kernels": [_kernel(tree, lowered, resources[lowered.name]) for rows in tree.kernels.values() for lowered in rows],
    }
    return json.dumps(record, indent=2) + "\n"


def _incumbent(tree: Tree) -> dict[str, Any]:
    """The incumbent's release and entries; empty where it was left out."""
    context = tree.context
    release = context.table.flashinfer
    if not context.table.incumbent or release is None:
        return {}
    rows = {row.name: row for row in context.table.incumbent}
    return {
        "flashinfer": release.version,
        "wheel_sha256": release.wheel_sha256,
        "entries": [
            {
                "name": entry.name,
                "unit": entry.unit,
                "variant": entry.variant,
                "head_dims": list(entry.head_dims or rows[entry.unit].head_dims),
                "signature_hash": entry.signature_hash,
            }
            for entry in abi.incumbent(context.table)
        ],
    }


def _entry(entry: abi.Entry) -> dict[str, Any]:
    record = {"name": entry.name, "struct": entry.struct.name, "signature_hash": entry.signature_hash}
    if not isinstance(entry, abi.FamilyEntry):
        return record
    family = entry.family
    return {
        **record,
        "operation": family.operation,
        "head_dim": family.head_dim,
        "page_size": family.page_size,
        "groups": list(family.groups),
        "formats": list(family.formats),
    }


def _kernel(tree: Tree, lowered: Lowered, resources: Resources) -> dict[str, Any]:
    return {
        "name": lowered.name,
        "kernel": lowered.kernel,
        "grid": list(lowered.grid),
        "block": list(lowered.block),
        "cluster": list(lowered.cluster),
        "programmatic": lowered.programmatic,
        "dynamic_shared_bytes": lowered.dynamic_shared_bytes,
        **asdict(resources),
        "nvcc_flags": list(lowered.nvcc_flags),
        "source_sha256": digest_file(tree.root / "generated" / f"{lowered.name}.cu"),
    }
