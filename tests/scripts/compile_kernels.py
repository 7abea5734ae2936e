"""Compile the Triton kernels for compute capability 9.0, which needs no GPU; prints what the PTX has."""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_scalevec.execution import kernels

POINTERS = {"grad", "master", "inner", "outer", "over_columns", "over_rows"}


def compile_for(kernel, live: str) -> dict[str, int]:
    signature = {}
    for name in kernel.arg_names:
        if name in POINTERS:
            signature[name] = "*fp32"
        else:
            known = {"live": live, "blocks": "*i32", "start": "i64", "stop": "i64"}
            signature[name] = known.get(name, "constexpr" if name.isupper() else "i32")
    constants = {"ROWS": kernels.ROWS, "COLUMNS": kernels.COLUMNS}
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    ptx = made.asm["ptx"]
    return {
        "cubin": len(made.asm["cubin"]),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", ptx)),
        "to_bf16": ptx.count("cvt.rn.bf16"),
        "shared": made.metadata.shared,
    }


results = {
    "split": compile_for(kernels.split_kernel, ""),
    "fold": compile_for(kernels.fold_kernel, "*bf16"),
}
json.dump(results, sys.stdout)
