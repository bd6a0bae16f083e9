"""Save and load the state of a training, so that a run that was killed goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

NAME = "checkpoint.pt"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write the state; a crash while writing leaves the older checkpoint as it was. For one rank to call."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{NAME}.part"
    torch.save(state, part)
    part.replace(folder / NAME)


def load(folder: Path) -> dict[str, Any] | None:
    """The state last saved in a folder, on the CPU, or None if there is none."""
    path = folder / NAME
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
