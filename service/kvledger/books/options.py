"""Settings of the books: a group of its own among those of the server."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ByteSize, Field

from kvledger.books.prices import Prices, read_prices
from kvledger.books.receipt_files import require_folder

FILE_BYTES_LEAST = 64 << 10


class BooksSettings(BaseModel):
    """What is written of receipts, and what they cost."""

    books: Path | None = Field(
        None,
        description="folder to keep every receipt in, of mode 0700; several servers may share it; "
        "default: receipts are told to clients and kept nowhere",
    )
    books_file_bytes: ByteSize = Field(
        ByteSize(64 << 20),
        ge=FILE_BYTES_LEAST,
        description="size at which the next file of --books is begun, such as 64MiB",
    )
    prices: Path | None = Field(
        None,
        description="TOML file with the price of an hour of the device, for costs in receipts; "
        "read at the start",
    )

    def price_list(self) -> Prices | None:
        """The prices; None without. SettingRefused if the file cannot be used."""
        return None if self.prices is None else read_prices(self.prices)

    def require_books(self) -> None:
        """Raises SettingRefused if what these name cannot be used."""
        self.price_list()
        if self.books is not None:
            require_folder(self.books)
