"""Files of images: read, checked and decoded; named in tables of prepared rows by path and digest."""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from streamtune.base.paths import open_nonblocking
from streamtune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from streamtune.data.batches.sampler import Packs
    from streamtune.data.reading.contents import FileHashes
    from streamtune.data.record_table import Stored

MOST_PIXELS = 1 << 26
"""Largest number of pixels of an image, 67 million: a page of A4 at 600 dots per inch has 35 million."""
MOST_BYTES = 1 << 28
"""Largest size of an image's file."""
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
"""Formats that are read. Pillow reads more, some of them with other programs (EPS with Ghostscript)."""


@dataclass(frozen=True)
class ImageFile:
    """An image of a prepared row: the path of its file, and the digest of the file's bytes."""

    digest: str
    path: str

    def __str__(self) -> str:
        return f"{self.digest} {self.path}"

    @property
    def name(self) -> str:
        """Name of the file; the start of the digest for an image that its row has as bytes."""
        name = Path(self.path).name
        return name[:8] if name == self.digest else name

    @classmethod
    def parse(cls, text: str) -> ImageFile:
        digest, _, path = text.partition(" ")
        return cls(digest, path)

    def read(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            DataError: The file is missing, or has changed since the row was prepared.
        """
        content = read_image_bytes(Path(self.path), self.path, "")
        if image_digest(content) != self.digest:
            raise changed_image_error(self.path)
        return content


def changed_image_error(path: str) -> DataError:
    return DataError(
        "the image has changed since its row was prepared",
        where=path,
        fix="restore it, or begin a new run, which prepares its row again",
    )


@dataclass(frozen=True)
class Thumbnail:
    """A small copy of an image, to be shown."""

    width: int
    """width of the image itself, in pixels"""
    height: int
    jpeg: bytes

    @classmethod
    def of_file(cls, file: ImageFile, side: int = 160) -> Thumbnail | None:
        """Return a copy whose sides have at most ``side`` pixels; None if the image is missing or has changed."""
        try:
            image = decode_image(file.read(), file.path, "")
        except DataError:
            return None
        size, held = image.size, io.BytesIO()
        image.thumbnail((side, side))
        image.save(held, "JPEG")
        return cls(*size, held.getvalue())


def decode_image(content: bytes, shown: str, origin: str) -> Image:
    """Return the image in the bytes of a file as RGB, turned as its EXIF data say.

    Args:
        shown: Name of the image in errors.
        origin: File and line of its row; empty if ``shown`` is enough.

    Raises:
        DataError: The image is damaged, too large or too small, or has several frames.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    where = origin or shown

    def refuse(what: str, fix: str) -> DataError:
        return DataError(f"the image {shown} {what}", where=where, fix=fix)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow, about sizes that are checked here
            image: Image.Image = Image.open(io.BytesIO(content), formats=_readable_formats())
            width, height = image.size
            if width * height > MOST_PIXELS:
                millions = f"{width * height / 1e6:,.0f} million pixels, more than {MOST_PIXELS // 10**6} million"
                raise refuse(f"has {millions}", "scale it down")
            if min(width, height) < 2:
                raise refuse(f"has {width} x {height} pixels", "remove the row, or give the right image")
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # a photo and its previews
            if frames > 1:
                raise refuse(f"has {frames} frames or pages", "save each as an image of its own")
            if image.mode == "F" or image.mode.startswith("I"):
                raise refuse(
                    "has more than 8 bits per pixel, and models read 8",
                    "save it with 8 bits, in a range that you choose",
                )
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except DataError:
        raise
    except Image.DecompressionBombError as error:  # Pillow checks the size first
        raise refuse(f"has more than {MOST_PIXELS // 10**6} million pixels", "scale it down") from error
    except UnidentifiedImageError as error:
        raise refuse(f"is in none of the formats {', '.join(FORMATS)}", "save it as PNG or JPEG") from error
    except Exception as error:  # Pillow raises many kinds of exceptions for damaged files
        raise refuse(f"is damaged: {error}", "replace it, or remove the row") from error


def _readable_formats() -> list[str]:
    from PIL import Image

    Image.init()  # an older Pillow lacks AVIF
    return [name for name in FORMATS if name in Image.OPEN]


def read_image_bytes(path: Path, shown: str, origin: str) -> bytes:
    """Return the bytes of an image's file.

    Args:
        shown: Name of the image in errors.
        origin: File and line of its row; empty if ``shown`` is enough.

    Raises:
        DataError: The file is missing or not readable, or has more than :data:`MOST_BYTES`.
    """
    try:
        with open(path, "rb", opener=open_nonblocking) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"cannot read the image {shown}: {error.strerror or error}",
            where=origin or shown,
            fix="correct the path" + ("" if origin.startswith("--") else ", which is relative to the file of the row"),
        ) from error
    if len(content) > MOST_BYTES:
        raise DataError(
            f"the image {shown} has more than {MOST_BYTES >> 20} MiB", where=origin or shown, fix="compress it"
        )
    return content


def image_digest(content: bytes) -> str:
    """Return the digest of an image's file, as :class:`FileHashes` computes it."""
    return hashlib.blake2b(content, digest_size=20).hexdigest()


def have_images(rows: Any) -> bool:
    """Return True if a table of prepared rows has a row with images, also one that is not among ``rows``."""
    from streamtune.data.record_table import Stored

    if not isinstance(rows, Stored) or "images" not in rows.column_names:
        return False
    return bool(len(rows.column_cells("images").combine_chunks().flatten()))


def rows_with_most_images(rows: Any, count: int, packs: Packs | None = None) -> list[list[int]]:
    """Return two candidates for the ``count`` rows whose images have the most pixels; an empty list without images.

    The first has the rows with the most images, the second the longest rows with images.

    Args:
        packs: Packed rows; then the numbers of packed sequences are returned.
    """
    if not have_images(rows):
        return []
    counts, lengths = count_images(rows), rows.lengths()
    if packs is not None:
        counts, lengths = (np.add.reduceat(each[packs.rows], packs.starts[:-1]) for each in (counts, lengths))
    orders = (counts, (counts > 0) * lengths)
    return [np.argsort(-values, kind="stable")[:count].tolist() for values in orders]


def count_images(rows: Stored[Any]) -> npt.NDArray[np.int64]:
    """Return the number of images of each example of a table, ``[rows]``."""
    counts = rows.column_cells("images").combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    return counts.astype(np.int64)[rows.table_indices()]


def first_changed_image(table: Any, hashes: FileHashes) -> str | None:
    """Return the path of an image of a table of examples that is missing or has changed; None if all are the same.

    A file is read only if its size or times changed since it was hashed before.
    """
    for text in table["images"].combine_chunks().flatten().unique().to_pylist():
        file = ImageFile.parse(text)
        try:
            if hashes.hash_file(Path(file.path)) == file.digest:
                continue
        except OSError:
            pass
        return file.path
    return None
