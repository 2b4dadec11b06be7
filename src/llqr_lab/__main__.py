"""The entry point of the command ``llqr`` and of ``python -m llqr_lab``."""

import sys
from importlib.util import find_spec

LAB_PACKAGES = ("matplotlib", "numpy", "rich", "sklearn", "typer")


def main() -> None:
    """Run the command line, or say which extra to install when its packages are missing."""
    missing = [name for name in LAB_PACKAGES if find_spec(name) is None]
    if missing:
        print(
            f"The command llqr needs packages that are not installed ({', '.join(missing)}): "
            "run  pip install 'llqr[lab]'  and try again.",
            file=sys.stderr,
        )
        sys.exit(2)

    from llqr_lab.cli import app

    app()


if __name__ == "__main__":
    main()
