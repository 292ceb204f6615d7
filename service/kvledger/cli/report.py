"""`kvledger report`: a page about a recorded interval, out of the files of --books."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvledger.cli.moments import moment
from kvledger.errors import SettingRefused


def run(arguments: Sequence[str]) -> int:
    """Writes the page; 0, or 2 if there is nothing to write, or nowhere to."""
    options = _parser().parse_args(list(arguments))
    since, until = options.since or "", options.until or ""
    try:
        if since and until and since >= until:
            raise SettingRefused(f"--from {since} is not before --to {until}; give it a time")
        output = options.output
        if output.is_dir():
            raise SettingRefused(f"--output {output}: it is a folder; name a file in it")
        if not output.parent.is_dir():
            raise SettingRefused(f"--output {output}: there is no folder {output.parent}")
        from kvledger.report.page import report_page

        page = report_page(options.folder, since, until).encode("utf-8", "replace")
        _write(output, page)
    except SettingRefused as error:
        print(f"kvledger report: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {len(page):,} bytes; open it in a browser")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvledger report",
        description="Writes one HTML page about what servers recorded with --books: where memory "
        "and time went, what limited the service, and what it cost.",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="+", help="a folder of --books")
    parser.add_argument(
        "--from",
        dest="since",
        metavar="T",
        type=moment,
        help="from then on: 2026-11-30, or 2026-11-30T12:00:00+01:00; UTC unless it says otherwise",
    )
    parser.add_argument("--to", dest="until", metavar="T", type=moment, help="until before then")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("kvledger-report.html"),
        help="where to; a file of this name is replaced; default: %(default)s",
    )
    return parser


def _write(path: Path, page: bytes) -> None:
    """The whole page or nothing. Only for this user: it says who used what."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(page)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise SettingRefused(f"--output {path}: {error.strerror or error}") from None
