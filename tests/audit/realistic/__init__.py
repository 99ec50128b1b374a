"""Small forms of what people train, by field: each healthy module computes on W ranks what one process does.

A sick twin (``sick=True``) has one usual fault.
"""
