"""Forwards the output of workers, to the terminal and to files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import BinaryIO, TextIO

from fusedpg.hvd.run.options import Settings

__all__ = ["Output"]


class Output:
    """The workers' output: with their rank before each line, or in files."""

    def __init__(self, settings: Settings) -> None:
        self._folder = Path(settings.output_filename) if settings.output_filename else None
        self._timestamps = settings.timestamps
        self._digits = len(str(settings.num_proc - 1))
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._begun: dict[tuple[int, str], bool] = {}  # a line that has not ended
        self._closed = False

    def write(self, number: int, name: str, stream: str, data: bytes) -> None:
        """Forwards what a worker has written.

        Args:
            number: of the worker, in the order of their starts.
            name: its rank, or where it is.

        Raises:
            BrokenPipeError: nobody reads this process' output any more; only once.
        """
        out = bytearray()
        prefix = f"[{name}]<{stream}>:"
        if self._timestamps:
            prefix = f"{time.strftime('%a %b %d %H:%M:%S %Y')}{prefix}"
        key = (number, stream)
        for line in data.splitlines(keepends=True):
            begun = self._begun.get(key, False)
            out += line if begun else prefix.encode() + line
            self._begun[key] = not line.endswith((b"\n", b"\r"))
        self._show(sys.stdout if stream == "stdout" else sys.stderr, bytes(out))
        if self._folder is not None:
            self._file(key).write(data)

    def _show(self, stream: TextIO, data: bytes) -> None:
        if self._closed:
            return
        try:
            if hasattr(stream, "buffer"):
                stream.buffer.write(data)
            else:  # a notebook's
                stream.write(data.decode(errors="replace"))
            stream.flush()
        except BrokenPipeError:
            self._closed = True  # the workers' end has output, too
            raise

    def _file(self, key: tuple[int, str]) -> BinaryIO:
        if key not in self._files:
            number, stream = key
            assert self._folder is not None
            folder = self._folder / f"rank.{number:0{self._digits}}"
            folder.mkdir(parents=True, exist_ok=True)
            self._files[key] = (folder / stream).open("wb", buffering=0)
        return self._files[key]

    def close(self) -> None:
        for file in self._files.values():
            file.close()
