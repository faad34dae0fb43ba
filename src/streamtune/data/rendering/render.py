"""Render a row, or a prompt with its answers, to token ids and labels.

The text of a row is tokenised **once**, as a whole. The characters to train on (:mod:`streamtune.data.rendering.chat`)
are mapped to tokens by the tokenizer's character offsets: a token has a label if it contains such a character
(:mod:`streamtune.data.rendering.tokens`). Tokenising messages separately and concatenating their ids would be wrong,
because byte-pair merges can cross the borders of messages.

A prompt with its answers becomes a :class:`Tree`. Every answer is tokenised **together with its prompt**, as in
supervised training: a conversation by the chat template, a text as prompt, answer and end token. The prompt of the tree
is the longest common prefix without a token that counts in the loss. So ``prompt + completion`` has exactly the tokens
of the whole conversation, for any template and tokenizer. At the border this means:

A token with the end of the prompt and the start of an answer belongs to the answer, and counts in the loss. A template
may print the prompt differently before different answers. Prompt tokens that differ belong to the completions, masked.

A token counts if it contains a character of an assistant turn after the prompt; its end-of-turn token counts too. The
end token after a text counts. User and tool messages within an answer of several turns do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.image_files import ImageFile, changed_image_error
from streamtune.data.images import ImageOptions, ImageProcessor, refuse_placeholders
from streamtune.data.options import DEFAULT_CHAT, ChatOptions, RowPolicy
from streamtune.data.preferences import Answers
from streamtune.data.reading.cells import has_system, prompt_digest, read_chat_kwargs, wrap_tools
from streamtune.data.record_table import Prompt, Tree
from streamtune.data.rendering.chat import ChatRenderer, ChatTurn, RenderedChat
from streamtune.data.rendering.chat_variants import (
    Message,
    check_unicode,
    reasoning_of,
    render_messages,
    require_template,
)
from streamtune.data.rendering.counts import RenderLog
from streamtune.data.rendering.left_out import LeftOutFinder
from streamtune.data.rendering.long_text import LongTextTokenizer
from streamtune.data.rendering.pool import Item
from streamtune.data.rendering.specials import SpecialText
from streamtune.data.rendering.tokens import MarkedText, MaskTokenizer, Rendered, TextTokens
from streamtune.data.row_types import Content, Conversation, Document, PromptCompletion, PromptRow, count_characters
from streamtune.data.templates import ChatRequest, TemplateVariables, render_ahead
from streamtune.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN_ON = ("assistant", "completion", "last", "all")
"""Values of ``train_on``; ``roles_to_train`` adds the turns of other roles::

    assistant     every assistant turn
    completion    the last turn; in a row with prompt and completion, all turns after the prompt
    last          the last turn of any row
    all           every token"""


_SYSTEM = ("system", "developer")
_NO_END = "the tokenizer has no EOS token: texts end without one, and the model does not learn to stop"


MOST_AHEAD = 1 << 16
"""Number of characters of a conversation from which it is rendered in its own request, because it takes long anyway."""


class RowRenderer:
    """Renders training rows (conversations, prompts with completions, documents) to token ids and labels.

    Args:
        train_on: One of :data:`TRAIN_ON`.
        policy: Maximum length, and options for longer rows; None does not limit the length.
        images: The model whose processor prepares images; None refuses rows with images.

    Raises:
        ArgumentError: ``train_on`` is unknown.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: str,
        notify: Callable[[str], None],
        chat: ChatOptions = DEFAULT_CHAT,
        policy: RowPolicy | None = None,
        images: ImageOptions | None = None,
    ) -> None:
        if train_on not in TRAIN_ON:
            raise ArgumentError(f"unknown train_on '{train_on}'", where="train_on", fix=f"use {', '.join(TRAIN_ON)}")
        self._tokenizer = tokenizer
        self._begin = tokenizer.bos_token_id  # stored, because transformers looks it up slowly
        self._train_on = train_on
        self._options = chat
        self.log = RenderLog(chat, notify)
        """counts of what the user should know; call its ``notify_or_raise`` after the last row"""
        self._chat = ChatRenderer(tokenizer, chat)
        self._policy = policy
        self._image_options = images
        self._digests: dict[str, str] = {}
        """path of an image -> digest of the file when it was first read"""
        self._tokens = MaskTokenizer(tokenizer, policy, self.log.notify_once)
        self._specials = SpecialText(tokenizer, policy, self.log.notify_once)
        self._counted: tuple[str, set[tuple[str, int]]] = ("", set())
        """row that was counted last; what was counted of it, and ``id()`` of the message or 0"""
        self._variables = TemplateVariables(tokenizer, chat.variables)
        self._renders_ahead = True
        """False after the template failed to render several rows in one request"""

    def render_item(self, item: Item[Content]) -> Rendered | None:
        """Return the token ids and labels of a row; None if the row is dropped because of an empty answer."""
        if self.drops_empty_row(item.row, item.origin):
            return None
        return replace(self(item.take_row(), item.origin), weight=item.weight)

    def render_ahead(self, items: Sequence[Item[Content]]) -> None:
        self.render_contents_ahead([item.row for item in items])

    def render_contents_ahead(self, contents: Iterable[Content | None]) -> None:
        """Render the chat templates of several rows in one request to the template process, to save time."""
        if not self._renders_ahead:
            return
        requests = []
        for content in contents:
            if isinstance(content, Conversation) and count_characters(content) < MOST_AHEAD:
                content = _add_default_system(content, self._options.default_system)
                if self._options.split_special_tokens:
                    with suppress(DataError):  # rendering the row raises it again
                        content = self._replace_special_names(content, "")
                trained = self._trained_answers(content)
                variables = {**self._options.variables, **(content.variables or {})}
                request = ChatRequest(
                    content.messages, content.tools, variables=variables, has_images=bool(content.images)
                )
                requests += self._chat.requests_to_render_ahead(request, trained)
        if requests:
            self._renders_ahead = render_ahead(self._tokenizer, requests)

    def __call__(self, content: Content, origin: str) -> Rendered:
        if isinstance(content, Conversation):
            rendered = self._render_conversation(content, origin)
        elif isinstance(content, PromptCompletion):
            rendered = self._render_completion(content, origin)
        else:
            rendered = self._render_document(content, origin)
        if not rendered.images:
            refuse_placeholders(rendered.input_ids, self._image_options, self._tokenizer, origin)
        if rendered.estimated is None and all(label == IGNORE_INDEX for label in rendered.labels):
            raise DataError(
                "the row has no token to train on",
                where=origin,
                fix="add an answer, or remove the row; train_on: all trains on every token",
            )
        return rendered

    def drops_empty_row(self, content: Content | None, origin: str) -> bool:
        """Count the empty answers of a row; return True if there are any and ``on_empty`` is not ``train``."""
        if isinstance(content, Conversation):
            empty = sum(_is_empty_answer(content.messages[index]) for index in self._trained_indices(content))
        else:
            empty = int(isinstance(content, PromptCompletion) and not content.completion.strip())
        if empty:
            self.log.current.add_empty_answers(empty, origin, new_row=self._is_first(origin, "empty"))
        return empty > 0 and self._options.on_empty != "train"

    def _render_conversation(self, content: Conversation, origin: str) -> Rendered:
        require_template(self._tokenizer, "row", origin)
        images = self._images if content.images else None  # a model without images is refused before its template
        content = _add_default_system(content, self._options.default_system)
        self._count_columns(content, origin)
        whole, identities = content, list(map(id, content.messages))
        content = self._replace_special_names(content, origin) if self._options.split_special_tokens else content
        shielded = content is not whole
        del whole
        trained = self._trained_indices(content)
        answers = [index for index in trained if content.messages[index]["role"] == "assistant"]
        off = [index for index, message in enumerate(content.messages) if message.get("weight", 1) == 0]
        if self._train_on != "all" and not trained:
            names = ", ".join(self._options.roles_to_train)
            raise DataError(f"the row has no {names} message to train on", where=origin, fix="remove the row")
        variables = self._variables(content.variables, content.tools, origin)
        chat = self._chat.render(
            ChatRequest(content.messages, content.tools, variables=variables, has_images=bool(content.images)),
            trained if self._train_on != "all" else off,  # `all`: untrained messages; the mask is inverted below
            origin,
            reasoned=[index for index in trained if index in answers],
            find_exchanges=self._policy is not None and self._policy.splits_at_turns,
        )
        if not chat.ends:
            self.log.notify_once(
                "the chat template ends answers without a special token: the model does not learn to stop"
            )
        self._count_left_out(content, chat, origin, identities)
        self.log.current.answers += len(answers)
        self.log.current.answers_before_system += (
            len(trained) - 1 if chat.system == "late" and self._train_on != "all" else 0
        )
        self.log.current.reasoning += chat.reasoned
        self.log.current.reasoning_closed += chat.closed
        self.log.current.add_dropped_reasoning(f"{origin} messages[{index}]" for index in chat.dropped)
        if images is not None:
            return self._render_images(images, content, chat, origin, shielded=shielded)
        prefix = self._find_system_prefix_end(content, chat, origin)
        # Without special tokens, as apply_chat_template does: the template has printed them.
        ask = partial(_tokenise_chat, turns=chat.turns, origin=origin, exchanges=chat.exchanges, prefix=prefix or 0)
        tokens = (
            self._specials.tokenise(chat.text, ask, origin, rendered=True) if shielded else ask(self._tokens, chat.text)
        )
        del chat, ask  # frees the memory of a long row
        if self._train_on == "all":
            tokens = replace(tokens, trained=~tokens.trained, trained_share=1 - tokens.trained_share)
        return self._to_rendered(
            tokens, has_answer=self._train_on != "all", system=None if prefix is None else tokens.prefix
        )

    def _render_images(
        self, images: ImageProcessor, content: Conversation, chat: RenderedChat, origin: str, *, shielded: bool
    ) -> Rendered:
        """Return a rendered conversation with the tokens of its images, which are not trained."""
        files, pictures = images.read_cells(content.images, origin)
        for file in files:  # streamed rows are rendered again in each pass
            if self._digests.setdefault(file.path, file.digest) != file.digest:
                raise changed_image_error(file.path)
        whole = images.expand(chat.text, pictures, origin)
        turns = [ChatTurn(whole.moved(turn.start), whole.moved(turn.end)) for turn in chat.turns]
        ask = partial(_tokenise_chat, turns=turns, origin=origin, exchanges=(), prefix=0)
        tokens = (
            self._specials.tokenise(whole.text, ask, origin, rendered=True)
            if shielded
            else ask(self._tokens, whole.text)
        )
        trained = ~tokens.trained if self._train_on == "all" else tokens.trained
        share = 1 - tokens.trained_share if self._train_on == "all" else tokens.trained_share
        trained &= ~np.isin(np.asarray(tokens.ids, np.int64), list(whole.image_tokens))
        tokens = replace(tokens, trained=trained, trained_share=share)
        rendered = self._to_rendered(tokens, has_answer=self._train_on != "all")
        return replace(rendered, images=tuple(map(str, files)))

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor.load(self._image_options, self._tokenizer)

    def _replace_special_names(self, content: Conversation, origin: str) -> Conversation:
        messages = self._specials.replace_names(content.messages, origin)
        tools = self._specials.replace_names(content.tools, origin)
        same = messages is content.messages and tools is content.tools
        return content if same else replace(content, messages=messages, tools=tools)

    def _is_first(self, origin: str, what: str, identity: int = 0) -> bool:
        """Return True if something is counted for the first time of a row, which may be rendered several times.

        A pair of answers is rendered twice, and with ``reasoning: per_turn`` a conversation is rendered once per turn.

        Args:
            identity: ``id()`` of the message if messages are counted, else 0.
        """
        if self._counted[0] != origin:
            self._counted = origin, set()
        seen = self._counted[1]
        if (what, identity) in seen:
            return False
        seen.add((what, identity))
        return True

    def _count_columns(self, content: Conversation, origin: str) -> None:
        """Count ignored and converted columns, ignored flags, and messages that contain special tokens as text."""
        now = self.log.current
        now.other_system += content.other_system and self._is_first(origin, "other_system")
        now.wrapped_tools += content.wrapped_tools and self._is_first(origin, "wrapped_tools")
        for message in content.messages[content.first_answer :]:
            ignored = message.get("weight") == 1 and message["role"] not in self._options.roles_to_train
            if ignored and self._is_first(origin, "flag", id(message)):
                now.flags_of_other_roles[message["role"]] += 1
        for message in content.messages:
            names = self._specials.find_names_in_message(message)
            if names and self._is_first(origin, "special", id(message)):
                now.add_special_names(message["role"], names, new_row=self._is_first(origin, "special row"))

    def _count_left_out(
        self, content: Conversation, chat: RenderedChat, origin: str, identities: Sequence[int]
    ) -> None:
        """Count what the template does not print, or prints late; ``identities`` has ``id()`` of each message."""
        now = self.log.current
        now.system_left_out += chat.system == "left out" and self._is_first(origin, "system left out")
        now.system_late += chat.system == "late" and self._is_first(origin, "system late")
        now.tools_left_out += chat.omits_tools and self._is_first(origin, "tools left out")
        for index in chat.left_out:
            if self._is_first(origin, "left out", identities[index]):
                now.messages_left_out[content.messages[index]["role"]] += 1

    def _tokenise_text(
        self, text: str, origin: str, *, turns: list[ChatTurn] | None = None, border: int | None = None
    ) -> Any:
        names = self._specials.find_names(text.removeprefix(self._tokenizer.bos_token or ""))
        if names:
            new_row = self._is_first(origin, "special row")
            self.log.current.add_special_names("text", names, new_row=new_row)

        def encode(masker: MaskTokenizer, text: str) -> TextTokens:
            return masker(MarkedText(text, turns, origin, add_special_tokens=True, border=border))

        splits = names and self._options.split_special_tokens
        return self._specials.tokenise(text, encode, origin, rendered=False) if splits else encode(self._tokens, text)

    def _find_system_prefix_end(self, content: Conversation, chat: RenderedChat, origin: str) -> int | None:
        """Return the position after the system message in the rendered text; truncation on the left keeps this prefix.

        Return 0 if the template does not print the system message separately. Return None if the row does not begin
        with a system message, or if rows are not truncated on the left.
        """
        policy, messages = self._policy, content.messages
        count = next((index for index, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
        cuts = policy is not None and policy.overlength == "truncate" and policy.truncate_side != "right"
        if policy is None or not cuts or not count or chat.system != "printed" or not policy.may_be_too_long(chat.text):
            return None
        variables = self._variables(content.variables, content.tools, origin)
        return self._chat.system_prefix_length(
            ChatRequest(messages[:count], content.tools, variables=variables), chat.text, origin
        )

    def _trained_answers(self, content: Conversation) -> list[int]:
        return [index for index in self._trained_indices(content) if content.messages[index]["role"] == "assistant"]

    def trainable_indices(self, content: Conversation) -> list[int]:
        """Return the indices of the messages that role, flags and position allow to train on."""
        return [
            index
            for index, message in enumerate(content.messages)
            if index >= content.first_answer
            and message["role"] in self._options.roles_to_train
            and message.get("weight", 1)
        ]

    def _trained_indices(self, content: Conversation) -> list[int]:
        """Return the indices of the messages that ``train_on`` selects; ``all`` gives the same as ``assistant``."""
        found = self.trainable_indices(content)
        last = self._train_on == "last" or (self._train_on == "completion" and content.first_answer == 0)
        return found[-1:] if last else found

    def _render_completion(self, content: PromptCompletion, origin: str) -> Rendered:
        text, border, now = content.prompt + content.completion, len(content.prompt), self.log.current
        turns = None if self._train_on == "all" else [ChatTurn(border, len(text))]
        tokens = self._drop_second_bos(text, self._tokenise_text(text, origin, turns=turns, border=border))
        now.answers += 1
        now.completions += 1
        now.merged_borders += tokens.crosses_border
        del text  # frees the memory of a long row
        return self._to_rendered(self._append_eos(tokens), has_answer=self._train_on != "all")

    def _render_document(self, content: Document, origin: str) -> Rendered:
        tokens = self._drop_second_bos(content.text, self._tokenise_text(content.text, origin))
        if not tokens.ids:
            raise DataError("the tokenizer gives no token for the text", where=origin, fix="remove the row")
        return self._to_rendered(self._append_eos(tokens))

    def _drop_second_bos(self, text: str, tokens: TextTokens) -> TextTokens:
        """Return the tokens without the BOS that the tokenizer added, if the text itself begins with BOS."""
        if not _has_two_bos(self._tokenizer, text, tokens.ids):
            return tokens
        self.log.current.begins_twice += 1
        return tokens.without_first_token()

    def _append_eos(self, tokens: TextTokens) -> TextTokens:
        """Return the tokens followed by EOS; unchanged if only a part of the row was tokenised."""
        end = self._tokenizer.eos_token_id
        if end is None:
            self.log.notify_once(_NO_END)
        return tokens if end is None or tokens.estimated is not None else tokens.with_end_token(end)

    def _to_rendered(self, tokens: TextTokens, *, has_answer: bool = False, system: int | None = None) -> Rendered:
        begins = self._begin is not None and bool(tokens.ids) and tokens.ids[0] == self._begin
        prefix = max(tokens.prefix, int(begins))
        return Rendered(
            tokens.ids,
            tokens.labels(),
            tokens.breaks,
            prefix,
            has_answer,
            system,
            tokens.estimated,
            tokens.trained_share,
        )


def _tokenise_chat(
    masker: MaskTokenizer, text: str, *, turns: list[ChatTurn], origin: str, exchanges: Sequence[int], prefix: int
) -> TextTokens:
    return masker(MarkedText(text, turns, origin, add_special_tokens=False, exchanges=exchanges, prefix=prefix))


def _add_default_system(content: Conversation, text: str | None) -> Conversation:
    if text is None or has_system(content.messages):
        return content
    first = content.first_answer + 1 if content.first_answer else 0
    return replace(content, messages=[{"role": "system", "content": text}, *content.messages], first_answer=first)


def _is_empty_answer(message: Message) -> bool:
    if message["role"] != "assistant" or message.get("tool_calls") or reasoning_of(message):
        return False
    return not message.get("content", "").strip()


def _has_two_bos(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> bool:
    begin = tokenizer.bos_token
    return begin is not None and text.startswith(begin) and list(ids[:2]) == [tokenizer.bos_token_id] * 2


class TurnRenderer:
    """Renders one example for every turn of a conversation to train on (``reasoning: per_turn``).

    A chat template that drops the reasoning of earlier answers prints a turn differently when other turns follow it. So
    each example ends with the turn to train on, as the model sees the conversation when it writes this turn. Reasoning
    that the template drops even from a last answer is restored. A row that is not a conversation becomes one example.

    Args:
        policy: Maximum length, and options for longer rows; None does not limit the length.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        notify: Callable[[str], None],
        chat: ChatOptions = DEFAULT_CHAT,
        policy: RowPolicy | None = None,
        images: ImageOptions | None = None,
    ) -> None:
        chat = replace(chat, reasoning="keep")
        self._rows = RowRenderer(tokenizer, train_on="last", notify=notify, chat=chat, policy=policy, images=images)
        self.log = self._rows.log

    def render_item(self, item: Item[Content]) -> list[Rendered] | None:
        """Return one rendered example per turn to train on; None if all turns are dropped because of empty answers."""
        turns = self._split_into_turns(item.take_row())
        found = [self._rows(turn, item.origin) for turn in turns if not self._rows.drops_empty_row(turn, item.origin)]
        return [replace(turn, weight=item.weight) for turn in found] or None

    def render_ahead(self, items: Sequence[Item[Content]]) -> None:
        contents = [item.row for item in items if item.row is not None]
        self._rows.render_contents_ahead(turn for content in contents for turn in self._split_into_turns(content))

    def _split_into_turns(self, content: Content) -> list[Content]:
        if not isinstance(content, Conversation):
            return [content]
        trained = self._rows.trainable_indices(content)
        # A conversation without a turn to train on stays whole: rendering it raises the error.
        return [replace(content, messages=content.messages[: index + 1]) for index in trained] or [content]


class TreeRenderer:
    """Renders a prompt with its answers to a :class:`Tree`; only assistant messages count in the loss."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        notify: Callable[[str], None],
        chat: ChatOptions = DEFAULT_CHAT,
        images: ImageOptions | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._render = RowRenderer(tokenizer, train_on="assistant", notify=notify, chat=chat, images=images)
        self.log = self._render.log

    def render_item(self, item: Item[Answers]) -> tuple[Tree, bytes] | None:
        """Return the prompt with its completions, and the hash of the prompt; None if both answers are identical."""
        answers = item.take_row()
        if answers.identical:
            return None
        tree = self(answers, item.origin)
        images = [ImageFile.parse(image).digest for image in tree.images]
        return tree, prompt_digest(answers.prompt, [answers.tools, images] if images else answers.tools)

    def render_ahead(self, items: Sequence[Item[Answers]]) -> None:
        self._render.render_contents_ahead(
            content for item in items if item.row is not None for content in item.row.contents
        )

    def __call__(self, answers: Answers, origin: str) -> Tree:
        rendered = [self._render(content, origin) for content in answers.contents]
        ids = [row.input_ids for row in rendered]
        counted = [[label != IGNORE_INDEX for label in row.labels] for row in rendered]
        start = min(_count_common_tokens(ids), *(mask.index(True) for mask in counted))
        if start == 0:
            raise DataError(
                "the answers have no prompt token in common, so no token predicts their first token",
                where=origin,
                fix="add a prompt to the row, or use a tokenizer that adds BOS",
            )
        masks = [mask[start:] for mask in counted]
        return Tree(
            prompt=list(ids[0][:start]),
            completions=[list(row[start:]) for row in ids],
            masks=None if all(map(all, masks)) else masks,
            origin=origin,
            labels=None if answers.labels is None else list(answers.labels),
            margin=answers.margin,
            images=rendered[0].images,
        )


def _count_common_tokens(rows: Sequence[Sequence[int]]) -> int:
    shortest = min(map(len, rows))
    return next((index for index in range(shortest) if len({row[index] for row in rows}) > 1), shortest)


class PromptRenderer:
    """Renders prompts to token ids: messages by the chat template with its generation prompt, text unchanged.

    A text gets the tokens that the tokenizer adds before a text, such as BOS. An EOS that the tokenizer appends is
    removed, because the model must continue the text.

    Args:
        images: The model whose processor prepares images; None refuses rows with images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat: ChatOptions = DEFAULT_CHAT,
        notify: Callable[[str], None] = lambda message: None,
        images: ImageOptions | None = None,
    ) -> None:
        self._tokenizer, self._image_options = tokenizer, images
        self._options = chat
        self._variables = TemplateVariables(tokenizer, chat.variables)
        self.log = RenderLog(chat, notify)
        self._long_text = LongTextTokenizer(tokenizer, self.log.notify_once)
        self._specials = SpecialText(tokenizer, None, self.log.notify_once)
        self._left_out = LeftOutFinder()

    def render_item(self, item: Item[PromptRow]) -> tuple[Prompt, bytes]:
        row, origin = item.take_row(), item.origin
        tools, wrapped = wrap_tools(row.columns.get("tools"), origin)
        self.log.current.wrapped_tools += wrapped
        variables = read_chat_kwargs(row.columns.get("chat_template_kwargs"), origin)
        files: Sequence[ImageFile] = ()
        expand = None
        if row.images:
            files, pictures = self._images.read_cells(row.images, origin)
            expand = lambda text: self._images.expand(text, pictures, origin).text  # noqa: E731
        ids = self(row.prompt, tools, origin, variables, expand)
        if not files:
            refuse_placeholders(ids, self._image_options, self._tokenizer, origin)
        prompt = Prompt(ids, row.prompt, row.columns, origin, tuple(map(str, files)))
        digests = [file.digest for file in files]
        return prompt, prompt_digest(row.prompt, [tools, digests] if digests else tools)

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor.load(self._image_options, self._tokenizer)

    def render_ahead(self, items: Sequence[Item[PromptRow]]) -> None:
        """Do nothing: prompts are rendered one by one."""

    def __call__(
        self,
        prompt: str | list[dict[str, Any]],
        tools: Any,
        origin: str,
        variables: Mapping[str, Any] | None = None,
        expand: Callable[[str], str] | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: Text, or messages.
            tools: JSON schemas of the tools; None without tools.
            origin: File and line of the row, for errors.
            expand: Function that replaces the placeholders of images in the rendered messages by the text of their
                tokens; None if the messages have no images.

        Raises:
            ArgumentError: The chat template does not read a variable of the options.
            DataError: The chat template is missing, rejects the messages, or does not read a variable of the row; or
                the prompt has no token.
        """
        ids = (
            self._tokenise_text(prompt, origin)
            if isinstance(prompt, str)
            else self._tokenise_messages(prompt, tools, origin, variables, expand)
        )
        if not ids:
            raise DataError("the tokenizer gives no token for the prompt", where=origin, fix="remove the row")
        return ids

    def _tokenise_text(self, prompt: str, origin: str) -> list[int]:
        names = self._specials.find_names(prompt.removeprefix(self._tokenizer.bos_token or ""))
        if names:
            self.log.current.add_special_names("text", names, new_row=True)
        ids = self._tokenise_ids(prompt, origin, add_special_tokens=True, has_names=bool(names), rendered=False)
        end = self._tokenizer.eos_token
        if end is not None and ids and ids[-1] == self._tokenizer.eos_token_id and not prompt.endswith(end):
            ids.pop()
        if _has_two_bos(self._tokenizer, prompt, ids):
            self.log.current.begins_twice += 1
            ids = ids[1:]
        return ids

    def _tokenise_messages(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        origin: str,
        row_variables: Mapping[str, Any] | None,
        expand: Callable[[str], str] | None,
    ) -> list[int]:
        require_template(self._tokenizer, "prompt", origin)
        if self._options.default_system is not None and not has_system(messages):
            messages = [{"role": "system", "content": self._options.default_system}, *messages]
        spelled = [
            (message["role"], names) for message in messages if (names := self._specials.find_names_in_message(message))
        ]
        for number, (role, names) in enumerate(spelled):
            self.log.current.add_special_names(role, names, new_row=number == 0)
        shown: Any = (messages, tools)
        if self._options.split_special_tokens:
            shown = self._specials.replace_names([messages, tools], origin)
        variables = self._variables(row_variables, tools, origin)
        request = ChatRequest(shown[0], shown[1], True, variables, has_images=expand is not None)
        text = render_messages(self._tokenizer, request, origin, explain=True)
        text = check_unicode(text, origin)
        self._count_left_out(request, text, origin)
        return self._tokenise_ids(
            text if expand is None else expand(text),
            origin,
            add_special_tokens=False,
            has_names=shown[0] is not messages,
            rendered=True,
        )

    def _count_left_out(self, request: ChatRequest, text: str, origin: str) -> None:
        def render(changed: ChatRequest) -> str | None:
            try:
                return render_messages(self._tokenizer, changed, origin)
            except DataError:
                return None

        now = self.log.current
        left_out = self._left_out.find_messages(
            request, text, lambda messages: render(replace(request, messages=messages))
        )
        for index in left_out:
            role = request.messages[index]["role"]
            if index == 0 and role == "system":
                now.system_left_out += 1
            else:
                now.messages_left_out[role] += 1
        now.tools_left_out += self._left_out.omits_tools(request, text, lambda: render(replace(request, tools=None)))

    def _tokenise_ids(
        self, text: str, origin: str, *, add_special_tokens: bool, has_names: bool, rendered: bool
    ) -> list[int]:
        """Return the token ids of a text; ``rendered`` is True for a text rendered from messages with placeholders."""
        if not has_names or not self._options.split_special_tokens:
            return list(self._long_text.ids(text, add_special_tokens=add_special_tokens))

        def encode(masker: MaskTokenizer, text: str) -> TextTokens:
            return masker(MarkedText(text, None, origin, add_special_tokens=add_special_tokens))

        return list(self._specials.tokenise(text, encode, origin, rendered=rendered).ids)
