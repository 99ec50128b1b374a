"""Tensors of the rows of all ranks, of which each rank holds its own, and what an operator does with them.

| file | content |
|---|---|
| ``call`` | `RowsCall`: what ranks compare in each exchange of a call, and copies that must not be written to |
| ``exchange``, ``maps`` | several sums in one exchange; the six maps from rows to plain tensors and back, with gradients |
| ``listed`` | the exchanges of earlier calls, whose sums do not need a handshake |
| ``pending``, ``deferred`` | sums that are exchanged together when a value is needed, and the operators that wait for them |
| ``nests`` | arguments of operators |
| ``tensor`` | `GlobalRows`, the table of rules by operator (`RULES`), and what happens to an operator without a rule |
| ``local``, ``views``, ``sums``, ``products``, ``losses`` | the rules: row by row, other shapes, over rows, rows by rows, torch's losses |
| ``evaluation`` | opens the arguments of a call, runs a formula, and closes it |
"""
