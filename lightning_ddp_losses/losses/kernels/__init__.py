"""Hand-written kernels for what stands between the products of a tile (``compile_tiles="auto"``).

| file | content |
|---|---|
| ``choice`` | which calls they compute, the same on all ranks, and what happens if one fails |
| ``launches`` | functions of tiles that launch a kernel |
| ``element_kernels`` | the kernels, in Triton |
"""
