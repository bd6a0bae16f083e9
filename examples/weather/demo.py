"""The main job, as `make demo` runs it: make weather, train on it with every sample split over 2 ranks, report.

The same training is first run for a few steps in one process, so that the report can say how far the two are apart.
What this does not know itself (such as --lead 12 or --variables t2m) goes to train.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from make_store import write_store
from series import look_at

HERE = Path(__file__).resolve().parent
CELLS = 240 * 73 * 144  # rows x columns x steps that two cores train on in about a minute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="path or URL to train on (default: weather that the demo makes itself)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where all results go")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share a sample")
    parser.add_argument("--steps", type=int, help="training steps (default: what takes about a minute)")
    parser.add_argument("--compare-steps", type=int, default=20, help="steps of them to run in one process too")
    given, more = parser.parse_known_args()
    begin = time.monotonic()
    out = given.out if given.data is None else given.out / Path(given.data.rstrip("/")).stem
    data = given.data or str(make_weather(given.out / "weather.zarr"))
    steps = given.steps or default_steps(data)
    options = ["--data", data, "--steps", str(steps), *more]

    reference = out / "one-process"
    print(f"\nTraining in one process, {min(given.compare_steps, steps)} steps to compare with")
    train([sys.executable], [*options, "--stop-after", str(given.compare_steps), "--out", str(reference)], ranks=1)
    print(f"\nTraining on {given.ranks} ranks that share every sample, {steps} steps")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.ranks)]
    train(launcher, [*options, "--compare", str(reference), "--out", str(out)], ranks=given.ranks)
    print(f"\nAll took {time.monotonic() - begin:.0f} s")


def make_weather(path: Path) -> Path:
    """The demo's own store, written once."""
    if not path.exists():
        print(f"Simulating weather, to {path}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_store(path)
    return path


def default_steps(data: str) -> int:
    """Fewer steps the larger the grid."""
    rows, columns = look_at(data).shape
    return max(20, min(300, CELLS // (rows * columns)))


def train(launcher: list[str], options: list[str], *, ranks: int) -> None:
    """Run train.py and wait for it; where it fails, so does this program."""
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run([*launcher, str(HERE / "train.py"), *options], env=environment, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
