"""`python -m tessera ARGUMENT...` is the command tessera."""

import os
import shutil
import sys


def main():
    """Replaces this process by the command: that of the package, or else the installed one."""
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "tessera")
    command = own if os.path.exists(own) else shutil.which("tessera")
    if command is None:
        print(
            f"tessera: the command is neither at {own} nor installed, expected one of them; on Debian: apt-get install"
            " tessera",
            file=sys.stderr,
        )
        return 3
    os.execv(command, ["tessera", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
