"""The plans of calls of the two-tower losses and of class shards, and their signatures."""
