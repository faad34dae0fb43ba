"""``streamtune generate``: answer prompts, or chat in the terminal."""

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
from streamtune.base.privacy import escape_terminal_controls, safe_text
from streamtune.cli.console import err, loading_libraries, out, print_error, print_json, print_note
from streamtune.cli.options import JsonOption, option
from streamtune.errors import ArgumentError, UserError

if TYPE_CHECKING:
    from streamtune.programs.generate.answer import Answer, Answerer, GenerateOptions
    from streamtune.programs.generate.prompt_files import Prompt

LONG_PROMPT = 4096
"""Minimum number of prompt tokens for which the progress of the prefill is shown."""


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="A run, a checkpoint, a folder with a model or adapters, or a name on the hub.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        str | None,
        option(
            "TEXT",
            "Prompt to answer. [default, without --file: the text piped to stdin, otherwise a chat in the terminal]",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        option(
            "FILE",
            "File with prompts to answer. .json: a list of messages, or a list of conversations. .jsonl: one "
            "conversation per line. Other endings: the text is one prompt.",
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        option(
            "FILE",
            "Image for --prompt, with a vision-language model. `<image>` in the prompt is the place of an image; "
            "otherwise images come first. Repeatable.",
        ),
    ] = None,
    system: Annotated[
        str | None,
        option(
            "TEXT",
            "System message at the start of each conversation. [default: the recipe's default_system, if the "
            "model is given as a run directory; otherwise none]",
        ),
    ] = None,
    raw: Annotated[
        bool,
        option(
            None,
            "Continue the prompt as plain text, without the model's chat template, such as for a base model.",
            "--raw",
        ),
    ] = False,
    max_new_tokens: Annotated[
        int, option("N", "Maximum number of tokens to generate. [default: 512]", min_value=1)
    ] = 512,
    temperature: Annotated[
        float | None,
        option(
            "X",
            "Sampling temperature, from 0 (greedy decoding). [default: the model's generation config, otherwise 0.7]",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        option(
            "X",
            "Nucleus sampling: total probability, up to 1, of the most probable tokens to sample from. "
            "[default: the model's generation config, otherwise 1, which means all tokens]",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        option(
            "N",
            "Number of most probable tokens to sample from; 0 means all tokens. [default: the model's "
            "generation config, otherwise 0]",
        ),
    ] = None,
    seed: Annotated[int, option("N", "Seed of the random numbers for sampling. [default: 0]")] = 0,
    checkpoint: Annotated[
        str | None,
        option(
            "NAME|STEP",
            "Checkpoint of the run to load, by name or step: step-000100 or 100. [default: the final model]",
        ),
    ] = None,
    base: Annotated[
        str | None,
        option(
            "PATH",
            "Folder or hub name of the adapters' base model. [default: the base model recorded in the run or with"
            " the adapters]",
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "xpu", "mps"],
        option("DEVICE", "Device to run on: auto, cpu, cuda, xpu or mps; auto is CUDA, else the CPU. [default: auto]"),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option(
            "float32|bfloat16|float16",
            "Dtype of the weights in memory. [default: the dtype of the stored weights; for adapters, the dtype of "
            "their base model in training]",
        ),
    ] = None,
    vllm: Annotated[
        bool,
        option(
            None,
            "Generate with vLLM, which must be installed, instead of StreamTune. It needs --prompt, --file or piped "
            "text.",
            "--vllm",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate with a trained model: one prompt, a file of prompts, or a chat in the terminal.

    In a chat, Ctrl-C stops the answer, Ctrl-D ends the chat, and /reset starts a new conversation.
    """
    if prompt is not None and file is not None:
        raise ArgumentError("--prompt and --file exclude each other", where="--file", fix="give one of them")
    if image and (file is not None or raw):
        other = "--file" if file is not None else "--raw"
        fix = "name the images in the file" if file is not None else "leave --raw out: images need the chat template"
        raise ArgumentError(f"--image and {other} exclude each other", where="--image", fix=fix)
    _check_ranges(temperature, top_p, top_k, seed)
    with loading_libraries():
        from streamtune.programs.generate.answer import GenerateOptions, answer_with_vllm, load_answerer, require_vllm
        from streamtune.programs.generate.prompt_files import prompt_with_images, read_prompts
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
    prompts: list[Prompt] | None = None
    if file is not None:
        prompts = read_prompts(file)
    elif prompt is not None:
        prompts = [prompt]
    elif not sys.stdin.isatty():
        prompts = [text] if (text := sys.stdin.read()).strip() else []
        if not prompts:
            raise ArgumentError(
                "the prompt is missing: stdin is empty", where="--prompt", fix="give --prompt TEXT or --file FILE"
            )
    if prompts is None and (as_json or vllm or image):
        raise ArgumentError(
            f"{'--json' if as_json else '--vllm' if vllm else '--image'} needs a prompt; it cannot be used in a chat",
            where="--prompt",
            fix="give --prompt TEXT or --file FILE",
        )
    if image:
        assert prompts is not None
        prompts = [prompt_with_images(str(prompts[0]), image)]
    if vllm:
        require_vllm()
        assert prompts is not None
        _print_vllm_answers(prompts, answer_with_vllm(model, prompts, options), as_json=as_json)
        return
    answerer = load_answerer(model, options, notify=print_note, doing=err.status)
    if prompts is None:
        _chat(answerer)
    else:
        _answer_all(answerer, prompts, as_json=as_json)


def _check_ranges(temperature: float | None, top_p: float | None, top_k: int | None, seed: int) -> None:
    for name, value, fits, range_ in (
        (
            "--temperature",
            temperature,
            temperature is None or temperature == 0 or 0.01 <= temperature <= 100,
            "0, or from 0.01 to 100",
        ),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        ("--top-k", top_k, top_k is None or 0 <= top_k < 2**31, "a whole number from 0 to 2147483647"),
        ("--seed", seed, 0 <= seed < 2**32, "a whole number from 0 to 4294967295"),
    ):
        if not fits:
            raise ArgumentError(f"{name} must be {range_}, found {value}", where=name)


# --- prompts --------------------------------------------------------------------------------------------------------


def _answer_all(answerer: Answerer, prompts: list[Prompt], *, as_json: bool) -> None:
    """Answer prompts one after another. Ctrl-C stops the current answer and skips the remaining prompts."""
    if (note := answerer.context_length_warning(prompts)) is not None:
        print_note(note)
    found: list[dict[str, Any]] = []
    stopped = False
    with _stop_on_interrupt(answerer):
        for number, each in enumerate(prompts):
            if len(prompts) > 1 and not as_json:
                err.print(Text(f"prompt {number + 1} of {len(prompts)}", style="dim"))
            answer = _print_answer(answerer, each, quiet=as_json)
            found.append({**_prompt_json(each), **vars(answer)})
            if not as_json:
                print(flush=True)  # the speed is printed on stderr
                _print_speed(answer, answerer.options.max_new_tokens)
            if stopped := answer.stopped:
                break
    if as_json:
        print_json({"model": answerer.description, "sampling": vars(answerer.sampling), "answers": found})
    if stopped:
        raise typer.Exit(130)


def _prompt_json(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, (str, list)):
        return {"prompt": prompt}
    given = {
        "tools": prompt.tools,
        "chat_template_kwargs": dict(prompt.variables),
        "images": [str(each.path or each.where) for each in prompt.images],
    }
    return {
        "prompt": [_show_marks(message) for message in prompt.messages],
        **{name: value for name, value in given.items() if value},
    }


def _show_marks(message: dict[str, Any]) -> dict[str, Any]:
    from streamtune.data.reading.image_cells import MARK, TEXT_MARK

    content = message.get("content")
    return {**message, "content": content.replace(MARK, TEXT_MARK)} if isinstance(content, str) else message


def _print_answer(answerer: Answerer, prompt: Prompt, *, quiet: bool = False) -> Answer:
    """Print one answer as it is generated; show the progress of a long prefill before."""
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
            # A terminal executes control characters, also after a pipe; --json has the text unchanged.
            print(safe_text(text) if out.is_terminal else escape_terminal_controls(text), end="", flush=True)

    try:
        return answerer.answer(prompt, show, reading)
    finally:
        status.stop()


def _print_speed(answer: Answer, max_new_tokens: int) -> None:
    cached_tokens = answer.prompt_tokens - answer.read_tokens
    cached = f" ({cached_tokens:,} cached)" if cached_tokens > 0 else ""
    read = f"prompt: {answer.prompt_tokens:,} tokens{cached}, {answer.prompt_seconds:.1f} s to the first token"
    rate = f", {answer.rate:,.1f} tokens/s" if answer.rate else ""
    limit = "--max-new-tokens" if answer.tokens >= max_new_tokens else "the end of the model's position table"
    end = "stopped" if answer.stopped else "" if answer.finished else f"truncated at {limit}"
    parts = [read, f"answer: {answer.tokens:,} tokens{rate}", end]
    err.print(Text("; ".join(part for part in parts if part), style="dim"), soft_wrap=not err.is_terminal)


def _print_vllm_answers(prompts: list[Prompt], answers: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"answers": [{**_prompt_json(each), **answer} for each, answer in zip(prompts, answers, strict=True)]}
        )
        return
    for answer in answers:
        print(safe_text(answer["text"]) if out.is_terminal else escape_terminal_controls(answer["text"]))
        err.print(Text(f"prompt: {answer['prompt_tokens']:,} tokens; answer: {answer['tokens']:,} tokens", style="dim"))


@contextmanager
def _stop_on_interrupt(answerer: Answerer) -> Iterator[None]:
    """Context manager: Ctrl-C stops the answer; a second Ctrl-C ends the command."""

    def stop(signum: int, frame: Any) -> None:
        interrupts.record_handled_signal()
        if answerer.stopping:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        answerer.stopping = True

    try:
        before = signal.signal(signal.SIGINT, stop)
    except ValueError:  # Python accepts signal handlers in the main thread only
        yield
        return
    try:
        with interrupts.use_other_handlers():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- chat -----------------------------------------------------------------------------------------------------------

HELP = (
    "Ctrl-C: stop the answer; Ctrl-D: end the chat; /reset: new conversation; /system TEXT: new conversation with this "
    "system message; /help: show these commands"
)


def _chat(answerer: Answerer) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 (arrow keys and history in input())
    out.print(Text(safe_text(answerer.description), style="bold"), soft_wrap=not out.is_terminal)
    out.print(Text(HELP, style="dim"), soft_wrap=not out.is_terminal)
    templated = bool(answerer.tokenizer.chat_template) and not answerer.options.raw
    if not templated:
        print_note(
            "no chat template is in use: the model continues each line as plain text, and does not see earlier lines"
        )
    messages: list[dict[str, Any]] = _initial_messages(answerer.options)
    while (line := _read_line()) is not None:
        line = line.strip()
        if not line:
            continue
        if line.startswith("/"):
            messages = _run_chat_command(line, answerer, messages)
            continue
        turns = [*messages, {"role": "user", "content": line}]
        prompt: Prompt = turns if templated else line
        try:
            with _stop_on_interrupt(answerer):
                answer = _print_answer(answerer, prompt)
        except UserError as error:
            print_error(error)
            continue
        print()
        _print_speed(answer, answerer.options.max_new_tokens)
        if templated:
            messages = [*turns, {"role": "assistant", "content": answer.text}]
    print()


def _initial_messages(options: GenerateOptions, system: str | None = None) -> list[dict[str, Any]]:
    text = system if system is not None else options.system
    return [] if text is None else [{"role": "system", "content": text}]


def _run_chat_command(line: str, answerer: Answerer, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run a chat command such as ``/reset``, and return the messages with which the conversation continues."""
    command, _, rest = line.partition(" ")
    if command == "/reset" or command == "/system":
        answerer.clear_cache()
        err.print(Text("a new conversation", style="dim"))
        before = next((each["content"] for each in messages[:1] if each["role"] == "system"), None)
        return _initial_messages(answerer.options, rest.strip() or before if command == "/system" else before)
    if command in ("/exit", "/quit", "/bye"):
        raise typer.Exit(0)
    err.print(
        Text(HELP if command == "/help" else f"unknown command {command}. {HELP}", style="dim"),
        soft_wrap=not err.is_terminal,
    )
    return messages


def _read_line() -> str | None:
    """Return a line from the terminal; None at the end of input. Ctrl-C clears the line."""
    while True:
        before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGINT)

        def interrupt(signum: int, frame: Any) -> None:
            interrupts.record_handled_signal()
            raise KeyboardInterrupt

        with suppress(ValueError):
            signal.signal(signal.SIGINT, interrupt)
        try:
            return input("\n> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            err.print(Text("\nCtrl-D ends the chat", style="dim"))
        except UnicodeDecodeError:
            err.print(Text("this line is not UTF-8", style="dim"))
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGINT, before)
