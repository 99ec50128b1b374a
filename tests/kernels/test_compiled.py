"""Every kernel compiles to machine code of an H100 or H200 (sm_90), on a machine without a GPU: in a process that does not interpret."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.processes import run_python

DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
KERNELS = "siglip_kernel", "softmax_stats_kernel", "softmax_terms_kernel", "pair_losses_kernel"
PROGRAM = """
import json, sys
from tests.kernels.test_compiled import compiled
print(json.dumps(compiled(sys.argv[1])))
"""


class _Recorder:
    """Stands in the place of a kernel, and compiles it for the arguments of a launch."""

    def __init__(self, kernel: Any, products: str, found: dict[str, Any]) -> None:
        self.kernel, self.products, self.found = kernel, products, found

    def __getitem__(self, grid: Any) -> Any:
        return self._compile

    def _compile(self, *args: Any, num_warps: int, enable_fp_fusion: bool, **named: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        given = {name: each.default for name, each in self.kernel.signature.parameters.items()}
        given |= dict(zip(names, args, strict=False)) | named
        signature, values, aligned = {}, {}, {}
        for place, name in enumerate(names):
            value = given[name]
            if isinstance(value, Tensor):
                signature[name] = f"*{self._type_of(name, value)}"
                if name in (
                    "products",
                    "high",
                    "low",
                    "near_grads",
                    "far_grads",
                ):  # the others are not specialised (``element_kernels``)
                    aligned[(place,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int) and name.islower() and name != "column_stride":
                signature[name] = "i32"
                if name in ("columns", "row_stride") and value % 16 == 0:
                    aligned[(place,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float) and name.islower():
                signature[name] = "fp32"
            else:
                signature[name], values[name] = "constexpr", value
        source = ASTSource(self.kernel, signature, constexprs=values, attrs=aligned)
        options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        self.found[f"{self.kernel.__name__} {len(self.found)}"] = {
            "target": re.findall(r"^\.target (\S+)", ptx, re.MULTILINE),
            "cubin": len(made.asm["cubin"]),
            "elf": made.asm["cubin"][:4].hex(),
            "fused": len(re.findall(r"\bfma\.rn", ptx)),
            "atomic": len(re.findall(r"\b(?:atom|red)\.", ptx)),
            "vectors": len(re.findall(r"ld\.global\S*\.v[248]\.", ptx)),
        }

    def _type_of(self, name: str, value: Tensor) -> str:
        if name == "products":
            return self.products
        kinds = {torch.bool: "i1", torch.int64: "i64", torch.float32: "fp32", torch.bfloat16: "bf16"}
        return kinds[value.dtype]


def compiled(products: str) -> dict[str, Any]:
    """By kernel: what came out for products of a dtype."""
    from tests.doors import element_kernels, launches
    from tests.kernels.cases import CASES

    found: dict[str, Any] = {}
    for name in KERNELS:
        setattr(element_kernels, name, _Recorder(getattr(element_kernels, name), products, found))
    for calls in CASES.values():
        for call in calls(64, 256):
            launches.LAUNCHES[call.func.__name__](torch.zeros(64, 256), *call.args[1:])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_for_a_gpu(dtype: str) -> None:
    done = run_python("-c", PROGRAM, DTYPES[dtype], TRITON_INTERPRET=None, seconds=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    kernels = {name.partition(" ")[0] for name in found}
    assert kernels == {*KERNELS}
    for name, made in found.items():
        assert made["target"] == ["sm_90a"], name
        assert made["elf"] == b"\x7fELF".hex()
        assert made["cubin"] > 1000, name
        assert not made["fused"], name  # said at the launch, not left to triton's default
        assert not made["atomic"], name
        assert made["vectors"], name
    sys.stdout.write(f"{dtype}: {len(found)} kernels\n")
