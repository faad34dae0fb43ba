"""``python -m streamtune`` is the command ``streamtune``."""

from streamtune.cli import main

if __name__ == "__main__":
    main()
