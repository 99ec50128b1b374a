"""Facts that ranks compare, and the rules over them.

===========  ==========================================================================================================
fact         `Fact`: numbers of one rank, the stage that reads them and their rule. The note in which numbers travel
rules        rules about parameters, gradients, optimizers, buffers, batches and devices
loss_rules   rules about losses and logged values
row_noise    the first draw with a row for each sample
user_rows    rows of checks outside this package, which ``measure`` and ``judge``
===========  ==========================================================================================================
"""
