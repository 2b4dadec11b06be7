"""The entry point of the command ``llqr`` and of ``python -m llqr_lab``."""

from llqr_lab.cli import app as main

if __name__ == "__main__":
    main()
