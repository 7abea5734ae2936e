"""Compile the Triton kernels for compute capability 9.0, which needs no GPU; prints what the PTX has."""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_scalevec.execution import kernels

TYPES = {"gamma": "*fp32", "partials": "*fp32", "totals": "*fp64", "width": "i32"}
# Tables are allocations of their own, which torch aligns.
ALIGNED = {"shards", "blocks", "gamma", "partials", "totals", "vectors", "order", "width"}


def compile_for(kernel, live: str = "", aligned: bool = True) -> dict[str, int]:
    known = {**TYPES, "like": live}
    signature = {
        name: "constexpr" if name.isupper() else known.get(name, "*i64") for name in kernel.arg_names
    }
    constants = {"ROWS": kernels.ROWS, "COLUMNS": kernels.COLUMNS, "ALIGNED": aligned}
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in ALIGNED
    }
    source = ASTSource(kernel, signature, {n: constants[n] for n in signature if n in constants}, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    ptx = made.asm["ptx"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    return {
        "cubin": len(made.asm["cubin"]),
        "atomics": count(r"\b(?:atom|red)\."),
        "to_bf16": count(r"cvt\.rn\.bf16"),
        "vector_loads": count(r"ld\.global[\w.]*\.v4\.b32"),
        "vector_stores": count(r"st\.global[\w.]*\.v[248]\.b32"),
        "single_loads": count(r"ld\.global[\w.]*\.b32 "),
        "shared": made.metadata.shared,
    }


results = {
    "split": compile_for(kernels.split_kernel),
    "split unaligned": compile_for(kernels.split_kernel, aligned=False),
    "reduce": compile_for(kernels.reduce_kernel),
    "fold": compile_for(kernels.fold_kernel, "*bf16"),
    "fold unaligned": compile_for(kernels.fold_kernel, "*bf16", aligned=False),
}
json.dump(results, sys.stdout)
