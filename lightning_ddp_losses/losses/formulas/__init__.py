"""Formulas of one process over the rows of all ranks, without a module: ``global_rows``."""
