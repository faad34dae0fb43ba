"""Built-in dataset ``demo-pages`` (type ``messages``): questions about a drawn page with one coloured digit.

The digit is at a random place of a white page. The image is a PNG file in the column ``images``::

    user         <image>What is on the page?
    assistant    The digit 7 in red.

Pixels depend on the seed alone: digits are drawn from a table, without fonts.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamtune.data.reading.readers import Row

if TYPE_CHECKING:
    from PIL.Image import Image

PAGES_PATH = "demo-pages"

NUM_PAGES = 4_000

CELLS, CELL = 4, 16
"""Number of cells in a row of a page, and width of a cell in pixels. A digit is in one of the 16 cells."""

DOT = 3
"""Width of a dot of a digit, in pixels."""

DIGITS = (
    *("111 101 101 101 111", "010 110 010 010 111", "111 001 111 100 111", "111 001 111 001 111"),
    *("101 101 111 001 001", "111 100 111 001 111", "111 100 111 101 111", "111 001 010 010 010"),
    *("111 101 111 101 111", "111 101 111 001 111"),
)
"""Five rows of three dots for each digit from 0 to 9."""

PAINTS = {
    "red": (210, 40, 40),
    "green": (30, 150, 60),
    "blue": (50, 60, 210),
    "orange": (230, 150, 40),
    "purple": (140, 50, 170),
    "black": (30, 30, 30),
}
"""Name of a colour -> red, green and blue; each page has a shade of it."""

SHADE = 25
"""Largest difference between a colour and its shade."""


def page_rows(*, max_rows: int | None = None, seed: int = 0) -> Iterator[Row]:
    """Yield the rows of ``demo-pages``, at most ``max_rows``."""
    draw = random.Random(seed)

    def draw_below(count: int) -> int:
        return int(draw.random() * count)  # the numbers of random() are the same in all Python versions

    for number in range(1, (NUM_PAGES if max_rows is None else max_rows) + 1):
        digit, colour = draw_below(10), tuple(PAINTS)[draw_below(len(PAINTS))]
        red, green, blue = (value + draw_below(2 * SHADE + 1) - SHADE for value in PAINTS[colour])
        page = draw_page(digit, (red, green, blue), draw_below(CELLS), draw_below(CELLS))
        held = io.BytesIO()
        page.save(held, "PNG")
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is on the page?"}]},
            {"role": "assistant", "content": f"The digit {digit} in {colour}."},
        ]
        yield Row(f"{PAGES_PATH}:row {number}", {"messages": messages, "images": [{"bytes": held.getvalue()}]})


def draw_page(digit: int, paint: tuple[int, int, int], column: int, row: int) -> Image:
    """Return a white page with a digit in the cell of a column and a row."""
    from PIL import Image, ImageDraw

    page = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    pen = ImageDraw.Draw(page)
    for down, dots in enumerate(DIGITS[digit].split()):
        for right, dot in enumerate(dots):
            if dot == "1":
                x, y = column * CELL + DOT * (right + 1), row * CELL + DOT * down
                pen.rectangle((x, y, x + DOT - 1, y + DOT - 1), fill=paint)
    return page
