"""Products of rows with rows: their form (``forms``), rows as operands (``operands``), and sums of exponentials (``log_sum_exp``)."""
