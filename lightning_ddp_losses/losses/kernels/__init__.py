"""Hand-written kernels for the operations between the products of a tile (``compile_tiles="auto"``).

| file | content |
|---|---|
| ``choice`` | which calls they compute, equal on all ranks, and what happens if a kernel fails |
| ``launches`` | functions of tiles that launch a kernel |
| ``element_kernels`` | the kernels, in Triton |
"""
