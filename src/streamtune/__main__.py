"""Entry point of ``streamtune`` and ``python -m streamtune``: handle signals, import the rest, and run the command."""

# Built in; ``signal`` imports ``enum``, during which Ctrl-C would show a traceback.
import _signal  # type: ignore[import-not-found]
import gc
import os

__all__ = ["main"]


def main() -> None:
    """Run the command in ``sys.argv``, and exit with its exit code."""
    # Nothing has to be cleaned up yet; the real handler, installed below, takes time to import.
    if _signal.getsignal(_signal.SIGINT) == _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda signum, frame: os._exit(128 + signum))
    from streamtune.base.safe_path import remove_working_directory_from_path

    remove_working_directory_from_path()  # before any import that could find a file there
    from streamtune.base import interrupts
    from streamtune.base.streams import replace_standard_streams

    replace_standard_streams()
    interrupts.exit_on_signals(for_good=True)
    gc.disable()  # imports make no garbage
    from streamtune.base.libraries import mark_command_process
    from streamtune.cli import main as run

    gc.enable()
    mark_command_process()
    run()


if __name__ == "__main__":
    main()
