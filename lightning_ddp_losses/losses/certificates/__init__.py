"""`certify`: is DDP's mean over ranks right for a loss, and if not, which line?

| file | content |
|---|---|
| ``api`` | `certify`: simulated ranks, two traces, the verdict |
| ``tracing`` | one run of a loss under torch's modes of functions and operators |
| ``rules``, ``row_rules``, ``sum_rules``, ``lookups`` | the operators that have a rule, and the kind of their results |
| ``kinds`` | constants, rows, sums over rows, and their arithmetic |
| ``operation`` | an operator in the form for rules, and the positions to which it moves rows |
| ``functions`` | functions of torch that divide by a number internally |
| ``followed_numbers`` | sizes and values that are used in Python computations |
| ``lines`` | the user's line to which an operator belongs |
| ``memory`` | kinds of tensors, and writes in place |
| ``certificate`` | `Certificate` |
"""

from lightning_ddp_losses.losses.certificates.api import certify
from lightning_ddp_losses.losses.certificates.certificate import Certificate

__all__ = ["Certificate", "certify"]
