"""The books outside the core: the ledger as people are shown it and where memory went; receipts on
disk, prices, statements."""
