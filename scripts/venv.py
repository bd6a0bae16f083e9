"""Makes a virtual environment, or brings it up to date, with what constraints.txt pins: `python3 venv.py .venv`."""

import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent.parent


def works(python):
    """Whether the file `python` starts, is new enough and has pip."""
    probe = f"import sys, pip; sys.exit(sys.version_info < {OLDEST})"
    return python.exists() and subprocess.run([str(python), "-c", probe], stderr=subprocess.DEVNULL).returncode == 0


def main(folder):
    here = "Python {}.{}".format(*sys.version_info)
    if sys.version_info < OLDEST:
        sys.exit(f"{sys.executable} is {here}, but 3.11 or newer is needed. Name another: make PYTHON=python3.12 ...")
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not works(python):
        print(f"Making {folder} with {here} (takes a few minutes)", flush=True)
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)])
        if made.returncode or not works(python):
            sys.exit(f"{sys.executable} cannot make an environment with pip. On Debian: apt install python3-venv")
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    # The build back end is installed first because pip does not apply -c to build environments of its own.
    for what in (["hatchling", "editables"], ["--no-build-isolation", "-e", f"{ROOT}[test,dev]"]):
        failed = subprocess.run(pip + what).returncode
        if failed:
            sys.exit(failed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
