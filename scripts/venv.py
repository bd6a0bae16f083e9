"""Makes a virtual environment, or brings it up to date, with what constraints.txt pins: `python3 venv.py .venv`."""

import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent


def works(python):
    """Whether `python` starts, is new enough and has pip."""
    probe = "import sys, pip; sys.exit(sys.version_info < {})".format(OLDEST)
    return python.exists() and subprocess.run([str(python), "-c", probe], stderr=subprocess.DEVNULL).returncode == 0


def main(folder):
    if sys.version_info < OLDEST:
        found = "{} is Python {}.{}".format(sys.executable, *sys.version_info[:2])
        sys.exit(found + ", but 3.11 or newer is needed. Name another: make PYTHON=python3.12 ...")
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not works(python):
        print("Making {} with Python {}.{} (a few minutes)".format(folder, *sys.version_info[:2]), flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)])
        if made.returncode or not works(python):
            sys.exit("This Python cannot make an environment with pip; on Debian and Ubuntu: apt install python3-venv")
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "hatchling", "editables"], check=True)  # pinned too, so not left to pip's own build environment
    subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT) + "[test,dev]"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
