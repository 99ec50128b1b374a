"""Plans of calls, and their signatures: of `GlobalBatchLoss` and miners, of two-tower losses, and of class shards; layouts of samples."""
