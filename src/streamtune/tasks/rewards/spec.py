"""The entries of ``reward_funcs`` in a recipe, and the functions that they name.

    exact_match                              a built-in reward (``builtin.BUILTINS``)
    my_rewards:score                         function ``score`` of an importable module
    rewards/length.py:shorter                function ``shorter`` of a file
    regex_match(pattern="^[0-9]+$")          any of them with options: Python literals by keyword

A user's function is called as in TRL, once for a batch:

    def score(prompts, completions, **columns) -> list[float | None]

``prompts`` and ``completions`` are lists of text. If the rows have messages, each element is a list of messages
``{"role": ..., "content": ...}``. Every other column of the rows is a list under its name. A function without
``**columns`` gets only the columns that it names. A function returns a number for each completion, or None for a
completion to which it does not apply.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from streamtune.errors import ArgumentError, did_you_mean
from streamtune.tasks.rewards.builtin import BUILTINS, bind_reward_options

RewardCall = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Sequence[Any]]], Any]

ERROR_KEY = "reward_funcs"
BUILTIN_PATTERN = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*(?P<options>\(.*\))?", re.DOTALL)
USER_PATTERN = re.compile(r"(?P<target>.+?):(?P<name>[A-Za-z_]\w*)\s*(?P<options>\(.*\))?", re.DOTALL)


@dataclass(frozen=True)
class RewardFunction:
    name: str
    call: RewardCall
    """function (prompts, completions, columns) -> unchecked scores"""
    needed_columns: frozenset[str]
    """Names of columns without which the function cannot be called."""
    where: str = ""
    """``file:line`` of a user's function; empty for a built-in reward"""
    built_in: bool = False


def load_reward(spec: str, *, allow_code: bool, directory: Path) -> RewardFunction:
    """Return the reward function that an entry of ``reward_funcs`` names.

    Args:
        spec: Name of a built-in reward, ``module:function`` or ``file.py:function``, possibly with options.
        allow_code: True if the function may run code that a model wrote.
        directory: Folder of modules, to which file paths are relative.

    Raises:
        ArgumentError: The function does not exist, its options are wrong, or it would run code without permission.
    """
    spec = spec.strip()
    if match := BUILTIN_PATTERN.fullmatch(spec):
        return _load_builtin(match["name"], _parse_options(spec, match["options"]), allow_code=allow_code)
    if match := USER_PATTERN.fullmatch(spec):
        function = _load_user_function(match["target"], match["name"], directory)
        return _bind_options(match["name"], function, _parse_options(spec, match["options"]))
    raise ArgumentError(
        f"invalid reward function '{spec}'",
        where=ERROR_KEY,
        fix=f"write module:function, path/to/file.py:function, or one of: {', '.join(BUILTINS)}",
    )


def _parse_options(spec: str, text: str | None) -> dict[str, Any]:
    """Return options such as ``(a=1, b="x")`` as a dict; an empty dict for None."""
    if text is None:
        return {}
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(keyword.arg for keyword in call.keywords):
            return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise ArgumentError(
        f"invalid options of the reward '{spec}'",
        where=ERROR_KEY,
        fix='write Python literals by keyword, like regex_match(pattern="^[0-9]+$", whole=True)',
    )


def _load_builtin(name: str, options: dict[str, Any], *, allow_code: bool) -> RewardFunction:
    if name not in BUILTINS:
        raise ArgumentError(
            f"unknown built-in reward '{name}'",
            where=ERROR_KEY,
            fix=did_you_mean(name, BUILTINS)
            or f"choose one of: {', '.join(BUILTINS)}; or write module:function or file.py:function",
        )
    builtin = BUILTINS[name]
    if builtin.runs_code and not allow_code:
        raise ArgumentError(
            f"the reward '{name}' runs code that the model writes",
            where=ERROR_KEY,
            fix="to allow it, set allow_code: true or run with --allow-code. The code runs in a subprocess with limits "
            "on time and memory, but with your user's rights and network",
        )
    _check_options(name, options, builtin.option_names, builtin.option_names)
    call, needs = bind_reward_options(builtin, options)
    return RewardFunction(name, call, needs, built_in=True)


def _check_options(name: str, options: Iterable[str], accepted: Sequence[str], suggested: Sequence[str]) -> None:
    for option in options:
        if option not in accepted:
            raise ArgumentError(
                f"the reward '{name}' has no option '{option}'",
                where=ERROR_KEY,
                fix=did_you_mean(option, suggested) or f"its options: {', '.join(suggested) or 'none'}",
            )


def _load_user_function(target: str, name: str, directory: Path) -> Callable[..., Any]:
    module = import_user_module(target, directory)
    function = getattr(module, name, None)
    if function is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(
            f"{target} has no function '{name}'",
            where=ERROR_KEY,
            fix=did_you_mean(name, callables) or f"its functions: {', '.join(callables) or 'none'}",
        )
    if not callable(function):
        raise ArgumentError(
            f"'{name}' of {target} must be a function, found {type(function).__name__}", where=ERROR_KEY
        )
    if inspect.iscoroutinefunction(function):
        raise ArgumentError(
            f"'{name}' of {target} is an async function",
            where=ERROR_KEY,
            fix="write a plain function, which may call asyncio.run",
        )
    return function


def import_user_module(target: str, directory: Path) -> ModuleType:
    """Import ``path.py`` or ``package.module``. It is imported only once, even if the file changes later."""
    return _import_file(target, directory) if target.endswith(".py") else _import_module(target, directory)


def _import_file(target: str, directory: Path) -> ModuleType:
    path = directory / Path(target).expanduser()
    if not path.is_file():
        raise ArgumentError(f"there is no file {target}", where=ERROR_KEY, fix=f"paths are relative to {directory}")
    # A unique name, so that the file shadows no module, and two files of the same name are two modules.
    name = f"_streamtune_reward_{re.sub(r'[^A-Za-z0-9]', '_', str(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    loaded = importlib.util.spec_from_file_location(name, path.resolve())
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    sys.modules[name] = module
    try:
        with restore_globals():
            loaded.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module that calls sys.exit() too
        del sys.modules[name]
        raise _import_error(target, error) from error
    return module


def _import_module(target: str, directory: Path) -> ModuleType:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # at the end: a file next to the recipe shadows no installed module
    try:
        with restore_globals():
            return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name and (target == error.name or target.startswith(f"{error.name}.")):
            raise ArgumentError(
                f"there is no module '{target}'",
                where=ERROR_KEY,
                fix=f"install it, put it into {directory}, or write path/to/file.py:function",
            ) from error
        raise _import_error(target, error) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _import_error(target, error) from error


def _import_error(target: str, error: BaseException) -> ArgumentError:
    line = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) and error.filename else ERROR_KEY
    return ArgumentError(f"importing {target} raised {type(error).__name__}: {error}", where=line)


def _bind_options(name: str, function: Callable[..., Any], options: dict[str, Any]) -> RewardFunction:
    """Return a user's function with its options bound. Calls pass only arguments that the function accepts."""
    try:
        parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    except ValueError:  # written in C: its parameters are unknown, so all arguments are passed
        parameters = {}
    accepts_all = not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    keyword_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [key for key, parameter in parameters.items() if parameter.kind in keyword_kinds]
    always_passed = ("prompts", "completions")
    if not accepts_all:
        _check_options(name, options, accepted, [key for key in accepted if key not in always_passed])
    for key, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ArgumentError(
                f"the parameter '{key}' of the reward function '{name}' is positional-only",
                where=ERROR_KEY,
                fix="declare def name(prompts, completions, **columns)",
            )
    needs = frozenset(
        key
        for key in accepted
        if parameters[key].default is inspect.Parameter.empty and key not in (*always_passed, *options)
    )

    def call_function(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> Any:
        arguments = {**columns, "prompts": prompts, "completions": completions, **options}
        return function(**{key: value for key, value in arguments.items() if accepts_all or key in accepted})

    return RewardFunction(name, call_function, needs, _definition_line(function))


def _definition_line(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


PACKAGE_FOLDER = Path(__file__).resolve().parents[2]
INSTALLED_FOLDERS = ("site-packages", "dist-packages")


def reward_sources(specs: list[str], directory: Path) -> dict[str, Path]:
    """Return the files of the user's functions, and the files that their modules import from the same folder.

    Installed packages are left out. Modules that a function imports only when it is called are left out too.

    Returns:
        Name of a file -> its path. Names do not change if the folder is moved.
    """
    files: dict[str, Path] = {}
    for spec in specs:
        match = USER_PATTERN.fullmatch(spec.strip())
        if match is None:
            continue
        module = import_user_module(match["target"], directory)
        file = _source_file(module)
        if file is None:
            continue
        package = sys.modules.get(module.__name__.partition(".")[0])
        package_file = _source_file(package) if package is not None and "." in module.__name__ else None
        recipe_folder = directory.resolve()
        root = recipe_folder if file.is_relative_to(recipe_folder) else (package_file or file).parent
        for path in _imported_files(module, root):
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
            files[f"{match['target'].rpartition('/')[2]}: {name}"] = path
    return files


def _imported_files(module: ModuleType, root: Path) -> Iterator[Path]:
    """Yield the file of a module, and the files below ``root`` from which it imports, directly or indirectly."""
    seen, pending = set[str](), [module]
    while pending:
        current = pending.pop()
        file = _source_file(current)
        if file is None or current.__name__ in seen:
            continue
        seen.add(current.__name__)
        if current is not module and not _is_user_file(file, root):
            continue
        yield file
        for value in list(vars(current).values()):
            if isinstance(value, ModuleType):
                pending.append(value)
                continue
            with suppress(Exception):  # reading an attribute may raise anything
                name = value.__module__
                if isinstance(name, str) and name in sys.modules:
                    pending.append(sys.modules[name])


def _is_user_file(file: Path, root: Path) -> bool:
    if not file.is_relative_to(root) or file.is_relative_to(PACKAGE_FOLDER):
        return False
    return not any(part in INSTALLED_FOLDERS for part in (*root.parts, *file.relative_to(root).parts))


def _source_file(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) and name.endswith(".py") else None


@contextmanager
def restore_globals() -> Iterator[None]:
    """Restore torch's global state, the working directory and the standard streams after the ``with`` block.

    The global state is torch's generators, grad mode and default dtype. Inside the block, torch's generators have a new
    seed, drawn from the outer generator. So a function's call of ``torch.manual_seed`` does not affect rollouts, and a
    resumed run draws the same numbers. The generators of ``random`` and numpy are not restored.
    """
    streams, folder = (sys.stdout, sys.stderr), _working_directory()
    with _restore_torch():
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            if folder is not None and _working_directory() != folder:
                with suppress(OSError):
                    os.chdir(folder)


@contextmanager
def _restore_torch() -> Iterator[None]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(torch.randint(2**31, ())))
        try:
            yield
        finally:
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)


def _working_directory() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - a string is what is compared
    except OSError:
        return None
