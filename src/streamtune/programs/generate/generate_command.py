"""``streamtune generate``: answers to prompts, streamed, or a chat in the terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from streamtune.base import interrupts
from streamtune.base.privacy import plain, without_controls
from streamtune.cli.console import err, loading_libraries, out, print_error, print_json, print_note
from streamtune.cli.options import JsonOption, option
from streamtune.errors import ArgumentError, UserError

if TYPE_CHECKING:
    from streamtune.programs.generate.answer import Answer, Answerer, GenerateOptions
    from streamtune.programs.generate.prompt_files import Asked

LONG_PROMPT = 4096
"""Tokens of a prompt whose prefill is shown."""


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="A run's directory, a checkpoint, a folder with a model or adapters, or a name on the hub.",
            show_default=False,
        ),
    ],
    prompt: Annotated[str | None, option("TEXT", "Answer this. Without a prompt the terminal becomes a chat.")] = None,
    file: Annotated[
        Path | None,
        option("FILE", "Answer what is in this file: text, or messages in .json (one) or .jsonl (one on each line)."),
    ] = None,
    system: Annotated[str | None, option("TEXT", "A system message before each conversation.")] = None,
    raw: Annotated[
        bool, option(None, "Continue the prompt as text, without the chat template of the model.", "--raw")
    ] = False,
    max_new_tokens: Annotated[int, option("N", "Tokens of an answer at most; 512 by default.", least=1)] = 512,
    temperature: Annotated[
        float | None,
        option(
            "X", "0 takes the likeliest token each time; by default what the model's generation config says, or 0.7."
        ),
    ] = None,
    top_p: Annotated[float | None, option("X", "Draw from the likeliest tokens that have this probability.")] = None,
    top_k: Annotated[int | None, option("N", "Draw from this many of the likeliest tokens; 0 is all of them.")] = None,
    seed: Annotated[int, option("N", "Of the draw; 0 by default.")] = 0,
    checkpoint: Annotated[str | None, option("NAME|STEP", "Of a run, in place of its final model.")] = None,
    base: Annotated[str | None, option("PATH", "The base of adapters, where it is not where the run says.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], option("auto|cpu|cuda", "Where the model runs.")] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("float32|bfloat16|float16", "Of the weights; by default what they trained in."),
    ] = None,
    vllm: Annotated[bool, option(None, "Let vLLM write the answers, where it is installed.", "--vllm")] = False,
    as_json: JsonOption = False,
) -> None:
    """Try a trained model: one prompt, a file of prompts, or a chat in the terminal.

    In a chat Ctrl-C stops the answer, Ctrl-D leaves, /reset begins a new conversation.
    """
    if prompt is not None and file is not None:
        raise ArgumentError("--prompt and --file are two prompts", where="--file", fix="leave one of them out")
    _check_ranges(temperature, top_p, top_k, seed)
    with loading_libraries():
        from streamtune.programs.generate.answer import GenerateOptions, answer_with_vllm, check_vllm, load_answerer
        from streamtune.programs.generate.prompt_files import read_prompts
    options = GenerateOptions(
        checkpoint=checkpoint,
        base=base,
        device=device,
        dtype=dtype,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        system=system,
        raw=raw,
    )
    asked: list[Asked] | None = None
    if file is not None:
        asked = read_prompts(file)
    elif prompt is not None:
        asked = [prompt]
    elif not sys.stdin.isatty():
        asked = [text] if (text := sys.stdin.read()).strip() else []
        if not asked:
            raise ArgumentError("there is no prompt", where="--prompt", fix="give --prompt TEXT or --file FILE")
    if asked is None and (as_json or vllm):
        raise ArgumentError(
            f"{'--json' if as_json else '--vllm'} answers prompts, and holds no conversation",
            where="--prompt",
            fix="give --prompt TEXT or --file FILE",
        )
    if vllm:
        check_vllm()
        assert asked is not None
        _print_served(asked, answer_with_vllm(model, asked, options), as_json=as_json)
        return
    answerer = load_answerer(model, options, notify=print_note, doing=err.status)
    if asked is None:
        _chat(answerer)
    else:
        _answer_all(answerer, asked, as_json=as_json)


def _check_ranges(temperature: float | None, top_p: float | None, top_k: int | None, seed: int) -> None:
    """Raise ArgumentError for a number out of its range."""
    for name, value, fits, range_ in (
        (
            "--temperature",
            temperature,
            temperature is None or temperature == 0 or 0.01 <= temperature <= 100,
            "0, or 0.01 to 100",
        ),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1, "a number above 0, up to 1"),
        ("--top-k", top_k, top_k is None or 0 <= top_k < 2**31, "a number from 0 up"),
        ("--seed", seed, 0 <= seed < 2**32, "a whole number from 0 to 4294967295"),
    ):
        if not fits:
            raise ArgumentError(f"{name} {value} is out of range", where=name, fix=f"it takes {range_}")


# --- prompts --------------------------------------------------------------------------------------------------------


def _answer_all(answerer: Answerer, asked: list[Asked], *, as_json: bool) -> None:
    """Answer prompts one after another; Ctrl-C stops the present answer and those after it."""
    if (note := answerer.check_length(asked)) is not None:
        print_note(note)
    found: list[dict[str, Any]] = []
    stopped = False
    with _stopping(answerer):
        for number, each in enumerate(asked):
            if len(asked) > 1 and not as_json:
                err.print(Text(f"prompt {number + 1} of {len(asked)}", style="dim"))
            answer = _answer(answerer, each, quiet=as_json)
            found.append({**_shown(each), **vars(answer)})
            if not as_json:
                print(flush=True)  # the speed goes to the other stream
                _print_speed(answer)
            if stopped := answer.stopped:
                break
    if as_json:
        print_json({"model": answerer.description, "sampling": vars(answerer.sampling), "answers": found})
    if stopped:
        raise typer.Exit(130)


def _shown(asked: Asked) -> dict[str, Any]:
    """Return a prompt for a JSON document: text or messages, with tools and variables."""
    if isinstance(asked, (str, list)):
        return {"prompt": asked}
    given = {"tools": asked.tools, "chat_template_kwargs": dict(asked.variables)}
    return {"prompt": asked.messages, **{name: value for name, value in given.items() if value}}


def _answer(answerer: Answerer, asked: Asked, *, quiet: bool = False) -> Answer:
    """Answer one prompt and print the text as it comes, after the progress of a long prefill."""
    status = err.status("reading the prompt")
    shown = [False]

    def reading(done: int, total: int) -> None:
        if total < LONG_PROMPT:
            return
        if not shown[0]:
            status.start()
            shown[0] = True
        status.update(f"reading the prompt: {done:,} of {total:,} tokens")

    def show(text: str) -> None:
        if shown[0]:
            status.stop()
            shown[0] = False
        if not quiet:
            # A terminal obeys what is written to it, behind a pipe as well; --json has the text as it is.
            print(plain(text) if out.is_terminal else without_controls(text), end="", flush=True)

    try:
        return answerer.answer(asked, show, reading)
    finally:
        status.stop()


def _print_speed(answer: Answer) -> None:
    known = answer.prompt_tokens - answer.read_tokens
    read = f"{answer.prompt_tokens:,} tokens read in {answer.prompt_seconds:.1f} s"
    if known > 0:
        read = f"{answer.prompt_tokens:,} tokens, {known:,} of them known, read in {answer.prompt_seconds:.1f} s"
    rate = f", {answer.rate:,.1f} tokens/s" if answer.rate else ""
    end = "stopped" if answer.stopped else "" if answer.finished else "cut off at --max-new-tokens"
    parts = [read, f"{answer.tokens:,} written{rate}", end]
    err.print(Text("; ".join(part for part in parts if part), style="dim"), soft_wrap=True)


def _print_served(asked: list[Asked], answers: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json({"answers": [{**_shown(each), **answer} for each, answer in zip(asked, answers, strict=True)]})
        return
    for answer in answers:
        print(plain(answer["text"]) if out.is_terminal else without_controls(answer["text"]))
        err.print(Text(f"{answer['prompt_tokens']:,} tokens read, {answer['tokens']:,} written", style="dim"))


@contextmanager
def _stopping(answerer: Answerer) -> Iterator[None]:
    """Let Ctrl-C stop the answer while inside; a second Ctrl-C ends the command."""

    def stop(signum: int, frame: Any) -> None:
        interrupts.handled()
        if answerer.stopping:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        answerer.stopping = True

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # outside of the main thread Python accepts no handlers
        yield
        return
    try:
        with interrupts.stopping():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- chat -----------------------------------------------------------------------------------------------------------

HELP = "Ctrl-C stops the answer, Ctrl-D leaves, /reset begins anew, /system TEXT sets the system message, /help this"


def _chat(answerer: Answerer) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and the lines before, in input())
    out.print(Text(plain(answerer.description), style="bold"), soft_wrap=True)
    out.print(Text(HELP, style="dim"), soft_wrap=True)
    templated = bool(answerer.tokenizer.chat_template) and not answerer.options.raw
    if not templated:
        print_note("each line is continued by itself: there is no chat template to hold a conversation with")
    messages: list[dict[str, Any]] = _opening(answerer.options)
    while (line := _read_line()) is not None:
        line = line.strip()
        if not line:
            continue
        if line.startswith("/"):
            messages = _obey(line, answerer, messages)
            continue
        turns = [*messages, {"role": "user", "content": line}]
        asked: Asked = turns if templated else line
        try:
            with _stopping(answerer):
                answer = _answer(answerer, asked)
        except UserError as error:
            print_error(error)
            continue
        print()
        _print_speed(answer)
        if templated:
            messages = [*turns, {"role": "assistant", "content": answer.text}]
    print()


def _opening(options: GenerateOptions, system: str | None = None) -> list[dict[str, Any]]:
    text = system if system is not None else options.system
    return [] if text is None else [{"role": "system", "content": text}]


def _obey(line: str, answerer: Answerer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a command such as ``/reset``, and return the conversation after it."""
    command, _, rest = line.partition(" ")
    if command == "/reset" or command == "/system":
        answerer.forget()
        err.print(Text("a new conversation", style="dim"))
        before = next((each["content"] for each in messages[:1] if each["role"] == "system"), None)
        return _opening(answerer.options, rest.strip() or before if command == "/system" else before)
    if command in ("/exit", "/quit", "/bye"):
        raise typer.Exit(0)
    err.print(Text(HELP if command == "/help" else f"no command {command}. {HELP}", style="dim"), soft_wrap=True)
    return messages


def _read_line() -> str | None:
    """Read a line from the terminal: Ctrl-C empties the line, None is the end of input."""
    while True:
        before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGINT)

        def interrupt(signum: int, frame: Any) -> None:
            interrupts.handled()
            raise KeyboardInterrupt

        with suppress(ValueError):
            signal.signal(signal.SIGINT, interrupt)
        try:
            return input("\n> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            err.print(Text("\nCtrl-D leaves", style="dim"))
        except UnicodeDecodeError:
            err.print(Text("this line is not UTF-8", style="dim"))
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, before)
