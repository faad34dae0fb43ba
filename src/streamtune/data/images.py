"""Images of rows: replaced by their tokens in the text, and prepared as inputs of the model.

The processor of the model decides which tokens an image has (:meth:`ImageProcessor.expand`), and which tensors the
model reads (:meth:`ImageProcessor.model_inputs`). A prepared row keeps the path and the digest of each image, not its
pixels (:class:`~streamtune.data.image_files.ImageFile`). The pixels are read again for each batch.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from streamtune.data.image_files import ImageFile, decode_image, image_digest, read_image_bytes
from streamtune.data.reading.image_cells import ImageCell
from streamtune.engine.hf_names import HUB_FILE, IMAGES_REFUSED, PROCESSOR_NAMES, TOKEN_TYPES, hf_internal
from streamtune.errors import ArgumentError, DataError, StorageError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase


IMAGES = "images"
"""Folder of the row cache with images that rows have as bytes."""
_COMPARED = 2
"""Number of rows whose tokens are compared with the processor's tokens."""
_FILES = ("processor_config.json", "preprocessor_config.json")


@dataclass(frozen=True)
class ImageOptions:
    """The model whose processor prepares images, and limits of their size."""

    model: str
    """folder or name on the Hub of the model"""
    folder: str
    """folder for images that a row holds as bytes"""
    trust_remote_code: bool = False
    max_pixels: int | None = None
    """number of pixels to which a larger image is scaled down, before the processor; None: no limit"""
    min_pixels: int | None = None
    """number of pixels to which a smaller image is scaled up, before the processor; None: no limit"""
    placeholders: tuple[int | str, ...] = ()
    """tokens, or their ids, that the model replaces by features of images, videos or audio"""
    files: Mapping[str, str] | None = None
    """files of the processor, name -> text, if ``model`` is the type of a new model; None: they are in ``model``"""

    @contextmanager
    def processor_folder(self) -> Iterator[str]:
        """Context manager: a folder, or a name on the Hub, with the files of the processor."""
        if self.files is None:
            yield self.model
            return
        with TemporaryDirectory() as name:
            for file, text in {**self.files, "config.json": json.dumps({"model_type": self.model})}.items():
                Path(name, file).write_text(text, encoding="utf-8")
            yield name

    def identity(self) -> tuple[Any, ...] | None:
        """Return all values that determine the tokens of an image, for the key of a cache.

        Return None for a model without a processor, whose rows have no images.
        """
        texts = [] if self.files is None else list(self.files.values())
        for name in _FILES if self.files is None else ():
            with suppress(Exception):  # a model without such a file, or no connection
                found = hf_internal(HUB_FILE)(self.model, name, _raise_exceptions_for_missing_entries=False)
                texts.append(Path(found).read_text(encoding="utf-8"))
        if not texts:
            return None
        return self.model, self.max_pixels, self.min_pixels, hashlib.sha256("\0".join(texts).encode()).hexdigest()


def refuse_placeholders(
    ids: Sequence[int], options: ImageOptions | None, tokenizer: PreTrainedTokenizerBase, origin: str
) -> None:
    """Raise an error if a row without images has a token that the model replaces by features of an image.

    Args:
        ids: Token ids of the row.

    Raises:
        DataError: The row has such a token.
    """
    for token in () if options is None else options.placeholders:
        number = tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else token
        if number in ids:
            raise DataError(
                f"the row has the token {tokenizer.convert_ids_to_tokens(number)} in a text, and no image for it",
                where=origin,
                fix="name the image in the column 'images', remove the token, or write split_special_tokens: true",
            )


@dataclass(frozen=True)
class ExpandedText:
    """A text in which each placeholder of an image is replaced by the text of the image's tokens."""

    text: str
    spans: tuple[tuple[int, int, int], ...]
    """(position of the placeholder in the text before, its length, length of its replacement), in order"""
    image_tokens: frozenset[int]
    """ids of the special tokens in the replacements, which are never trained"""

    def moved(self, position: int) -> int:
        """Return where a position of the text before is in :attr:`text`."""
        return position + sum(
            new - old if position >= start + old else 0 for start, old, new in self.spans if position > start
        )


class ImageProcessor:
    """The processor of a vision-language model, for images only: videos and audio are not supported.

    Args:
        tokenizer: Tokenizer of the rows; the processor gets a copy.

    Raises:
        DataError: The model takes no images, or its processor cannot be loaded.
    """

    def __init__(self, options: ImageOptions, tokenizer: PreTrainedTokenizerBase) -> None:
        self.options = options
        self._tokenizer = copy.deepcopy(tokenizer)  # threads that make batches use it while rows are rendered
        with options.processor_folder() as folder:
            self._processor = _load_processor(options, folder, self._tokenizer)
        self._lock = threading.Lock()
        self._replacements: dict[tuple[int, int], str] = {}
        self._compared = 0
        self.placeholder = self._find_placeholder()

    @classmethod
    def load(cls, options: ImageOptions | None, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor:
        """Return the processor for rows with images.

        Raises:
            ArgumentError: ``options`` is None, for a new model that takes no images; or the chat template prints none.
            DataError: The model takes no images, or its processor cannot be loaded.
        """
        if options is None:
            raise ArgumentError(
                "rows have images, and a new model of this type takes none",
                where="model",
                fix="name a vision-language model: model_name_or_path, or model_type: qwen3_vl for a new one",
            )
        processor = cls(options, tokenizer)
        if "image" not in str(tokenizer.chat_template):
            raise ArgumentError(
                "rows have images, and the chat template prints none",
                where="chat_template",
                fix="set chat_template to a template of this model that prints images",
            )
        return processor

    def _find_placeholder(self) -> str:
        """Return the token of a rendered chat that the processor replaces by the tokens of an image."""
        from PIL import Image

        problem: Exception | None = None
        for name in ("image_token", "boi_token"):  # gemma3 replaces the token that begins an image
            token = getattr(self._processor, name, None)
            if isinstance(token, str):
                try:
                    self._call([token], [[Image.new("RGB", (64, 64))]])
                    return token
                except Exception as error:  # of the wrong token
                    problem = error
        raise DataError(
            f"the processor of {self.options.model} does not replace the placeholder of an image: {problem}",
            where="model_name_or_path",
            fix="use the tokenizer and the processor files of the same checkpoint",
        )

    def _call(self, texts: Sequence[str], images: Sequence[Sequence[Image]], **settings: Any) -> Any:
        with self._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._processor(
                text=list(texts), images=[list(each) for each in images], add_special_tokens=False, **settings
            )

    def read_cells(self, cells: Sequence[ImageCell], origin: str) -> tuple[list[ImageFile], list[Image]]:
        """Read and check the images of a row; an image without a file is written to :attr:`ImageOptions.folder`.

        Raises:
            DataError: An image is missing, damaged, too large or too small, or has several frames.
            StorageError: An image cannot be written to the folder.
        """
        files, images = [], []
        for cell in cells:
            shown = str(cell.path) if cell.path is not None else cell.where
            content = cell.content if cell.path is None else read_image_bytes(cell.path, shown, origin)
            assert content is not None, "an image has a path or bytes"
            images.append(self._decode(content, shown, origin))
            digest = image_digest(content)
            path = self._store(content, digest) if cell.path is None else cell.path.absolute()
            files.append(ImageFile(digest, str(path)))
        return files, images

    def _store(self, content: bytes, digest: str) -> Path:
        path = Path(self.options.folder) / digest[:2] / digest
        if path.exists():
            return path
        part = path.with_name(f"{digest}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise StorageError(
                f"cannot write an image that a row holds as bytes: {error.strerror or error}",
                where=self.options.folder,
                fix="free space in that folder, name another with XDG_CACHE_HOME, or give images as paths of files",
            ) from error
        return path

    def _decode(self, content: bytes, shown: str, origin: str) -> Image:
        return self._scale(decode_image(content, shown, origin))

    def _scale(self, image: Image) -> Image:
        pixels, factor = image.width * image.height, 1.0
        if self.options.max_pixels is not None and pixels > self.options.max_pixels:
            factor = math.sqrt(self.options.max_pixels / pixels)
        elif self.options.min_pixels is not None and pixels < self.options.min_pixels:
            factor = math.sqrt(self.options.min_pixels / pixels)
        if factor == 1:
            return image
        return image.resize((max(1, int(image.width * factor)), max(1, int(image.height * factor))))

    def expand(self, text: str, images: Sequence[Image], origin: str) -> ExpandedText:
        """Replace the placeholder of each image in a rendered chat.

        For the first rows, the tokens of the result are compared with the processor's tokens.

        Raises:
            DataError: The text has another number of placeholders than images, or the processor rejects an image.
            ArgumentError: The processor gives other tokens for the text.
        """
        pieces = text.split(self.placeholder)
        if len(pieces) - 1 != len(images):
            raise DataError(
                f"the row has {len(images)} images, and its rendered chat has {len(pieces) - 1} times the placeholder "
                f"{self.placeholder}",
                where=origin,
                fix=f"set chat_template to a template that prints images, and do not write {self.placeholder} in texts",
            )
        parts, spans, position = [pieces[0]], [], len(pieces[0])
        replaced = [self._replacement(image, origin) for image in images]
        for replacement, piece in zip(replaced, pieces[1:], strict=True):
            parts += [replacement, piece]
            spans.append((position, len(self.placeholder), len(replacement)))
            position += len(self.placeholder) + len(piece)
        expanded = "".join(parts)
        if self._compared < _COMPARED:
            self._compared += 1
            self._compare(text, images, expanded)
        special = set(self._tokenizer.all_special_ids) | {
            number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        ids = {number for replacement in set(replaced) for number in self._encode(replacement)}
        return ExpandedText(expanded, tuple(spans), frozenset(ids & special))

    def images_before(self, files: Sequence[ImageFile], input_ids: Sequence[int]) -> list[ImageFile]:
        """Return the images of a row whose tokens are in ``input_ids``, the first tokens of the row."""
        found: list[ImageFile] = []
        left = Counter(input_ids)
        for file in files:
            tokens = Counter(self._encode(self._replacement(self._decode(file.read(), file.path, ""), file.path)))
            if not tokens <= left:
                break
            left -= tokens
            found.append(file)
        return found

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _replacement(self, image: Image, origin: str) -> str:
        """Return the text of an image's tokens. It depends on the size of the image alone."""
        if image.size not in self._replacements:
            try:
                ids = self._call([self.placeholder], [[image]])["input_ids"][0]
            except Exception as error:
                raise DataError(
                    f"the processor rejects an image of {image.width} x {image.height} pixels: {error}",
                    where=origin,
                    fix="scale the image, or remove the row",
                ) from error
            with self._lock:
                text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if self._encode(text) != list(ids):
                raise self._tokens_error("the tokens of an image cannot be written as text")
            self._replacements[image.size] = text
        return self._replacements[image.size]

    def _compare(self, text: str, images: Sequence[Image], expanded: str) -> None:
        ids = list(self._call([text], [images])["input_ids"][0])
        if self._encode(expanded) != ids:
            raise self._tokens_error("the processor gives a row with images other tokens than its parts")

    def _tokens_error(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"{what}; rows with images are not supported for {self.options.model}",
            where="model_name_or_path",
            fix="train on rows of text, or report this model",
        )

    def shapes_of(self, count: int, width: int, height: int) -> tuple[dict[str, torch.Tensor], int]:
        """Return the inputs of a model for ``count`` images of one size, and the number of tokens of an image, without
        the tokens that the chat template prints around it.

        Pixels have the shape and no memory: all are the same number. The processor prepares one image, and two.
        """
        import torch
        from PIL import Image

        blank = self._scale(Image.new("RGB", (width, height)))
        one, two = (self._call([self.placeholder * n], [[blank] * n], return_tensors="pt") for n in (1, 2))
        tokens = two["input_ids"].shape[1] - one["input_ids"].shape[1]
        inputs = {}
        for name, value in one.items():
            if name in ("input_ids", "attention_mask", *TOKEN_TYPES) or not isinstance(value, torch.Tensor):
                continue
            shape = [n * count if m != n else n for n, m in zip(value.shape, two[name].shape, strict=True)]
            if value.is_floating_point():
                inputs[name] = value.new_ones(()).expand(shape)
            else:
                inputs[name] = value.repeat([total // n for total, n in zip(shape, value.shape, strict=True)])
        return inputs, tokens

    def model_inputs(self, rows: Sequence[Sequence[ImageFile]], input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the inputs of a model for the images of a batch, such as ``pixel_values``.

        Args:
            rows: Images of each row, in the order of their placeholders.
            input_ids: [B, T] token ids of the batch, for inputs with a type of each token, ``[B, T]``.

        Raises:
            DataError: An image is missing or has changed.
        """
        import torch

        decoded = {
            file: self._decode(file.read(), file.path, "") for file in {each for files in rows for each in files}
        }
        images = [[decoded[file] for file in files] for files in rows]
        texts = [self.placeholder * len(each) for each in images]
        prepared = self._call(texts, images, padding=True, return_tensors="pt")
        ids = prepared.pop("input_ids")
        prepared.pop("attention_mask", None)
        inputs: dict[str, torch.Tensor] = dict(prepared)
        for name in [each for each in TOKEN_TYPES if each in inputs]:
            types = torch.zeros_like(input_ids)
            found = inputs.pop(name)
            for number in found.unique().tolist():
                if number:
                    types[torch.isin(input_ids, ids[found == number].unique())] = number
            inputs[name] = types
        return inputs


def _load_processor(options: ImageOptions, folder: str, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Load the processor in ``folder`` with the given tokenizer, and without the parts for videos and audio."""
    import transformers
    from transformers import AutoImageProcessor, PreTrainedConfig

    settings: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    config, _ = PreTrainedConfig.get_config_dict(folder, **settings)
    kind = config.get("model_type")
    refused = IMAGES_REFUSED.get(kind)
    name = hf_internal(PROCESSOR_NAMES).get(kind)
    if refused or name is None:
        raise DataError(
            f"rows have images, and {refused or f'models of the kind {kind} take none'}",
            where="model_name_or_path",
            fix="use a vision-language model, or remove the column with images",
        )
    try:
        kept: Any = getattr(transformers, name)
        values, _ = kept.get_processor_dict(folder)
        image_processor = AutoImageProcessor.from_pretrained(folder, **settings)
        given = {"tokenizer": tokenizer, "image_processor": image_processor}
        return _images_only(kept).from_args_and_dict([given.get(each) for each in kept.get_attributes()], values)
    except Exception as error:  # of files, of the Hub, of packages that are not installed
        first = str(error).strip().partition("\n")[0]
        raise DataError(
            f"cannot load the image processor of {options.model}: {first}",
            where="model_name_or_path",
            fix="complete the folder with preprocessor_config.json, or install what the message names",
        ) from error


def _images_only(kind: Any) -> Any:
    """Return a subclass of a processor's class that can be made without processors of videos and audio."""

    class ImagesOnly(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return ImagesOnly
