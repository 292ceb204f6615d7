"""What the books say outside the core: prices, receipts on disk, statements."""
