"""What one rank knows without its peers: dtypes, the autograd graph, inputs, patched forwards, hidden modules (torch only)."""
