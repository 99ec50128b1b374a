"""Texts of several vectors each, compared vector by vector over the rows of all ranks: ``MaxSimLoss``."""
