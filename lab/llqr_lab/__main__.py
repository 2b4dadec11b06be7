"""The entry point of the command ``llqr`` and of ``python -m llqr_lab``."""

from llqr_lab.cli import app


def main() -> None:
    app()


if __name__ == "__main__":
    main()
