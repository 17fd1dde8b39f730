"""``python -m kvlockstep`` is the command ``kvlockstep``."""

import sys


def main() -> None:
    """Run the command line; an interrupt while it is loaded ends as any other."""
    try:
        from kvlockstep.fuzz import cli
    except KeyboardInterrupt:
        print("kvlockstep: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
