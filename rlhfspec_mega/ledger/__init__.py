"""The ledger: every sample from prompt to update, its state, its owner and its moves, exactly once."""
