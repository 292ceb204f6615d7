"""The books as people are shown them: what the ledger says, whose it is, and where memory went."""
