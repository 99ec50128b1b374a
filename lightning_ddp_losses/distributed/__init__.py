"""What the ranks do together, over public ``torch.distributed``: groups, handshakes, collectives, shards, fingerprints."""
