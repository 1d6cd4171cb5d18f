"""The ledger: the state, owner and transfers of every sample from prompt to update, each counted exactly once."""
