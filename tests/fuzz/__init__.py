"""Randomised differential tests: a drawn case runs on ranks with the package, and in one process with none of it.

`engine` judges a case and runs many; each other file is a domain: what its cases are, what a rank does, what one process does.
To add a domain: a file with a `Domain`, and its name in `__main__.DOMAINS`. What is found is minimised into a plain test elsewhere.
"""
