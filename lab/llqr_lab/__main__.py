"""The entry point of the command ``llqr`` and of ``python -m llqr_lab``."""

import sys
from importlib.util import find_spec

LAB_PACKAGES = ("matplotlib", "numpy", "rich", "sklearn", "typer")


def main() -> None:
    """Run the command line, or say what to install when its packages are missing."""
    missing = [name for name in LAB_PACKAGES if find_spec(name) is None]
    if missing:
        print(
            f"The command llqr needs packages that are not installed ({', '.join(missing)}): "
            "run  make  in the checkout, or  pip install -e . -e ./lab",
            file=sys.stderr,
        )
        sys.exit(2)

    from llqr_lab.cli import app

    app()


if __name__ == "__main__":
    main()
