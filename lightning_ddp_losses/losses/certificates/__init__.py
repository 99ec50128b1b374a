"""`certify`: is DDP's mean over ranks right for a loss, and if not, which line?

| file | content |
|---|---|
| ``api`` | `certify`: simulated ranks, two traces, the verdict |
| ``tracing`` | one run of a loss under torch's modes of functions and operators |
| ``rules``, ``row_rules``, ``sum_rules``, ``lookups`` | the operators that have a rule, and the kind of their results |
| ``kinds`` | constants, rows, sums over rows, and their arithmetic |
| ``operation`` | an operator as the rules see it, and where it moves rows to |
| ``functions`` | functions of torch that divide by a number inside |
| ``followed_numbers`` | sizes and values as Python computes with them |
| ``lines`` | the user's line that an operator runs for |
| ``memory`` | kinds of tensors, and writes in place |
| ``certificate`` | `Certificate` |
"""

from lightning_ddp_losses.losses.certificates.api import certify
from lightning_ddp_losses.losses.certificates.certificate import Certificate

__all__ = ["Certificate", "certify"]
